"""Peers that are slow, silent, or gone without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from run_world import LIMIT, wait_until
from shuffler_world import World, in_release, raw_channel, stub_of
from shufl.shuffler import (
    IntakeClient,
    Outcome,
    ShufflerError,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.service import grpc_server
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES

IDLE = 0.2


@pytest.mark.parametrize(("length", "known"), [(100, 1), (PIECE_BYTES + 1, 4)])
def test_a_report_is_sent_before_the_next_is_made(
    here: Callable[..., World], length: int, known: int
):
    """However long that takes. A short one may wait for the next while calls are under way."""
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=length, users=4)
    sent = [os.urandom(length) for _ in range(4)]

    def reports() -> Iterator[tuple[int, bytes]]:
        for user, sealed in enumerate(sent):
            due = min(user, known)
            wait_until(lambda: accepted(world) >= due, LIMIT, "the report before")  # noqa: B023
            yield user, sealed

    assert list(world.intake.submit(header, reports())) == [Verdict.ACCEPTED] * 4
    assert ended(world) == 0
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert sorted(world.control.release("run", 1)) == sorted(sent)


def accepted(world: World) -> float:
    return world.process.scrape().get('shufl_reports_total{verdict="ACCEPTED"}', 0)


def ended(world: World) -> float:
    """How many calls the shuffler has ended because they said nothing."""
    return world.process.scrape().get('shufl_refusals_total{reason="IDLE"}', 0)


NO_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]


def test_a_node_that_does_not_take_its_answers_keeps_only_itself_out(here: Callable[..., World]):
    authority = Authority.create()
    world = here(authority=authority, limits={"calls_per_sender": 2})
    header = world.begin()
    deaf = authority.issue(Role.NODE, "deaf", users=200)
    users = range(200)  # so many that their verdicts do not fit
    junk = shuffler_pb2.SubmitRequest(run_id="nobody", users=users, sealed=bytes(200))
    with raw_channel(world, deaf, NO_WINDOW) as channel:
        submit = channel.stream_stream(
            "/shufl.v1.Intake/Submit",
            shuffler_pb2.SubmitRequest.SerializeToString,
            shuffler_pb2.SubmitReply.FromString,
        )
        calls = [submit(iter([junk]), timeout=LIMIT) for _ in range(2)]
        unknown = 'shufl_reports_total{verdict="UNKNOWN_RUN"}'
        wait_until(lambda: world.process.scrape().get(unknown) == 400, LIMIT, "both calls")
        with raw_channel(world, deaf) as again, pytest.raises(grpc.RpcError) as refused:
            stub_of("Intake", again).Submit(junk, timeout=LIMIT)
        assert refused.value.details().startswith("BUSY")
        assert world.submit(header, world.reports(header, 1)) == [Verdict.ACCEPTED]
        assert [len(next(call).verdicts) for call in calls] == [200, 200]


RELAY = """
import socket, sys, threading
port, burst, pauses = map(float, sys.argv[1:])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def copy(source, target, pauses):
    passed = 0
    while data := source.recv(65536):
        target.sendall(data)
        passed += len(data)
        if passed > burst and pauses > 0:
            passed, pauses = 0, pauses - 1
            sys.stdin.readline()
while True:
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", int(port)))
    for each in ((near, far, pauses), (far, near, 0)):
        threading.Thread(target=copy, args=each, daemon=True).start()
"""


@pytest.fixture
def relay() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that pass connections on to an address, with pauses between bursts.

    A pause ends with a line on standard input.
    """
    relays: list[subprocess.Popen[bytes]] = []

    def starter(address: str, burst: int = 0, pauses: float = 0) -> subprocess.Popen[bytes]:
        numbers = address.rpartition(":")[2], burst, pauses
        command = [sys.executable, "-c", RELAY, *map(str, numbers)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        relays.append(subprocess.Popen(command, **pipes))
        return relays[-1]

    yield starter
    for process in relays:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_report_that_stops_on_its_way_is_sent_again(here, relay):
    """And what it holds meanwhile is given back, as where a machine stands still."""
    world = here(limits={"idle_seconds": IDLE, "calls_per_sender": 1})
    header = world.begin(report_bytes=8 * PIECE_BYTES, users=2)
    between = relay(world.process.address, 3 * PIECE_BYTES, 1)
    port = int(between.stdout.readline())
    sealed = os.urandom(8 * PIECE_BYTES)
    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, LIMIT) as intake,
        ThreadPoolExecutor() as threads,
    ):
        sending = threads.submit(lambda: list(intake.submit(header, [(0, sealed)])))
        wait_until(lambda: ended(world), LIMIT, "an idle call")
        other = bytes(8 * PIECE_BYTES)
        assert world.submit(header, [(1, other)]) == [Verdict.ACCEPTED]
        between.stdin.write(b"\n")
        assert sending.result(LIMIT) == [Verdict.ACCEPTED]
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert sorted(world.control.release("run", 1)) == sorted([sealed, other])


def test_a_report_is_sent_again_for_no_longer_than_a_verdict_may_take(here, relay):
    """Nothing of it passes any more, and a process in between stands still."""
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=8 * PIECE_BYTES, users=1)
    between = relay(world.process.address, 3 * PIECE_BYTES, 1)
    port = int(between.stdout.readline())
    sealed = bytes(8 * PIECE_BYTES)
    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, timeout=0.5) as intake,
        pytest.raises(ShufflerError, match=r"IDLE|nothing within 0.5 s"),
    ):
        list(intake.submit(header, [(0, sealed)]))


@pytest.mark.slow
def test_a_release_that_is_not_read_ends_and_can_be_asked_for_again(here, tmp_path: Path):
    log = tmp_path / "log"
    world = here(log_file=log, limits={"idle_seconds": IDLE})
    release = in_release(world)
    wait_until(lambda: "a release is not read" in log.read_text(), LIMIT, "its end")
    with pytest.raises(ShufflerUnavailable, match="the release is not read"):
        list(release)
    assert len(list(world.control.release("run", 1))) == 40


@pytest.mark.slow
def test_a_release_that_nobody_reads_does_not_hold_up_the_end(
    here: Callable[..., World], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grpc_server, "_STOP_SECONDS", 0.0)
    world = here(limits={"idle_seconds": IDLE, "stop_seconds": 2 * LIMIT})
    release = in_release(world)
    world.process.begin_to_stop()[0].result(LIMIT)
    with pytest.raises(ShufflerUnavailable):
        list(release)
