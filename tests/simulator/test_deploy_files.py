"""What operators copy: the files of `deploy/`, and the units that `shufl provision` writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from run_world import LIMIT
from shufl.deploy.deployment import PROGRAMS, Deployment
from shufl.deploy.provision import provision
from shufl.shuffler.config import Limits
from shufl.shuffler.service.metrics import Metrics

SUPERNODE = """
import threading
from types import SimpleNamespace
from shufl.deploy import supernode

def ends():
    threading.Thread(target=threading.Event().wait).start()
    {how}

supernode.entry_points = lambda **of: [SimpleNamespace(load=lambda: ends)]
supernode.main()
"""
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def _program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def _run_script(tmp_path: Path, folder: Path, *command: object) -> list[str]:
    """What a shell script prints in a folder, with the programs of `tmp_path` before others."""
    done = subprocess.run(
        ["sh", *map(str, command)],
        cwd=folder,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def example():
    return Deployment.of_file(DEPLOY / "example" / "deployment.toml")


@pytest.fixture(scope="module")
def sites(example, tmp_path_factory):
    out = tmp_path_factory.mktemp("sites")
    provision(example, DEPLOY / "example", out, lambda name, key: True, in_place=True)
    return out


def test_compose_has_the_example_s_sites_and_hosts(example):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    folders = {volume.split(":")[0] for each in services.values() for volume in each["volumes"]}
    names = ["server", *(each.name for each in (*example.shufflers, *example.nodes))]
    assert {f"./sites/{name}" for name in names} <= folders
    hosts = {"superlink": example.server.host, "shuffler-1": example.shufflers[0].host}
    for service, host in hosts.items():
        assert services[service]["networks"]["parties"]["aliases"] == [host]
    for node in example.nodes:
        names = node.name, f"{node.name}-supernode", f"{node.name}-clientapp"
        assert len({services[name].get("user") for name in names}) == 3


def test_docker_compose_accepts_the_file():
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("docker has no compose")
    checked = ["docker", "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    subprocess.run(checked, check=True)


def test_compose_fits_the_schema_of_its_specification():
    schema = ["--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    subprocess.run([str(PROGRAMS / "check-jsonschema"), *schema], check=True)


def test_manifests_fit_the_schema_of_kubernetes():
    subprocess.run(
        [str(PROGRAMS / "kubernetes-validate"), "--strict", *map(str, MANIFESTS)], check=True
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_party_has_a_namespace_and_runs_nothing_as_root(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    (namespace,) = [each["metadata"]["name"] for each in documents if each["kind"] == "Namespace"]
    others = [each["metadata"]["namespace"] for each in documents if each["kind"] != "Namespace"]
    assert set(others) == {namespace}
    (pods,) = [each["spec"] for each in documents if each["kind"] == "StatefulSet"]
    containers = pods["template"]["spec"]["containers"]
    assert all(each["securityContext"]["runAsNonRoot"] for each in containers)
    assert all(":" in each["image"] and "latest" not in each["image"] for each in containers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(sites):
    units = sorted(sites.glob("*/*.service"))
    assert len(units) == 9
    for unit in units:
        for name in ("shufl", "flower-superlink", "shufl-supernode", "flower-superexec"):
            _program(unit.parent / ".venv" / "bin", name, "true")
        checked = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(checked, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        exposed = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
        done = subprocess.run(exposed, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_alerts_and_dashboard_ask_for_metrics_that_there_are(sites):
    """Their names; where promtool is at hand, the rules' grammar too."""
    folder = DEPLOY / "monitoring"
    rules = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    alerts = [rule for group in rules for rule in group["rules"]]
    dashboard = json.loads((folder / "dashboard.json").read_text())
    asked = [rule["expr"] for rule in alerts]
    asked += [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    assert len(asked) == 24 and len({rule["alert"] for rule in alerts}) == len(alerts)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    told = re.findall(r'"(shufl_\w+)"', (DEPLOY / "metrics.py").read_text())
    told += [name for each in Metrics().registry.collect() for name in (each.name,)]
    known = {*told, *(f"{name}_total" for name in told)}
    assert known >= {name for text in asked for name in re.findall(r"shufl_\w+", text)}
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "rules", str(folder / "alerts.yml")], check=True)


