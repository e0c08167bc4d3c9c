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

from shuffler_world import World, exit_code, free_port, in_release, raw_channel, scrape
from shufl.shuffler import (
    IntakeClient,
    Outcome,
    Refusal,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.stub import Stub

IDLE = 0.8  # longer than a busy machine stands still


def slowly(reports: list[tuple[int, bytes]], pauses: list[float]) -> Iterator[tuple[int, bytes]]:
    for report, pause in zip(reports, pauses, strict=True):
        time.sleep(pause)
        yield report


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, PIECE_BYTES + 1])
def test_a_node_that_is_slower_than_the_idle_limit_gets_all_its_reports_in(
    start: Callable[..., World], length: int
):
    world = start(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=length)
    reports = [(user, os.urandom(length)) for user in range(7)]
    pauses = [pause * IDLE for pause in (1.3, 0, 1.3, 1.3, 0, 0, 1.3)]
    assert world.submit(header, slowly(reports, pauses)) == [Verdict.ACCEPTED] * 7
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    released = list(world.control.release("run", 1))
    assert sorted(released) == sorted(sealed for _, sealed in reports)


@pytest.mark.slow
def test_pauses_near_the_idle_limit_lose_and_repeat_nothing(start: Callable[..., World]):
    """The shuffler ends a stream while a report is on its way: that one is sent again."""
    world = start(limits={"idle_seconds": IDLE, "streams": 16, "streams_per_sender": 16})
    header = world.begin(report_bytes=100)

    def node(number: int) -> list[Verdict]:
        draw = random.Random(number)
        reports = [(50 * number + user, os.urandom(100)) for user in range(50)]
        pauses = [0 if draw.random() < 0.95 else IDLE + draw.uniform(-0.01, 0.01) for _ in reports]
        with IntakeClient(world.process.address, world.process.submit) as intake:
            return list(intake.submit(header, slowly(reports, pauses)))

    with ThreadPoolExecutor(16) as nodes:
        assert list(nodes.map(node, range(16))) == [[Verdict.ACCEPTED] * 50] * 16
    world.control.close_round("run", 1)
    assert len(set(world.control.release("run", 1))) == 800


NO_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]


def no_streams(address: str) -> None:
    """Waits until there are none."""
    while scrape(address)["shufl_streams"]:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_node_that_does_not_take_its_answers_is_ended_and_keeps_only_itself_out(
    start: Callable[..., World],
):
    address, authority = f"127.0.0.1:{free_port()}", Authority.create()
    world = start(
        authority=authority,
        metrics=address,
        limits={"streams": 1, "streams_per_sender": 1, "idle_seconds": IDLE},
    )
    header = world.begin()
    reports = world.reports(header, 2)
    deaf = authority.issue(Role.NODE, "deaf", users=1)
    stop = threading.Event()

    def requests():
        while not stop.is_set():
            yield shuffler_pb2.SubmitRequest(run_id="nobody", users=[0])
            time.sleep(0.001)

    with raw_channel(world, deaf, NO_WINDOW) as channel:
        call = Stub("Intake", channel).Submit(requests(), timeout=60)
        while not scrape(address)["shufl_streams"]:
            time.sleep(0.02)
        no_streams(address)
        assert world.submit(header, reports[:1]) == [Verdict.ACCEPTED]
        with (
            IntakeClient(world.process.address, deaf) as again,
            pytest.raises(ShufflerRefused) as refused,
        ):
            list(again.submit(header, reports, deadline=0.5))
        assert refused.value.reason is Refusal.BUSY
        stop.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.details() == "answers are not taken"
    with IntakeClient(world.process.address, deaf) as again:
        verdicts = list(again.submit(header, reports))  # once the end of the stream is noticed
    assert verdicts == [Verdict.ACCEPTED, Verdict.BAD_SENDER]


RELAY = """
import socket, sys, threading, time
port, burst, seconds, pauses = map(float, sys.argv[1:])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def copy(source, target, pauses):
    passed = 0
    while data := source.recv(65536):
        target.sendall(data)
        passed += len(data)
        if passed > burst and pauses > 0:
            passed, pauses = 0, pauses - 1
            time.sleep(seconds)
while True:
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", int(port)))
    for each in ((near, far, pauses), (far, near, 0)):
        threading.Thread(target=copy, args=each, daemon=True).start()
"""


