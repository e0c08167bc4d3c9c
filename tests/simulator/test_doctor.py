"""`shufl doctor` in folders of sites that are well, and that are not."""

import contextlib
import ctypes
import datetime
import email.utils
import http.server
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from deployment_world import deployment_of, moved
from ports import free_port
from run_world import LIMIT, invoke, refused, shufl, wait_until
from shuffler_world import ShufflerHere, plan
from shufl.accounting import Ledger
from shufl.clients import load_device
from shufl.deploy.doctor import examine
from shufl.deploy.node import agreed_plan
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.run_status import health_of, status_of
from shufl.deploy.server_app import _Waits
from shufl.deploy.server_site import ServerSite, flower_connection
from shufl.deploy.site_files import NodeSite, load_site, role_of
from shufl.deploy.site_templates import changed
from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.shuffler import ControlClient, ShufflerRefused
from shufl.shuffler.callers import Role
from shufl.shuffler.config import load_config
from shufl.shuffler.keys import Authority, Request, make_flower_key
from tiny_disk import fill, tiny_disk_at


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    base = tmp_path_factory.mktemp("doctor")
    deployment = deployment_of(base, nodes=2, rounds=2)
    return Rehearsal(deployment, base, base / "s").folder


@pytest.fixture
def node(sites, tmp_path):
    return moved(sites / "ward-1", tmp_path / "n")


@pytest.fixture
def without_records(node):
    """A node whose records cannot be loaded, so that no process starts that measures its work."""
    file = node / "node.toml"
    file.write_text(file.read_text().replace('"simulated"', '"no_such_module:records"'))
    return node


def troubles(folder):
    return troubles_of(examine(folder))


_OF_NETWORK = "shuffler ", "SuperLink ", "clock", "port", "nginx", "socket"


def troubles_of(findings):
    """Of what needs no other process."""
    return {
        finding.what: finding
        for finding in findings
        if finding.trouble and not finding.what.startswith(_OF_NETWORK)
    }


@pytest.mark.slow
def test_sites_as_they_were_provisioned_are_well_but_for_who_is_not_there(sites):
    assert troubles(sites / "shuffler-1") == {}
    (unregistered,) = troubles(sites / "server").values()
    assert unregistered.trouble == "the SuperLink was not told of ward-1, ward-2"
    assert unregistered.fix.startswith("shufl register")
    examined = examine(sites / "ward-1")
    assert troubles_of(examined) == {}
    findings = {each.what.split()[0]: each for each in examined}
    assert re.fullmatch(r"link must carry 0\.\d+ Mbit/s", findings["link"].what)
    assert re.fullmatch(r"work needs a window.work_until of [\d.e-]+ s", findings["work"].what)
    assert "does not answer" in findings["shuffler"].trouble
    assert findings["shuffler"].fix.startswith("check shufflers in node.toml; ask who runs it")
    assert "Connection refused" in findings["SuperLink"].trouble
    assert findings["SuperLink"].fix.startswith("check superlink in node.toml; ask who runs")
    assert findings["socket"].trouble == "this node's own process is not running"
    assert findings["socket"].fix == "sudo systemctl start ward-1-node"