def test_a_container_starts_what_the_unit_says(example, sites, tmp_path):
    address = f"{example.server.host}:{example.server.port}"
    node = example.nodes[0]
    cases = [("server", example.server.process)]
    cases += [(node.name, process) for process in node.processes(address, 120)]
    for site, process in cases:
        program, *arguments = shlex.split(process.command)
        _program(tmp_path, program, 'printf "%s\\n" "$@"')
        start = DEPLOY / "site.sh", "start", process.name
        assert _run_script(tmp_path, sites / site, *start) == arguments


def test_a_container_gives_a_site_s_files_their_owners(sites, tmp_path):
    for name in ("chown", "chmod"):
        _program(tmp_path, name, f'echo {name} "$@"')
    _program(tmp_path, "setpriv", 'shift 3; exec "$@"')
    _program(tmp_path, "stat", "echo 0")  # as if .venv were root's
    for site in ("ward-1", "server", "shuffler-1"):
        folder = shutil.copytree(sites / site, tmp_path / site)
        lines = _run_script(tmp_path, folder, DEPLOY / "site.sh", "install")
        assert lines[0] == "chown shufl:shufl ."
        assert {"chown -R shufl:shufl ./keys", "chmod -R u=rwX,g=,o= ./keys"} <= {*lines}
        assert not [line for line in lines if "shufl:shufl ./.venv" in line]
        node = site == "ward-1"
        assert ("chown -R shufl-app:shufl app" in lines, (folder / "app").exists()) == (node, node)