@pytest.fixture
def relay() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that pass connections on to an address, with pauses between bursts."""
    relays: list[subprocess.Popen[str]] = []

    def starter(
        address: str, burst: int = 0, seconds: float = 0, pauses: float = 0
    ) -> subprocess.Popen[str]:
        numbers = (address.rpartition(":")[2], burst, seconds, pauses)
        command = [sys.executable, "-c", RELAY, *map(str, numbers)]
        relays.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return relays[-1]

    yield starter
    for process in relays:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_report_that_stops_on_its_way_is_sent_again(start, relay):
    """The stream that is ended has brought no verdict yet, as on a machine that stands still."""
    world = start(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=8 * PIECE_BYTES)
    port = int(relay(world.process.address, 3 * PIECE_BYTES, 1.5 * IDLE, 1).stdout.readline())
    sealed = os.urandom(8 * PIECE_BYTES)
    with IntakeClient(f"127.0.0.1:{port}", world.process.submit) as intake:
        assert list(intake.submit(header, [(0, sealed)])) == [Verdict.ACCEPTED]
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    assert list(world.control.release("run", 1)) == [sealed]


@pytest.mark.slow
def test_a_report_is_sent_again_for_no_longer_than_a_verdict_may_take(start, relay):
    """No stream lasts until the whole report has passed."""
    world = start(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=8 * PIECE_BYTES)
    bursts = 3 * PIECE_BYTES, 1.5 * IDLE, math.inf
    port = int(relay(world.process.address, *bursts).stdout.readline())
    with (
        IntakeClient(f"127.0.0.1:{port}", world.process.submit, timeout=5 * IDLE) as intake,
        pytest.raises(ShufflerUnavailable, match=r"nothing within 4 s"),
    ):
        list(intake.submit(header, [(0, bytes(8 * PIECE_BYTES))]))


@pytest.mark.slow
def test_a_node_that_vanishes_without_a_word_gives_its_stream_back(start, relay):
    """Its connection stays open, and nothing passes: a process in between is stopped."""
    address = f"127.0.0.1:{free_port()}"
    world = start(
        metrics=address, limits={"streams": 1, "streams_per_sender": 1, "idle_seconds": IDLE}
    )
    header = world.begin(report_bytes=3 * PIECE_BYTES)
    between = relay(world.process.address)
    port = int(between.stdout.readline())
    hold = threading.Event()

    def reports():
        yield 0, bytes(3 * PIECE_BYTES)
        while not scrape(address).get('shufl_reports_total{verdict="ACCEPTED"}'):
            time.sleep(0.02)
        os.kill(between.pid, signal.SIGSTOP)
        os.waitpid(between.pid, os.WUNTRACED)  # until it has stopped: not a byte passes now
        yield 1, bytes(3 * PIECE_BYTES)
        hold.wait(60)

    def submit() -> None:
        with pytest.raises(ShufflerUnavailable):
            list(intake.submit(header, reports()))
        lost.set()

    lost = threading.Event()
    with IntakeClient(f"127.0.0.1:{port}", world.process.submit, timeout=5) as intake:
        thread = threading.Thread(target=submit)
        thread.start()
        while not scrape(address).get('shufl_refusals_total{reason="IDLE"}'):
            time.sleep(0.02)
        no_streams(address)
        later = [(user, bytes(3 * PIECE_BYTES)) for user in (0, 1)]
        # Its stream is nobody's by now, but its credential's until the end of it is sent.
        verdicts = world.submit(header, later)
        assert verdicts == [Verdict.DUPLICATE, Verdict.ACCEPTED]
        between.kill()
        hold.set()
        thread.join(60)
    assert lost.is_set()
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    assert len(list(world.control.release("run", 1))) == 2


@pytest.mark.slow
def test_a_release_that_is_not_read_ends_and_can_be_asked_for_again(start, tmp_path: Path):
    log = tmp_path / "log"
    world = start(log_file=log, limits={"idle_seconds": IDLE})
    release = in_release(world)
    while "a release is not read" not in log.read_text():
        time.sleep(0.02)
    with pytest.raises(ShufflerUnavailable, match="the release is not read"):
        list(release)
    assert len(list(world.control.release("run", 1))) == 40


@pytest.mark.slow
def test_a_release_that_nobody_reads_does_not_hold_up_the_end(start: Callable[..., World]):
    world = start(limits={"idle_seconds": IDLE, "stop_seconds": 3600})
    release = in_release(world)
    os.kill(world.process.pid, signal.SIGTERM)
    assert exit_code(world) == 0
    with pytest.raises(ShufflerUnavailable):
        list(release)
