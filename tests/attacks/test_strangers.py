"""Whoever reaches nginx's port alone gets nothing, and a run goes on.

`shufl run --on` has begun the run, and shows it. nginx has the very file that `shufl provision`
writes. Every attempt is Flower's own command or process, or a real request.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPSConnection

import httpx
import pytest
import tomli_w
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from deployment_world import NAME, Nginx, World, command, run_flwr, write_flower_app
from ports import free_port
from run_world import LIMIT, wait_until
from shufl.deploy.deployment import flower_environment
from shufl.deploy.doctor import examine
from shufl.shuffler.keys import make_flower_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]
_PROTOBUF = {"content-type": "application/protobuf"}


class Stranger:
    """What a stranger has of a deployment behind nginx, in which a run goes on: addresses."""

    def __init__(self, folder, deployed):
        self.folder, self.deployed = folder, deployed
        server = deployed.deployment.server
        self.proxy = f"127.0.0.1:{server.port}"
        self.superlink = f"127.0.0.1:{server.local_port}"
        self.authority = deployed.folder / "server" / "keys" / "flower-authority.pem"

    def post(self, address, path, content=b"", tls=True):
        """Status of a request without any credential, whose path is sent as it is."""
        if tls:
            connection = HTTPSConnection(address, context=self.trusting(), timeout=LIMIT)
        else:
            connection = HTTPConnection(address, timeout=LIMIT)
        with closing(connection):
            connection.request("POST", path, content, _PROTOBUF)
            return connection.getresponse().status

    def trusting(self):
        """Trusts the authority; as strict as Python 3.13 is by itself."""
        context = ssl.create_default_context(cafile=self.authority)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    def home(self, name, address):
        """A folder with a connection of Flower's to an address."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        connection = {"address": address, "root-certificates": str(self.authority)}
        content = {"superlink": {"default": "there", "there": connection}}
        (home / "config.toml").write_text(tomli_w.dumps(content))
        return home

    @property
    def runs(self):
        """The runs that go on, as the server's operator sees them."""
        runs = json.loads(self.deployed.flwr("list", NAME, "--format", "json"))["runs"]
        return [each for each in runs if not each["status"].startswith("finished")]

    def nodes(self):
        """The nodes, as the server's operator sees them."""
        listed = self.deployed.flwr("supernode", "list", NAME, "--format", "json")
        return json.loads(listed)["nodes"]

    def wait_for_statuses(self, *expected):
        """Waits until these are those of the nodes, which are in order."""
        deadline = time.monotonic() + LIMIT
        while tuple(found := sorted(node["status"] for node in self.nodes())) != expected:
            assert time.monotonic() < deadline, (found, *self.said())

    def said(self):
        """What each node's SuperNode has said last."""
        files = sorted(self.deployed.folder.glob("ward-*/supernode.out"))
        return [f"{file}: {file.read_text()[-3000:]}" for file in files]


@pytest.fixture(scope="module")
def world(tmp_path_factory, warm_deployment):
    folder = tmp_path_factory.mktemp("w")
    about = {"hidden": 4096, "round_timeout": 60.0, "proxied": True}
    deployed = World(folder, nodes=2, rounds=1000, **about)
    shuffler = deployed.folder / "shuffler-1/nginx.conf"
    with ExitStack() as stack:
        stack.callback(Nginx(deployed.server / "nginx.conf", folder / "nginx").stop)
        stack.callback(Nginx(shuffler, folder / "stream", stream=True).stop)
        stack.enter_context(deployed)
        deployed.run()
        deployed.wait_until(lambda: bool(deployed.shown), "the ServerApp")
        stranger = Stranger(folder, deployed)
        stranger.wait_for_statuses("online", "online")
        yield stranger


