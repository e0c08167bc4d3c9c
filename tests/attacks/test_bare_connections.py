"""Thousands of connections that never call: nginx ends them before the shuffler."""

import importlib.resources
import resource
import shutil
import socket
import string
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from deployment_world import Nginx
from ports import free_port
from run_world import LIMIT, wait_until
from shuffler_world import World, in_release, plan
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    Refusal,
    ShufflerProcess,
    ShufflerRefused,
    Verdict,
)

MOST, NODES = 64, 20
FIRST_BYTES_OF_TLS = b"\x16\x03\x01\x02\x00"


@pytest.mark.slow
def test_too_many_open_files_are_no_full_disk(start):
    world = start()
    world.control.create_run("run", plan(), 64)
    _, hard = resource.prlimit(world.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(world.process.pid, resource.RLIMIT_NOFILE, (1, hard))
    with pytest.raises(ShufflerRefused, match="the shuffler has too many files open") as refused:
        world.control.open_round("run", 1, "m", world.public_key)
    assert refused.value.reason is Refusal.STORAGE_FAILED
    resource.prlimit(world.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    world.control.open_round("run", 1, "m", world.public_key)


@pytest.fixture
def proxied(tmp_path):
    """A shuffler behind nginx, with clients that connect through it; and nginx's port."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("this process may not open 5 000 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, local = free_port(), free_port()
    template = importlib.resources.files("shufl.deploy") / "templates" / "stream.conf"
    conf = tmp_path / "nginx.conf"
    about = {"listen": f"127.0.0.1:{port}", "local_port": local, "connections": MOST}
    conf.write_text(string.Template(template.read_text()).substitute(about))
    with ExitStack() as stack:
        process = stack.enter_context(ShufflerProcess(listen=f"127.0.0.1:{local}"))
        nginx = Nginx(conf, tmp_path / "nginx", stream=True)
        stack.callback(nginx.stop)
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, LIMIT, "nginx")
        world = World(process)
        stack.callback(world.close)
        world.control = ControlClient(f"127.0.0.1:{port}", process.control)
        yield world, port
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", FIRST_BYTES_OF_TLS], ids=["silent", "handshake-begun"])
def test_5000_bare_connections_refuse_no_honest_node_and_break_no_release(proxied, first):
    """They come from one address, and the nodes from another."""
    world, port = proxied
    release = in_release(world)
    before = len(list(Path(f"/proc/{world.process.pid}/fd").iterdir()))
    with ExitStack() as stack:
        for _ in range(5000):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), LIMIT, ("127.0.0.2", 0))
            )
            with suppress(OSError):  # it is closed already
                connection.sendall(first)
        header = world.begin("another")
        for user, sealed in world.reports(header, NODES):
            with IntakeClient(f"127.0.0.1:{port}", world.process.submit) as node:
                assert list(node.submit(header, [(user, sealed)])) == [Verdict.ACCEPTED]
        files = list(Path(f"/proc/{world.process.pid}/fd").iterdir())
        assert len(files) <= before + MOST + NODES + 2  # the attacker's, and what is left of others
        assert len(list(release)) == 39
        assert len(world.released(header)) == NODES