@pytest.mark.slow
def test_a_shuffler_that_serves_is_reached_with_the_nodes_own_certificate(
    tmp_path, warm_deployment
):
    long = {"work_until": LIMIT, "send_after": LIMIT + 1.0}  # for a busy machine's work too
    deployment = deployment_of(tmp_path, nodes=1, rounds=2, window=long)
    rehearsal = Rehearsal(deployment, tmp_path, tmp_path / "s")

    def found(name):
        return [each for each in examine(rehearsal.folder / name) if each.trouble]

    try:
        rehearsal.start("shuffler-1", "shuffler")
        server = rehearsal.folder / "server"
        rehearsal.start("server", "superlink")
        waited = r"waiting for the SuperLink at [\d.:]+\n"
        for said in (rf"{waited}registered ward-1, number \d+\n", ""):
            done = registered_at(server)
            assert re.fullmatch(said, done.stdout), done
        rehearsal.start("ward-1", "node")
        wait_until((rehearsal.folder / "ward-1/node.sock").exists, LIMIT, "the node")
        assert found("server") == []
        assert found("ward-1") == found("shuffler-1") == []
        keys, nodes = (rehearsal.folder / name for name in ("ward-1/keys", "server/nodes"))
        for name in ("flower.key", "flower.pub"):
            (keys / name).unlink()
        make_flower_key(keys)  # another one, which the authority has told the server of
        shutil.copy(keys / "flower.pub", nodes / "ward-1.pub")
        done = registered_at(server)
        said = r"unregistered ward-1, number (\d+)\nregistered ward-1, number (\d+)\n"
        assert len({*re.fullmatch(said, done.stdout).groups()}) == 2
        (nodes / "agreed.toml").write_text("nodes = []")
        done = registered_at(server)
        assert re.fullmatch(r"unregistered ward-1, number \d+\n", done.stdout)
        assert json.loads((rehearsal.folder / "server/flower/nodes.json").read_text()) == {}
        authority = Authority.create().certificate
        (rehearsal.folder / "server/keys/flower-authority.pem").write_bytes(authority)
        (_, trouble) = found("server")
        assert "its certificate: " in trouble.trouble
        assert "put the authorities' certificates in keys" in trouble.fix
        (rehearsal.folder / "shuffler-1/revoked").write_text("ward-1\n")
        rehearsal.running["shuffler-1", "shuffler"].send_signal(signal.SIGHUP)
        refused = []
        wait_until(lambda: refused.extend(found("ward-1")) or refused, LIMIT, "a refusal")
        (trouble,) = refused
        assert "takes no calls with this certificate" in trouble.trouble
        assert "it is withdrawn there" in trouble.fix
    finally:
        rehearsal.__exit__()


@contextmanager
def another_program(address):
    """Takes an address, and says good-bye to whoever comes."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def answering(address, keys, name="shuffler-1", handler=http.server.BaseHTTPRequestHandler):
    """Answers at an address with the key of a name in the folder `keys`."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys / f"{name}.pem", keys / f"{name}.key")
    host, port = address.split(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), handler)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_who_is_not_there_and_who_has_taken_a_port_is_told_at_home(sites, tmp_path):
    """A shuffler that is down, nginx that is down, and another program in their place."""
    shuffler = moved(sites / "shuffler-1", tmp_path / "n")
    listen = load_config(shuffler / "shuffler.toml").listen
    proxy = free_port()
    nginx = shuffler / "nginx.conf"
    nginx.write_text(re.sub(r"listen [^;]+;", f"listen 0.0.0.0:{proxy};", nginx.read_text()))

    def found():
        return {each.what: each for each in examine(shuffler) if each.trouble}

    down = found()
    assert down["port"].trouble == f"nobody listens at {listen}"
    assert down["port"].fix == "systemctl start n-shuffler"
    assert len(down) == 1  # nginx has nobody to ask
    with another_program(listen):
        taken = found()["port"].trouble
    assert taken.startswith(f"no certificate comes from port {listen.split(':')[1]}: ")
    with answering(listen, shuffler / "keys"):
        (trouble,) = found().values()
        assert trouble.what == "nginx" and "systemctl restart nginx" in trouble.fix
        assert trouble.trouble == f"nobody answers at port {proxy}: Connection refused"
        with answering(f"127.0.0.1:{proxy}", sites / "ward-1/keys", "ward-1"):
            (trouble,) = found().values()
        said = f"another program has port {proxy}: it has not the key of shuffler-1.pem"
        assert trouble.trouble == said
        with answering(f"127.0.0.1:{proxy}", shuffler / "keys"):
            assert found() == {}
            text = nginx.read_text()
            here = f"listen 127.0.0.1:{proxy};"
            for line in (
                f"\tlisten  {proxy} ssl;",
                f"listen *:{proxy};",
                f"listen [::1]:1;\n{here}",
            ):
                nginx.write_text(re.sub(r"^ *listen [^;]+;", line, text, flags=re.MULTILINE))
                assert found().keys() == {"files for root"}, line