def test_a_machine_is_installed_by_one_command_that_may_be_run_again(sites, tmp_path):
    """With programs that only note how they were called: nobody becomes root for it."""
    called = tmp_path / "called"
    for name in ("groupadd", "useradd", "chown", "chmod", "nft", "systemctl", "install", "id"):
        known = f"grep -q useradd.*$1 {called}" if name == "id" else "true"
        _program(tmp_path, name, f'{known} && echo {name} "$@" >> {called}')
    _program(tmp_path, "getent", f"grep -q groupadd {called}")
    _program(tmp_path, "setpriv", 'shift 3; exec "$@"')
    _program(tmp_path, "stat", "echo 0")  # as if .venv were root's
    for site, accounts in (("ward-1", 3), ("server", 1), ("shuffler-1", 1)):
        called.write_text("")
        folder = shutil.copytree(sites / site, tmp_path / site, dirs_exist_ok=True)
        script = (folder / "install.sh").read_text().replace("/etc/nftables.conf", f"{tmp_path}/n")
        (folder / "install.sh").write_text(script.replace("/etc/nginx", f"{tmp_path}/nginx"))
        for _ in range(2):
            _run_script(tmp_path, tmp_path, folder / "install.sh")
        lines = called.read_text().splitlines()
        assert sum(line.startswith("useradd") for line in lines) == accounts
        assert sum(line.startswith("groupadd") for line in lines) == 1
        assert sum(line == "systemctl daemon-reload" for line in lines) == 2
        closed = site != "shuffler-1"
        assert sum(line == "nft -f /etc/shufl/shufl.nft" for line in lines) == 2 * closed
        included = tmp_path / "n"
        assert (included.read_text().count("include") if included.exists() else 0) == closed
        included.unlink(missing_ok=True)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_shufflers_of_several_deployments_share_one_nginx(sites, tmp_path):
    """One of them is the first one's file as shufl 0.1.0 installed it."""
    for name in ("groupadd", "useradd", "chown", "chmod", "systemctl", "install", "id", "getent"):
        _program(tmp_path, name, "true")
    _program(tmp_path, "setpriv", 'shift 3; exec "$@"')
    _program(tmp_path, "stat", "echo 0")  # as if .venv were root's
    etc, own = tmp_path / "nginx", (sites / "shuffler-1/nginx.conf").read_text()
    (etc / "modules-enabled").mkdir(parents=True)
    (etc / "modules-enabled/99-shufl.conf").write_text(own)
    for prefix, port in (("shufl", "9000"), ("other", "9443")):
        folder = shutil.copytree(sites / "shuffler-1", tmp_path / prefix)
        local = str(int(port) + 1)
        nginx = own.replace(":9001", f":{local}").replace("-9001", f"-{local}")
        (folder / "nginx.conf").write_text(nginx.replace(":9000", f":{port}"))
        script = (folder / "install.sh").read_text().replace("/etc/nginx", str(etc))
        (folder / "install.sh").write_text(script.replace("/shufl.conf", f"/{prefix}.conf"))
        _run_script(tmp_path, tmp_path, folder / "install.sh")
    module = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
    load = f"load_module {module};\n" if module.exists() else ""
    log = f"error_log {tmp_path}/log; pid {tmp_path}/pid; events {{}}\n"
    main = tmp_path / "main.conf"
    main.write_text(f"{load}{log}include {etc}/modules-enabled/*.conf;\n")
    tried = subprocess.run(["nginx", "-T", "-c", str(main)], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.count("stream {") == 1 and tried.stdout.count("limit_conn_zone") == 2


def test_a_release_has_its_time_wherever_a_shuffler_is_stopped(sites):
    seconds = Limits().stop_seconds
    unit = (sites / "shuffler-1/shufl-shuffler.service").read_text()
    manifest = (DEPLOY / "kubernetes/shuffler.yaml").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    allowed = [
        re.search(r"TimeoutStopSec=(\d+)", unit)[1],
        re.search(r"terminationGracePeriodSeconds: (\d+)", manifest)[1],
        *(compose[name]["stop_grace_period"][:-1] for name in ("shuffler-1", "shuffler-1-nginx")),
    ]
    assert min(map(float, allowed)) > seconds


_PROBE = """
import os, socket, sys
ports = [int(sys.argv[1]), 9100]
listening = [socket.create_server(("127.0.0.1", port)) for port in ports]
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 9100))
for account in sys.argv[2:]:
    if os.fork() == 0:
        os.setuid(int(account))  # and imports nothing from here on
        for port in ports:
            try:
                socket.socket().connect(("127.0.0.1", port))
                print(account, "in", flush=True)
            except ConnectionRefusedError:
                print(account, "out", flush=True)
        try:
            socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", datagrams.getsockname())
            print(account, "in", flush=True)
        except PermissionError:
            print(account, "out", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network of its own")
@pytest.mark.skipif(
    not all(map(shutil.which, ("nft", "unshare", "ip"))),
    reason="nft, unshare or ip is not installed",
)
def test_other_accounts_do_not_reach_flowers_ports_nor_hostile_code_another(
    example, sites, tmp_path
):
    accounts = {"shufl-app": 64_002, "shufl-flower": 64_001, "shufl": 64_000, "www-data": 33}
    stranger = 64_003
    node = example.nodes[0]
    cases = (
        ("server", example.server.local_port, {0, 64_000, 33}),
        (node.name, node.port, {0, 64_002}),
    )
    for site, port, allowed in cases:
        rules = (sites / site / "nftables.conf").read_text()
        for name, number in accounts.items():
            rules = re.sub(rf"(?<=[ ,]){name}(?=[ ,])", str(number), rules)
        (tmp_path / "rules").write_text(rules)
        (tmp_path / "probe.py").write_text(_PROBE)
        tried = [0, stranger, *accounts.values()]
        probe = shlex.join([sys.executable, str(tmp_path / "probe.py"), *map(str, (port, *tried))])
        load = f"nft -f {tmp_path}/rules"
        script = f"ip link set lo up && {load} && {load} && {probe}"  # a second time as well
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=True
        )
        other = {*tried} - ({64_002} if site == node.name else set())  # such as a node exporter's
        expected = [(each, each in port) for each in tried for port in (allowed, other, other)]
        told = [f"{each} {'in' if is_in else 'out'}" for each, is_in in expected]
        assert done.stdout.splitlines() == told


@pytest.mark.parametrize("how", ["return", "raise RuntimeError('from Flower')"])
def test_a_supernode_ends_however_flower_leaves_it_while_a_thread_of_flowers_lives(how):
    """This plays Flower's part; what Flower does where a handshake fails is in `make machines`."""
    command = [sys.executable, "-c", SUPERNODE.format(how=how)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert ("RuntimeError: from Flower" in done.stderr) == how.startswith("raise")