def _write_app(folder, marker):
    """A Flower app whose server part leaves a file behind."""
    server = f"""
from pathlib import Path
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    Path({str(marker)!r}).write_text("was here")
"""
    write_flower_app(folder, server, "from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    return folder


def test_a_stranger_can_submit_list_and_stop_nothing(world):
    marker = world.folder / "proxy-marker"
    app = _write_app(world.folder / "proxy-app", marker)
    home = world.home("stranger", world.proxy)
    (run,) = world.runs
    attempts = (
        ("run", str(app), "there"),
        ("list", "there"),
        ("stop", run["run-id"], "there"),
        ("supernode", "list", "there"),
    )
    for attempt in attempts:
        done = run_flwr(home, *attempt)
        assert "403" in done.stdout, done.stdout
    (now,) = world.runs
    assert (now["run-id"], now["status"]) == (run["run-id"], run["status"])
    assert not marker.exists()


def test_a_stranger_reaches_nothing_but_the_fleet_routes(world):
    routes = [path for method, path in PROTOBUF_REQUEST_TYPES if method == "POST"]
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task"} <= set(routes)
    tricks = (
        *("/", "/health", "/docs", "/openapi.json", "/v1/responses", "//v1/control/list-runs"),
        *("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs"),
        *("/v1/fleet/..%2fcontrol%2flist-runs", "/v1/fleet/./../runtime/acquire-task"),
        *("/V1/fleet/../control/list-runs", "/v1/fleet/..;/control/list-runs"),
    )
    for path in routes:
        expected = 401 if path.startswith("/v1/fleet/") else 403
        assert world.post(world.proxy, path) == expected, path
    for path in tricks:
        assert world.post(world.proxy, path) in (400, 403, 404), path


def test_a_stranger_cannot_pull_what_is_a_node_s(world):
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)
    server = world.proxy
    theirs = Node(node_id=int(world.nodes()[0]["node-id"]))
    signed = [NodeAuthHttpInterceptor(private, public)]
    root = world.authority.read_bytes()
    with FleetHttpClient.from_server_address(server, False, root, interceptors=signed) as client:
        attempts = (
            (client.PullMessages, PullMessagesRequest(node=theirs)),
            (client.ActivateNode, ActivateNodeRequest(public_key=key, heartbeat_interval=30.0)),
            (client.RegisterNode, RegisterNodeFleetRequest(public_key=key)),
        )
        for call, request in attempts:
            with pytest.raises(httpx.HTTPStatusError) as refused:
                call(request)
            assert refused.value.response.status_code in (401, 403, 412)
    assert len(world.nodes()) == 2


def test_a_supernode_that_is_not_registered_gets_no_place(world):
    make_flower_key(world.folder)
    _refused_supernode(world, world.folder / "flower.key")
    assert len(world.nodes()) == 2


def test_long_and_slow_requests_end_at_the_proxy(world):
    path = "/v1/fleet/push-messages"
    assert world.post(world.proxy, path, b"x" * 2**21) == 413
    host, port = world.proxy.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=LIMIT) as plain,
        world.trusting().wrap_socket(plain, server_hostname=host) as slow,
    ):
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n".encode())
        answer = slow.recv(100)
    assert answer == b"" or b" 408 " in answer


@pytest.mark.parametrize("site", ["server", "shuffler-1"])
def test_doctor_reaches_what_a_site_offers_through_nginx(world, site):
    found = {each.what: each.trouble for each in examine(world.deployed.folder / site)}
    assert found["nginx"] == "" and not any(found.values()), found


def test_a_withdrawn_node_does_not_come_back(world):
    keys = world.deployed.folder / "ward-2" / "keys"
    world.deployed.end("ward-2", "supernode")
    world.wait_for_statuses("offline", "online")
    (gone,) = (node["node-id"] for node in world.nodes() if node["status"] == "offline")
    world.deployed.flwr("supernode", "unregister", gone, NAME)
    _refused_supernode(world, keys / "flower.key")
    world.wait_for_statuses("online", "unregistered")


def test_the_run_has_gone_on(world):
    before = len(world.deployed.rows)

    def released():
        return "released" in {row["outcome"] for row in world.deployed.rows[before + 1 :]}

    world.deployed.wait_until(released, "a round that began after the attacks")


def test_who_reaches_flowers_own_ports_submits_code_and_claims_tasks(world):
    """What the proxy is for, and the firewall, which is not loaded here."""
    marker = world.folder / "local-marker"
    app = _write_app(world.folder / "local-app", marker)
    home = world.home("local", world.superlink)
    (run,) = world.runs
    assert run["run-id"] in run_flwr(home, "list", "there", "--format", "json").stdout
    for port in (world.superlink, f"127.0.0.1:{world.deployed.deployment.nodes[0].port}"):
        tls = port == world.superlink
        assert world.post(port, "/v1/runtime/acquire-task", tls=tls) == 200
    done = run_flwr(home, "run", str(app), "there")
    assert done.returncode == 0, done.stdout
    wait_until(marker.exists, 90, "the stranger's code")
    assert run_flwr(home, "stop", run["run-id"], "there").returncode == 0
    wait_until(lambda: not world.runs, 90, "the end of the run")
    code, _, err = world.deployed.finish()
    stopped = "error: the run was ended from outside, as by flwr stop\n"
    assert (code, err) == (1, stopped)


def _refused_supernode(world, key):
    """Starts Flower's SuperNode with a key, which must end without having got a place."""
    arguments = (
        *("--superlink", world.proxy, "--port", str(free_port())),
        *("--root-certificates", str(world.authority)),
        *("--auth-supernode-private-key", str(key), "--max-retries", "1"),
    )
    with (world.folder / "supernode.out").open("w+") as said:
        process = subprocess.Popen(
            [command("shufl-supernode"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=flower_environment(world.folder / "supernode"),
            process_group=0,
        )
        try:
            assert process.wait(LIMIT) != 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        said.seek(0)
        output = said.read()
    assert "Failed to activate SuperNode" in output, output
    assert "SuperNode ID" not in output