def installed(site, folder, monkeypatch):
    """A copy of a site on which install.sh has run, with another /etc and accounts of nobody."""
    etc, programs = folder / "etc", folder / "programs"
    monkeypatch.setattr("shufl.deploy.doctor._ETC", etc)
    place = moved(site, folder / "shufl")
    (place / ".venv").mkdir()
    programs.mkdir()
    for name in ("getent", "id", "chown", "chmod", "nft", "systemctl", "setpriv", "stat"):
        does = {"setpriv": 'shift 3; exec "$@"', "stat": "echo 0"}.get(name, "true")
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    return place, lambda: subprocess.run(
        ["sh"],
        input=(place / "install.sh").read_text().replace("/etc/", f"{etc}/"),
        cwd=place,
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        umask=0o077,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("site", ["server", "shuffler-1"])
def test_what_root_has_is_compared_with_what_lies_in_the_folder(sites, tmp_path, monkeypatch, site):
    folder, install = installed(sites / site, tmp_path, monkeypatch)

    def found(what="installed files"):
        return next((each for each in examine(folder) if each.what == what), None)

    assert found() is None  # before install.sh, and in a container
    assert found("files for root").trouble == ""
    install()
    assert found().trouble == ""
    for path in (tmp_path / "etc").rglob("*.*"):
        assert path.stat().st_mode & 0o044 == 0o044, path
    (own,) = (path for path in folder.glob("*.service") if path.stem != "shufl-run")
    for path in (own, folder / "nginx.conf"):
        path.write_text(path.read_text().replace("\n", "\n# another line\n", 1))
        assert f"is not what {path} says" in found().trouble
        assert found().fix.startswith("sudo sh install.sh")
        other = found("files for root")
        assert "not as this release makes them" in other.trouble and "root runs it" in other.fix
        install()
        assert found().trouble == ""
    (tmp_path / "etc/systemd/system" / own.name).unlink()
    assert "No such file" in found().trouble


@pytest.mark.parametrize(
    ("site", "name", "old", "new"),
    [
        ("server", "install.sh", "umask 022", "umask 022; true"),
        ("server", "install.sh", "set -eu\n", "set -eu\nlisten $(true);\n"),
        ("server", "install.sh", "set -eu\n", "set -eu\r"),
        ("shuffler-1", "shufl-shuffler.service", "NoNewPrivileges=true\n", ""),
        ("server", "shufl-run.service", "ExecStart=", "ExecStartPre=+/bin/true\nExecStart="),
        ("server", "shufl-superlink.service", "User=shufl", "User=root"),
        ("ward-1", "shufl-clientapp.service", "User=shufl-app", "User=shufl"),
        ("ward-1", "shufl-node.service", "ReadWritePaths=", "ReadWritePaths=/etc "),
        ("server", "nginx.conf", "return 403", "return 200"),
        ("shuffler-1", "nginx.conf", "access_log off", "access_log /etc/cron.d/own"),
        ("ward-1", "nftables.conf", "meta skuid != ", "ct state new meta skuid != "),
        ("ward-1", "nftables.conf", "root, shufl-app", "root, shufl, another"),
        ("server", "nftables.conf", "www-data", "www-data, another"),
        ("ward-1", "shufl-own.service", "", "[Service]\nExecStart=/bin/true\n"),
        ("ward-1", "shufl-node.service", ")\nAfter=", ") \\\nAfter="),
        ("ward-1", "shufl-node.service", ")\nAfter=", ")\rExecStartPre=+/bin/true\nAfter="),
        ("ward-1", "shufl-own.service", "", "Description=Its own of ward-1 (wards)\n"),
        ("ward-1", "shufl-own.service", "", ""),
        ("server", "shufl-run.service", "TimeoutStopSec=", "TimeoutStopSec=9\nTimeoutStopSec="),
        ("server", "shufl-run.service", None, None),
        ("server", "nftables.conf", None, None),
        ("shuffler-1", "nginx.conf", None, None),
        ("server", "nftables.conf", "www-data", "0-65535"),
        ("shuffler-1", "nginx.conf", ":10m;", ":10m;\n    listen 9;"),
        ("server", "nginx.conf", "    listen ", "    listen unix:/srv/own"),
        ("server", "nginx.conf", "    listen ", "    listen 0.0.0.0:9;\n    listen "),
        ("shuffler-1", "nginx.conf", " 64;", " 10001;"),
    ],
)
def test_nothing_is_slipped_in_that_root_would_run(sites, tmp_path, site, name, old, new):
    """Before install.sh is run, by whoever sends a site's folder."""
    folder = moved(sites / site, tmp_path / "n")
    assert [*changed(folder, role_of(folder))] == []
    path = folder / name
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    if new is not None:
        path.write_bytes(text.replace(old, new, 1).encode())
    (line,) = changed(folder, role_of(folder))
    assert line.startswith(f"{name}: ")


def test_a_port_in_octal_and_a_link_are_none_of_ours(sites, tmp_path):
    folder = moved(sites / "ward-1", tmp_path / "n")
    port = re.search(r"dport (\d+) reject", (folder / "nftables.conf").read_text())[1]
    for path in (*folder.glob("*.service"), folder / "nftables.conf"):
        path.write_text(path.read_text().replace(port, f"0{port}"))
    assert [*changed(folder, "node")]
    folder = moved(sites / "ward-1", tmp_path / "m")
    (folder / "install.sh").rename(tmp_path / "install.sh")
    (folder / "install.sh").symlink_to(tmp_path / "install.sh")
    assert [*changed(folder, "node")] == ["install.sh: a link"]
    (folder / "install.sh").unlink()
    (folder / "install.sh").symlink_to(tmp_path / "gone")
    assert [*changed(folder, "node")] == ["install.sh: a link"]


def test_code_of_a_folder_is_played_by_its_owner_alone_and_after_the_look_for_root(
    sites, node, monkeypatch
):
    (node / "evil.py").write_text("from pathlib import Path\nPath(__file__ + '.played').touch()")
    file, played = node / "node.toml", node / "evil.py.played"
    file.write_text(file.read_text().replace('"simulated"', '"evil:records"'))

    def found():
        return troubles(node)

    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: node.stat().st_uid + 1)
        assert found()["model and records"].fix.startswith("after install.sh, sudo -u shufl ")
    script = node / "install.sh"
    text = script.read_text()
    script.write_text(f"{text}true\n")
    assert found()["model and records"].trouble.startswith("not looked at: evil:records is code")
    assert not played.exists()
    script.write_text(text)
    assert "not looked at" not in found()["model and records"].trouble and played.exists()
    said = troubles(shutil.copytree(node, node.parent / "o"))["files for root"]
    assert said.trouble == f"they are for the folder {node}, this is {node.parent / 'o'}"


