"""Peers that are slow, silent, or gone without a word."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from run_world import LIMIT, wait_until
from shuffler_world import World, in_release, raw_channel, wait_for_streams
from shufl.shuffler import (
    IntakeClient,
    Outcome,
    Refusal,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.service import server
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.stub import Stub

IDLE = 0.2


def slowly(world: World, reports: list[tuple[int, bytes]], slow: set[int]):
    """Some come when the shuffler has ended the stream of those before."""
    for user, sealed in reports:
        if user in slow:
            wait_for_streams(world.process, 0)
        yield user, sealed


@pytest.mark.parametrize("length", [100, PIECE_BYTES + 1])
def test_a_node_that_is_slower_than_the_idle_limit_gets_all_its_reports_in(
    here: Callable[..., World], length: int
):
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=length, users=7)
    reports = [(user, os.urandom(length)) for user in range(7)]
    assert world.submit(header, slowly(world, reports, {0, 2, 3, 6})) == [Verdict.ACCEPTED] * 7
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    released = list(world.control.release("run", 1))
    assert sorted(released) == sorted(sealed for _, sealed in reports)


@pytest.mark.slow
def test_pauses_near_the_idle_limit_lose_and_repeat_nothing(here: Callable[..., World]):
    """The shuffler ends a stream while a report is on its way: that one is sent again."""
    world = here(limits={"idle_seconds": IDLE, "streams": 8, "streams_per_sender": 8})
    header = world.begin(report_bytes=100)

    def paused(number: int) -> Iterator[tuple[int, bytes]]:
        draw = random.Random(number)
        for user in range(20 * number, 20 * number + 20):
            if draw.random() < 0.2:
                time.sleep(IDLE + draw.uniform(-0.01, 0.01))
            yield user, os.urandom(100)

    def node(number: int) -> list[Verdict]:
        with IntakeClient(world.process.address, world.process.submit, LIMIT) as intake:
            return list(intake.submit(header, paused(number)))

    with ThreadPoolExecutor(8) as nodes:
        assert list(nodes.map(node, range(8))) == [[Verdict.ACCEPTED] * 20] * 8
    world.control.close_round("run", 1)
    assert len(set(world.control.release("run", 1))) == 160


NO_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]


def test_a_node_that_does_not_take_its_answers_is_ended_and_keeps_only_itself_out(
    here: Callable[..., World],
):
    authority = Authority.create()
    limits = {"streams": 1, "streams_per_sender": 1, "idle_seconds": IDLE}
    world = here(authority=authority, limits=limits)
    header = world.begin()
    reports = world.reports(header, 2)
    deaf = authority.issue(Role.NODE, "deaf", users=1)
    stop = threading.Event()

    def requests():
        while not stop.wait(0.001):
            yield shuffler_pb2.SubmitRequest(run_id="nobody", users=[0])

    with raw_channel(world, deaf, NO_WINDOW) as channel:
        call = Stub("Intake", channel).Submit(requests(), timeout=LIMIT)
        wait_for_streams(world.process, 1)
        wait_for_streams(world.process, 0)
        assert world.submit(header, reports[:1]) == [Verdict.ACCEPTED]
        with raw_channel(world, deaf) as again, pytest.raises(grpc.RpcError) as refused:
            list(Stub("Intake", again).Submit(iter([]), timeout=LIMIT))
        assert refused.value.details().startswith(Refusal.BUSY)
        stop.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.details() == "answers are not taken"
    with IntakeClient(world.process.address, deaf, LIMIT) as again:
        verdicts = list(again.submit(header, reports))  # once the end of the stream is noticed
    assert verdicts == [Verdict.ACCEPTED, Verdict.BAD_SENDER]


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


def wait_for_ends(world: World, count: int, or_state: Callable[[], bool] = lambda: False) -> None:
    """Waits until the shuffler has ended so many streams because they were idle."""
    name = 'shufl_refusals_total{reason="IDLE"}'
    wait_until(
        lambda: world.process.scrape().get(name, 0) >= count or or_state(), LIMIT, "an idle stream"
    )


def test_a_report_that_stops_on_its_way_is_sent_again(here, relay):
    """The stream that is ended has brought no verdict yet, as on a machine that stands still."""
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=8 * PIECE_BYTES, users=1)
    between = relay(world.process.address, 3 * PIECE_BYTES, 1)
    port = int(between.stdout.readline())
    sealed = os.urandom(8 * PIECE_BYTES)
    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, LIMIT) as intake,
        ThreadPoolExecutor() as threads,
    ):
        sending = threads.submit(lambda: list(intake.submit(header, [(0, sealed)])))
        wait_for_ends(world, 1)
        between.stdin.write(b"\n")
        assert sending.result(LIMIT) == [Verdict.ACCEPTED]
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert list(world.control.release("run", 1)) == [sealed]


def test_a_report_is_sent_again_for_no_longer_than_a_verdict_may_take(here, relay):
    """No stream lasts until the whole report has passed.

    Whatever is left of a stream that has ended, each burst has a part of the next, but not all.
    """
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=16 * PIECE_BYTES, users=1)
    between = relay(world.process.address, 12 * PIECE_BYTES, math.inf)
    port = int(between.stdout.readline())
    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, timeout=2) as intake,
        ThreadPoolExecutor() as threads,
    ):
        sealed = bytes(16 * PIECE_BYTES)
        sending = threads.submit(lambda: list(intake.submit(header, [(0, sealed)])))
        for ended in range(1, 1000):
            wait_for_ends(world, ended, or_state=sending.done)
            if sending.done():
                break
            between.stdin.write(b"\n")
        assert sending.done()
        with pytest.raises(ShufflerUnavailable, match=r"nothing within 2 s"):
            sending.result(LIMIT)


def test_a_node_that_vanishes_without_a_word_gives_its_stream_back(here, relay):
    """Its connection stays open, and nothing passes: a process in between is stopped."""
    world = here(limits={"streams": 1, "streams_per_sender": 1, "idle_seconds": IDLE})
    header = world.begin(report_bytes=3 * PIECE_BYTES, users=2)
    between = relay(world.process.address)
    port = int(between.stdout.readline())
    hold = threading.Event()

    def reports():
        yield 0, bytes(3 * PIECE_BYTES)
        accepted = 'shufl_reports_total{verdict="ACCEPTED"}'
        wait_until(lambda: world.process.scrape().get(accepted), LIMIT, "the first report")
        os.kill(between.pid, signal.SIGSTOP)
        os.waitpid(between.pid, os.WUNTRACED)  # until it has stopped: not a byte passes now
        yield 1, bytes(3 * PIECE_BYTES)
        hold.wait(LIMIT)

    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, timeout=0.5) as intake,
        ThreadPoolExecutor() as threads,
    ):
        lost = threads.submit(lambda: list(intake.submit(header, reports())))
        wait_for_ends(world, 1)
        wait_for_streams(world.process, 0)
        later = [(user, bytes(3 * PIECE_BYTES)) for user in (0, 1)]
        # Its stream is nobody's by now, but its credential's until the end of it is sent.
        assert world.submit(header, later) == [Verdict.DUPLICATE, Verdict.ACCEPTED]
        between.kill()
        hold.set()
        with pytest.raises(ShufflerUnavailable):
            lost.result(LIMIT)
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert len(list(world.control.release("run", 1))) == 2


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
    monkeypatch.setattr(server, "_STOP_SECONDS", 0.0)
    world = here(limits={"idle_seconds": IDLE, "stop_seconds": 2 * LIMIT})
    release = in_release(world)
    world.process.begin_to_stop()[0].result(LIMIT)
    with pytest.raises(ShufflerUnavailable):
        list(release)
