"""Full disks, and a network that is slow and cut, in a deployment of processes."""

import contextlib
import dataclasses
import re
import signal
import socket
import socketserver
import threading
import time

import pytest

from deployment_world import World, message_seconds
from ports import free_port
from tiny_disk import fill, tiny_disk_at


class Network(socketserver.ThreadingTCPServer):
    """What lies between one node and the server: it passes bytes on, late or not at all."""

    daemon_threads, allow_reuse_address, block_on_close = True, True, False

    def __init__(self, port: int):
        """Begins to pass on to a port of loopback."""
        super().__init__(("127.0.0.1", free_port()), _Connection)
        self.there = ("127.0.0.1", port)
        self.delay = 0.0
        self.whole = threading.Event()
        self.whole.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Connection(socketserver.BaseRequestHandler):
    server: Network

    def handle(self) -> None:
        with socket.create_connection(self.server.there) as there:
            back = threading.Thread(target=self._pass_on, args=(there, self.request), daemon=True)
            back.start()
            self._pass_on(self.request, there)
            back.join()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(2**16):
                time.sleep(self.server.delay)
                self.server.whole.wait()
                other.sendall(piece)
            other.shutdown(socket.SHUT_WR)


def wait_for_users(world: World, users: int) -> int:
    """Waits for a round, of those that end from now on, in which as many were present."""
    since = world.rows[-1]["round"]

    def found() -> list[int]:
        rows = [row for row in world.rows if row["round"] > since]
        return [row["round"] for row in rows if row["users_present"] == users]

    world.wait_until(found, f"{users} users")
    return found()[0]


def wait_for_trouble(world: World, node: str, pattern: str) -> None:
    """Waits until a node is in this trouble; a busy machine may have it in another one first."""

    def found() -> bool:
        told = {each["name"]: each["trouble"] for each in world.status()["nodes"]}
        return re.fullmatch(pattern, told[node]) is not None

    world.wait_until(found, f"{node} to be in trouble: {pattern}")


@pytest.fixture
def world(tmp_path):
    """Two nodes as usual, one with a network of its own, one whose ledger is on a tiny disk."""
    with (
        tiny_disk_at(tmp_path / "servers") as servers,
        tiny_disk_at(tmp_path / "nodes") as nodes,
        contextlib.ExitStack() as stack,
    ):
        world = World(
            tmp_path,
            nodes=3,
            rounds=1000,
            round_timeout=message_seconds(),
            privacy={"minimum_batch": 1},
        )
        world.disks = {"server": servers, "ward-3": nodes}
        (servers / "runs").mkdir()
        (world.server / "runs").symlink_to(servers / "runs")
        owner = world.folder / "ward-3" / "device.toml"
        owner.write_text(owner.read_text().replace('"device.db"', f'"{nodes}/device.db"'))
        world.network = stack.enter_context(Network(world.deployment.server.local_port))
        address = f"127.0.0.1:{world.network.server_address[1]}"
        seconds = world.plan.window.seconds
        processes = world.deployment.nodes[1].processes(address, seconds)
        world.sites["ward-2"] = dataclasses.replace(world.sites["ward-2"], processes=processes)
        stack.callback(world.network.shutdown)
        with world:
            world.run()
            world.wait_for_round(1)
            wait_for_users(world, 9)
            yield world


@pytest.mark.nightly
def test_a_run_goes_on_though_disks_fill_and_a_network_fails(world):
    filler = fill(world.disks["ward-3"])
    wait_for_trouble(world, "ward-3", "this device does not take part in this round")
    wait_for_users(world, 6)
    assert "database or disk is full" in (world.folder / "ward-3" / "node.out").read_text()
    filler.unlink()
    wait_for_users(world, 9)

    world.network.delay = 0.05
    wait_for_users(world, 9)
    world.network.whole.clear()
    wait_for_users(world, 6)
    # The second once Flower has missed the node's heartbeats.
    wait_for_trouble(world, "ward-2", r"no answer within \d+ s|not connected; .*")
    world.network.delay = 0.0
    world.network.whole.set()
    wait_for_users(world, 9)

    filler = fill(world.disks["server"])
    code, _, err = world.finish()
    assert code == 1
    assert re.fullmatch(r"error: .*(disk is full; .*|No space left on device.*)\n", err), err
    played, spent = [row["round"] for row in world.rows], world.rounds_spent
    filler.unlink()
    world.resume()
    world.wait_for_round(spent[-1] + 2)
    world.command.send_signal(signal.SIGINT)
    code, _, err = world.finish()
    assert (code, err) == (130, ""), world.tell()

    rows = [row["round"] for row in world.rows]
    assert rows[: len(played)] == played
    assert len(rows) == len(set(rows))
    assert world.rounds_spent == list(range(1, world.rounds_spent[-1] + 1))
    assert set(rows) <= set(world.rounds_spent)
    assert all(row["reports"] <= 9 + 40 and row["rejected"] == 0 for row in world.rows)
    for node in ("ward-1", "ward-2"):
        offered = world.rounds_offered(node)
        assert len(offered) == len(set(offered))
        assert set(offered) <= set(world.rounds_spent)