def in_a_network_of_its_own(act):
    """What a function returns in a thread whose loopback is its own."""

    def alone():
        if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET, of this thread
            pytest.skip("a network of its own is not permitted here")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(alone).result()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network of its own")
@pytest.mark.skipif(not all(map(shutil.which, ("nft", "ip"))), reason="nft or ip is not installed")
def test_a_firewall_that_is_not_loaded_is_found_whoever_looks(sites, tmp_path, monkeypatch):
    """Also where a process listens on all addresses, the one that the firewall answers for too."""
    server, install = installed(sites / "server", tmp_path, monkeypatch)
    port = flower_connection(server)[1].split(":")[1]
    install()
    loaded = tmp_path / "etc/shufl/shufl.nft"

    def found():
        for host in ("127.0.0.1", "0.0.0.0"):
            with another_program(f"{host}:{port}"):
                yield next(each for each in examine(server) if each.what == "firewall")
        yield next(each for each in examine(server) if each.what == "firewall")

    def act():
        before = [*found()]
        numbered = loaded.read_text().replace("shufl, www-data", "64000, 33")
        subprocess.run(["nft", "--file", "-"], input=numbered, text=True, check=True)
        then = [*found()]
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        return before, then, [*found()]

    before, then, flushed = in_a_network_of_its_own(act)
    assert [each.trouble for each in then] == [""] * 3
    for each in before + flushed:
        assert each.trouble.startswith("its rules are not loaded")
        assert each.fix == f"sudo nft --file {loaded}"


def test_a_full_disk_of_the_reports_is_not_that_of_the_folder(sites, tmp_path, monkeypatch):
    shuffler = moved(sites / "shuffler-1", tmp_path / "n")
    file = shuffler / "shuffler.toml"
    file.write_text(re.sub("directory = .*", 'directory = "/elsewhere/state"', file.read_text()))
    usage, free = shutil.disk_usage, {"/": 28_000}
    monkeypatch.setattr(
        "shufl.deploy.doctor.shutil.disk_usage",
        lambda path: SimpleNamespace(free=free.get(str(path), usage(tmp_path).free)),
    )
    found = troubles(shuffler)["disk of the reports"]
    assert found.trouble == "0.00 GB are free, at least 1 GB are needed"
    assert found.fix == "make room on the disk of /elsewhere/state"
    assert "disk" not in troubles(shuffler)


def test_a_shuffler_whose_disk_is_full_is_told_to_whoever_asks(sites, tmp_path):
    """Before a write fails, and where a round has not fitted, until there is room."""
    server = load_site(sites / "server/server.toml", ServerSite)
    (address,), authority = server.shufflers, Authority.read(sites / "authority")

    def told():
        """The same by doctor, by what `shufl status` shows, and by the metrics."""
        found = {each.what: each for each in examine(sites / "server")}[f"shuffler {address}"]
        assert not found.trouble or found.fix == "ask who runs it to make room"
        assert health_of(address, server.credentials) == found.trouble
        up = metrics_of(sites / "server")["shufl_shuffler_up", ("shuffler", address)]
        assert bool(up) != bool(found.trouble)
        return found.trouble

    with (
        tiny_disk_at(tmp_path / "disk") as disk,
        ShufflerHere(disk / "state", listen=address, authority=authority) as shuffler,
        ControlClient(address, shuffler.control) as control,
    ):
        assert told() == ""
        filler = fill(disk)
        full = "STORAGE_FULL: the shuffler's disk is full"
        assert told() == full
        filler.unlink()
        assert told() == ""
        control.create_run("run", plan(50), 10_000)
        filler.write_bytes(bytes(2**19))
        assert told() == ""
        with pytest.raises(ShufflerRefused, match="STORAGE_FULL"):
            control.reserve("run")
        assert told() == full
        filler.unlink()
        control.reserve("run")
        assert told() == ""


def test_a_servers_test_records_are_looked_for(sites, tmp_path):
    server = moved(sites / "server", tmp_path / "n")
    file = server / "run.toml"
    text, table = file.read_text(), '{file = "gone.csv", user = "u", label = "y"}'
    for dataset, said in (
        ('"gone:records"', "could not be imported"),
        (table, f"{server}/gone.csv cannot be read as CSV or Parquet: No such file or directory"),
    ):
        file.write_text(text.replace('dataset = "digits"', f"dataset = {dataset}"))
        found = troubles(server)["test records"]
        assert said in found.trouble and "data.dataset" in found.fix
    (server / "gone.csv").write_text("u,x,y\na,1,1\nb,2,1\n")
    file.write_text(file.read_text().replace('"y"}', '"y", test = 0.5}'))
    assert "test records" not in troubles(server)


def registered_at(server):
    with contextlib.chdir(server):
        return invoke("register")


@pytest.mark.slow
def test_a_superlink_that_does_not_come_ends_register_in_one_line(sites, monkeypatch):
    monkeypatch.setattr("shufl.deploy.superlink._LISTEN_SECONDS", 0.0)
    done = registered_at(sites / "server")
    said = r"waiting for the SuperLink at [\d.:]+\nit does not listen, or this account may not .*\n"
    assert done.exit_code == 1 and re.fullmatch(said, done.stdout)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_certificate_of_another_node_is_found(sites, without_records):
    node = without_records
    for suffix in ("pem", "key"):
        other = sites / "ward-2/keys" / f"ward-2.{suffix}"
        shutil.copy(other, node / "keys" / f"ward-1.{suffix}")
    # Of as many users: the shuffler will tell them apart.
    (unknown,) = troubles(node).values()
    assert (unknown.what, "could not be imported" in unknown.trouble) == ("model and records", True)
    assert unknown.fix == "mend the records, or data in node.toml"
    shutil.copy(sites / "ward-1/keys/ward-1.key", node / "keys/ward-1.key")
    assert "not the key of" in troubles(node)["keys"].trouble
    assert "shufl keys renew" in troubles(node)["keys"].fix
    (node / "keys/ward-1.key").unlink()
    assert "shufl keys request" in troubles(node)["keys"].fix


def test_an_authority_that_did_not_sign_is_told_from_a_certificate_to_renew(sites, without_records):
    node = without_records
    (node / "keys/authority.pem").write_bytes(Authority.create().certificate)
    found = {each.what.split()[0]: each for each in examine(node)}
    assert re.search(r"ward-1\.pem: not issued by .*/authority\.pem$", found["keys"].trouble)
    said = "put the authority.pem of the authority that signed it back, as `shufl provision` wrote"
    assert found["keys"].fix.startswith(said)
    assert "; if there is a new authority, shufl keys renew" in found["keys"].fix
    assert "not issued by" in found["shuffler"].trouble and found["shuffler"].fix == "as above"


def test_a_name_that_nobody_has_is_looked_for_in_the_nodes_own_file(without_records):
    file = without_records / "node.toml"
    text = re.sub("superlink = .*", 'superlink = "nobody.invalid:9000"', file.read_text())
    text = re.sub(r"shufflers = \[[^]]*\]", 'shufflers = ["nobody.invalid:9000"]', text)
    file.write_text(text)
    found = {each.what.split()[0].lower(): each for each in examine(without_records)}
    for what, key in (("shuffler", "shufflers"), ("superlink", "superlink")):
        assert found[what].trouble
        assert found[what].fix.startswith(f"check {key} in node.toml; ask who runs ")


@pytest.mark.parametrize(
    ("role", "users", "days", "what", "message"),
    [
        (Role.NODE, 4, 365, "certificate's role", "must be for a node of 3 users"),
        (Role.SERVER, 0, 365, "certificate's role", "is for a server of 0 users"),
        (Role.NODE, 3, 0.0005, "certificate's days", "is valid f"),  # for 0 days more, or ended
        (Role.NODE, 3, -1, "certificate's days", "is valid from"),
    ],
)
def test_certificates_that_do_not_fit_are_found(
    sites, without_records, role, users, days, what, message
):
    node = without_records
    authority = Authority.read(sites / "authority")
    request = Request.read(node / "keys/ward-1.csr")
    certificate = authority.sign(request, role, users=users, days=days)
    (node / "keys/ward-1.pem").write_bytes(certificate)
    assert message in troubles(node)[what].trouble


def metrics_of(folder):
    done = invoke("metrics", folder)
    assert done.exit_code == 0, done.stderr
    return {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(done.stdout)
        for each in family.samples
    }


def test_metrics_are_those_of_the_site(sites, node, tmp_path):
    found = metrics_of(sites / "shuffler-1")
    own = x509.load_pem_x509_certificate((sites / "shuffler-1/keys/shuffler-1.pem").read_bytes())
    ends = found["shufl_certificate_end_seconds", ("certificate", "shuffler-1")]
    renew = found["shufl_certificate_renew_seconds", ("certificate", "shuffler-1")]
    assert ends == own.not_valid_after_utc.timestamp() and ends - renew == 30 * 86_400
    assert found["shufl_disk_free_bytes",] > 0
    assert not [name for name, *_ in found if name.startswith(("shufl_run", "shufl_device"))]

    found = metrics_of(node)
    limits = load_device(node / "device.toml").limits
    assert found["shufl_device_epsilon",] == 0
    assert found["shufl_device_epsilon_most",] == limits.most_epsilon

    server = moved(sites / "server", tmp_path / "s")
    assert not [name for name, *_ in metrics_of(server) if name.startswith("shufl_run")]
    plan = agreed_plan(load(str(server / "run.toml")))
    run = server / "runs/one"
    run.mkdir(parents=True)
    told = {"number": 0, "flower": 5, "users": 3, "heard": 1.0}
    nodes = [told | {"name": "ward-1", "trouble": ""}, told | {"name": "ward-2", "trouble": "away"}]
    (run / "nodes.json").write_text(json.dumps(nodes))
    waits = _Waits(run / "waiting.json", lambda line: None)
    waits("waiting for nodes: 0 are there")
    waits("waiting for nodes: 1 are there")
    with Ledger.create(run / "ledger.jsonl", plan, "run") as ledger:
        ledger.append_round(1)
        found = metrics_of(server)
        assert status_of(run, None).waits_for == "waiting for nodes: 1 are there"
    assert found["shufl_run_waiting_seconds",] > 0
    assert (found["shufl_run_running",], found["shufl_run_interrupted",]) == (1, 0)
    assert (found["shufl_run_rounds",], found["shufl_run_rounds_allowed",]) == (1, 2)
    assert found["shufl_run_epsilon",] == plan.epsilon(rounds=1)
    assert found["shufl_run_epsilon_budget",] == plan.target_epsilon
    silent = [found["shufl_node_silent", ("node", name)] for name in ("ward-1", "ward-2")]
    assert silent == [0, 1]
    (up,) = (value for (name, *_), value in found.items() if name == "shufl_shuffler_up")
    assert up == 0
    found = metrics_of(server)
    assert (found["shufl_run_running",], found["shufl_run_interrupted",]) == (0, 1)
    assert found["shufl_run_waiting_seconds",] == 0  # it was killed while it waited
    _Waits(run / "waiting.json", lambda line: None)
    assert not (run / "waiting.json").exists()


def superlink_at(node, date):
    """Answers at the SuperLink's address, with its certificate, as if it were then."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def date_time_string(self, timestamp=None):
            return email.utils.format_datetime(date, usegmt=True)

        def log_message(self, *_):
            pass

    address = load_site(node / "node.toml", NodeSite).superlink
    return answering(address, node.parent / "superlink", "superlink", Answer)


def test_a_certificate_that_has_ended_and_a_clock_that_is_wrong_are_told(
    sites, without_records, monkeypatch
):
    node, authority = without_records, Authority.read(sites / "authority")
    shutil.copytree(sites / "server/keys", node.parent / "superlink")
    request = Request.read(node / "keys/ward-1.csr")
    (node / "keys/ward-1.pem").write_bytes(authority.sign(request, Role.NODE, users=3, days=-1))

    def found():
        examined = {each.what.split(" 1")[0]: each for each in examine(node) if each.trouble}
        return [examined.get(what) for what in ("certificate's days", "clock", "SuperLink")]

    days, clock, _ = found()
    assert "is valid from " in days.trouble
    assert days.fix.startswith("systemctl enable --now systemd-timesyncd, if that is not the time")
    assert "; else shufl keys renew" in days.fix and "Connection refused" in clock.trouble
    now = datetime.datetime.now(datetime.UTC)
    with superlink_at(node, now):
        assert found()[1] is None
    with superlink_at(node, now - datetime.timedelta(days=1)):
        _, clock, _ = found()
    assert clock.fix == "systemctl enable --now systemd-timesyncd"
    assert re.fullmatch(r"86\d\d\d s ahead of the SuperLink's machine", clock.trouble)
    # A clock that is a day behind: for it, what was signed today is of tomorrow.
    monkeypatch.setattr("shufl.shuffler.keys._EARLY", datetime.timedelta(days=-1))
    (node / "keys/ward-1.pem").write_bytes(authority.sign(request, Role.NODE, users=3))
    asked = Request.read(node.parent / "superlink/superlink.csr")
    signed = Authority.read(sites / "authority-flower").sign(
        asked, Role.SHUFFLER, hosts=["127.0.0.1"]
    )
    (node.parent / "superlink/superlink.pem").write_bytes(signed)
    with superlink_at(node, now + datetime.timedelta(days=1)):
        days, clock, superlink = found()
    assert re.fullmatch(r"8[56]\d\d\d s behind the SuperLink's machine", clock.trouble)
    assert superlink.trouble == "its certificate: certificate is not yet valid"
    for each in (days, superlink):
        assert each.fix.startswith("systemctl enable --now systemd-timesyncd, if ")


def test_a_server_that_was_told_of_too_few_nodes_is_found(sites, tmp_path):
    server = moved(sites / "server", tmp_path / "n")
    agreed = server / "nodes/agreed.toml"
    agreed.write_text("nodes = []")
    assert "no node was agreed" in troubles(server)["nodes"].trouble
    agreed.unlink()
    assert "No such file" in troubles(server)["nodes"].trouble


def test_a_key_that_others_may_read_is_found(without_records):
    node = without_records
    (node / "keys/ward-1.key").chmod(0o644)
    (node / "keys/flower.key").chmod(0o640)
    found = troubles(node)
    assert "mode 0644" in found["keys"].trouble
    assert found["keys"].fix == f"chmod 600 {node}/keys/ward-1.key"
    assert "mode 0640" in found["key for Flower"].trouble


def test_limits_that_refuse_the_plan_are_found(without_records):
    node = without_records
    device = node / "device.toml"
    text = device.read_text()
    device.write_text(text + "least_noise = 3.0\n")
    assert "noise multipliers of at least 3" in troubles(node)["owner's limits"].trouble
    device.write_text(re.sub("most_epsilon = .*", "most_epsilon = 0.1", text))
    assert "over all runs, with this one it would be" in troubles(node)["owner's limits"].trouble
    run = node / "run.toml"
    run.write_text(run.read_text().replace("check_in_rate = 1.0", "check_in_rate = 0.9"))
    device.write_text(text)
    assert "has not accepted the plan" in troubles(node)["owner's limits"].trouble


@pytest.mark.slow
def test_a_node_ends_with_2_where_somebody_has_to_mend_it_and_else_with_1(node):
    """With 2 its unit leaves it alone; a disk that is mounted late, or a busy machine, is none."""
    unit = next(node.glob("*-node.service")).read_text()
    assert "Restart=always\nRestartPreventExitStatus=2\n" in unit
    file, run = node / "node.toml", node / "run.toml"
    file.write_text(file.read_text().replace('"simulated"', '"records"'))

    def ended(code, said):
        done = shufl("node", cwd=node)
        assert done.returncode == code and said in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")

    ended(1, "data: the records of user 0 cannot be read: No such file or directory")
    (node / "records").mkdir()
    for user in range(3):
        np.savez(node / f"records/{user}.npz", features=np.zeros((1, 1, 8, 8)), labels=[user])
    text = run.read_text()
    run.write_text(re.sub("work_until = .*", "work_until = 1e-6", text))
    ended(1, "window.work_until must be at least")
    run.rename(node / "away")
    ended(1, "run.toml cannot be read: No such file or directory")
    (node / "away").rename(run)
    (node / "keys/ward-1.key").rename(node / "away")
    ended(1, "certificate: ")
    (node / "away").rename(node / "keys/ward-1.key")
    (node / "device.db").write_text("no ledger")
    ended(2, "file is not a database")
    np.savez(node / "records/2.npz", features=np.zeros((1, 1, 8, 9)), labels=[2])
    ended(2, "data: the records of user 2 must be features of shape")
    file.write_text(file.read_text().replace('"records"', '"own_code:records"'))
    raises = "def records(user):\n    raise {}('of a record')\n"
    (node / "own_code.py").write_text(raises.format("RuntimeError"))
    where = "data: the records of user 0 cannot be read: "
    ended(1, f"{where}own_code:records raised RuntimeError (own_code.py, line 2)\n")
    (node / "own_code.py").write_text("def records(user):\n    return 1, 2, 3\n")
    ended(2, f"{where}ValueError")


@pytest.mark.slow
def test_a_window_that_is_too_short_for_the_work_is_found(node):
    run = node / "run.toml"
    run.write_text(re.sub(r"work_until = .*", "work_until = 1e-6", run.read_text()))
    assert "window.work_until must be at least" in troubles(node)["work"].trouble
    run.write_text(run.read_text().replace("[window]", "[windows]"))
    assert "window" in troubles(node)["plan"].trouble


def test_the_command_exits_with_1_and_says_what_mends_it(without_records, tmp_path):
    node = without_records
    (node / "keys/flower.key").unlink()
    done = invoke("doctor", node)
    assert done.exit_code == 1
    assert "problem key for Flower" in done.stdout and "shufl keys flower keys" in done.stdout
    assert "ok      disk" in done.stdout
    refused("doctor", tmp_path)


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        ("tls = 3", "tls must be a table of values, got 3"),
        ("[tls]", "tls.certificate is missing"),
        ("plaintext = true", "unknown key plaintext"),
        ("[tls]\ncertificate = 3", "tls.certificate must be the path of a file, got 3"),
        ("tls = " + "[" * 5000, "nested too deeply"),
    ],
    ids=["number", "empty", "plaintext", "certificate", "nested"],
)
def test_a_shuffler_without_a_certificate_is_one_line(tmp_path, tls, message):
    (tmp_path / "shuffler.toml").write_text(tls)
    assert message in refused("doctor", tmp_path)


def test_a_limit_that_is_none_does_not_hide_what_else_is_found(sites, tmp_path):
    shuffler = moved(sites / "shuffler-1", tmp_path / "n")
    file = shuffler / "shuffler.toml"
    file.write_text(file.read_text().replace("[limits]", "[limits]\nusers = 0"))
    found = {each.what: each.trouble for each in examine(shuffler)}
    assert "limits.users must be a whole number" in found["configuration"]
    assert found["keys"] == ""


@pytest.mark.parametrize("content", ["", "superlink = 3", '[superlink]\ndefault = ["x"]'])
def test_a_server_that_does_not_know_its_superlink_is_one_line(sites, tmp_path, content):
    server = moved(sites / "server", tmp_path / "n")
    (server / "flower/config.toml").write_text(content)
    with pytest.raises(ConfigError, match="must have the SuperLink's address"):
        examine(server)


def test_a_folder_of_no_site_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"exactly one of server.toml, .* holds none$"):
        examine(tmp_path)
    for name in ("server.toml", "node.toml"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds server.toml and node.toml$"):
        examine(tmp_path)
