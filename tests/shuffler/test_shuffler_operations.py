"""Health, metrics, logs, limits, shutdown; and what arbitrary bytes do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shuffler_world import (
    KEY_DIGEST,
    PUBLIC_KEY,
    Silence,
    World,
    exit_code,
    free_port,
    in_release,
    logged,
    plan,
    raw_channel,
    scrape,
)
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    Refusal,
    RoundHeader,
    ShufflerProcess,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.service.operations import Pace
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.stub import Stub


def test_metrics_count_reasons_and_the_log_names_nobody(
    start: Callable[..., World], tmp_path: Path
):
    address = f"127.0.0.1:{free_port()}"
    log = tmp_path / "log"
    world = start(metrics=address, log_file=log)
    header = world.begin(minimum_batch=2)
    reports = world.reports(header, 3)
    world.submit(header, [*reports, reports[0], (9, b"short"), (10**9, reports[0][1])])
    while scrape(address)["shufl_streams"]:  # its end is not yet noticed
        pass
    with pytest.raises(ShufflerRefused):
        list(world.control.release("run", 1))
    world.control.close_round("run", 1)
    list(world.control.release("run", 1))
    world.control.open_round("run", 2, "m", world.public_key)
    world.control.close_round("run", 2)
    values = scrape(address)
    assert values == {
        'shufl_reports_total{verdict="ACCEPTED"}': 3,
        'shufl_reports_total{verdict="DUPLICATE"}': 1,
        'shufl_reports_total{verdict="WRONG_LENGTH"}': 1,
        'shufl_reports_total{verdict="BAD_SENDER"}': 1,
        'shufl_rounds_total{outcome="RELEASABLE"}': 1,
        'shufl_rounds_total{outcome="BELOW_MINIMUM"}': 1,
        "shufl_releases_total": 1,
        "shufl_disagreements_total": 0,
        'shufl_refusals_total{reason="ROUND_NOT_CLOSED"}': 1,
        "shufl_streams": 0,
    }
    lines = logged(log)
    assert [line["event"] for line in lines] == [
        "run created",
        "round opened",
        "round closed",
        "batch released",
        "round opened",
        "round closed",
    ]
    assert lines[-1] == {**lines[-1], "run": "run", "round": 2, "outcome": "BELOW_MINIMUM"}
    allowed = {"level", "event", "run", "round", "outcome"}
    assert all(set(line) <= allowed for line in lines)
    assert not re.search(r"node|user|127\.0\.0\.1", json.dumps(lines))


def test_health_is_told_to_a_monitor(start: Callable[..., World]):
    world = start()
    with raw_channel(world, world.process.monitor) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unserved:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
        assert unserved.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_streams_of_one_sender_are_limited(start: Callable[..., World]):
    address = f"127.0.0.1:{free_port()}"
    world = start(metrics=address, limits={"streams": 2, "streams_per_sender": 1})
    header = world.begin()
    [(_, sealed)] = world.reports(header, 1)
    begun, hold = threading.Event(), threading.Event()

    def reports():
        yield 0, sealed
        begun.set()
        hold.wait(60)

    stream = world.intake.submit(header, reports())
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend(stream))
    thread.start()
    begun.wait(60)
    while not scrape(address)["shufl_streams"]:  # it has not arrived yet
        pass
    with (
        IntakeClient(world.process.address, world.process.submit) as second,
        pytest.raises(ShufflerRefused) as refused,
    ):
        list(second.submit(header, [(1, sealed)], deadline=5))
    assert refused.value.reason is Refusal.BUSY
    hold.set()
    thread.join()
    assert verdicts == [Verdict.ACCEPTED]


def signal_and_wait(world: World) -> None:
    """SIGTERM, and waits until new calls are refused."""
    os.kill(world.process.pid, signal.SIGTERM)
    with ControlClient(world.process.address, world.process.control, timeout=5) as other:
        while True:
            try:
                other.create_run("late", plan(), 64)
            except ShufflerUnavailable:
                return


@pytest.mark.slow
def test_a_release_that_runs_at_sigterm_is_finished_and_new_calls_are_refused(
    start: Callable[..., World],
):
    world = start(limits={"stop_seconds": 120})
    release = in_release(world)
    signal_and_wait(world)
    time.sleep(2.5)  # longer than other calls get
    assert world.process.alive
    assert len(list(release)) == 39
    assert exit_code(world) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a second signal", "the end of the time"])
def test_a_release_at_sigterm_ends_with(start: Callable[..., World], how: str, tmp_path: Path):
    world = start(
        tmp_path / "directory", limits={"stop_seconds": 3 if how == "the end of the time" else 600}
    )
    release = in_release(world)
    signal_and_wait(world)
    if how == "a second signal":
        time.sleep(2.5)
        assert world.process.alive
        os.kill(world.process.pid, signal.SIGTERM)
    assert exit_code(world) == 0
    with pytest.raises(ShufflerUnavailable):
        list(release)


def test_the_parent_waits_longer_than_its_child():
    for limits, stop_seconds in (({}, 30), ({"stop_seconds": 77}, 77)):
        assert ShufflerProcess(limits=limits).stop_timeout > stop_seconds


@pytest.mark.parametrize("pieces", [(b"",), (b"x", b""), (b"x", b"y", b"")])
def test_an_empty_piece_ends_the_stream(shared: World, pieces: tuple[bytes]):
    run = f"{len(pieces)} pieces"
    shared.begin(run)
    requests = Silence(
        *(
            shuffler_pb2.SubmitRequest(run_id=run, round=1, users=[0], sealed=sealed, more=True)
            for sealed in pieces
        )
    )
    with raw_channel(shared) as channel:
        with pytest.raises(grpc.RpcError) as ended:
            list(Stub("Intake", channel).Submit(iter(requests), timeout=60))
        requests.let_go.set()
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ended.value.details() == "MALFORMED: a piece of a report is empty"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from("ab")), max_size=80),
    st.floats(0.5, 20),
    st.integers(1, 10),
)
def test_no_sender_is_faster_than_its_rate_after_a_burst(steps, rate, burst):
    """In any window of t seconds at most burst + t * rate reports of one sender pass."""
    pace = Pace(rate, burst)
    passed: dict[str, list[float]] = {"a": [], "b": []}
    now = 0.0
    for step, sender in steps:
        now += step
        passed[sender].append(now + pace.delay(sender, now))
    for moments in passed.values():
        for first in range(len(moments)):
            for last in range(first, len(moments)):
                window = moments[last] - moments[first]
                assert last - first + 1 <= burst + window * rate + 1e-6


def test_a_sender_that_keeps_to_its_rate_is_not_slowed_and_others_do_not_matter():
    pace = Pace(10, 1)
    delays = [pace.delay("a", moment / 10) for moment in range(50)]
    assert delays == pytest.approx([0.0] * 50, abs=1e-9)
    assert pace.delay("b", 4.9) == 0.0
    assert pace.delay("b", 4.9) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def fuzzed():
    address = f"127.0.0.1:{free_port()}"
    with ShufflerProcess(metrics=address) as process:
        world = World(process)
        world.control.create_run("run", plan(50, 1), 64)
        nonce = world.control.open_round("run", 1, "m", PUBLIC_KEY)
        digest = hashlib.sha256(plan(50, 1)).hexdigest()
        yield world, address, RoundHeader("run", 1, "m", digest, KEY_DIGEST, nonce)
        assert process.alive
        world.close()


REQUESTS = st.builds(
    shuffler_pb2.SubmitRequest,
    run_id=st.sampled_from(["run", "", "nun"]),
    round=st.integers(0, 2**64 - 1) | st.just(1),
    commitment=st.text(max_size=70),
    users=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 60), max_size=3),
    sealed=st.binary(max_size=100) | st.sampled_from([b"a" * 64, b"a" * 128]),
    more=st.booleans(),
)


def verdicts_due(requests) -> tuple[int, bool]:
    """How many reports are whole before something is malformed, and whether nothing is."""
    due, in_pieces = 0, False
    for request in requests:
        users = len(request.users)
        if (in_pieces or request.more) and not request.sealed:
            return due, False
        if not in_pieces:
            if not users or len(request.sealed) % users or (request.more and users > 1):
                return due, False
            due += 0 if request.more else users
        elif not request.more:
            due += 1
        in_pieces = request.more
    return due, not in_pieces


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(REQUESTS, max_size=8), st.booleans())
def test_any_well_formed_requests_get_a_verdict_each_or_the_stream_ends(fuzzed, requests, right):
    world, _, header = fuzzed
    for request in requests:
        if right:
            request.round, request.run_id = 1, "run"
            request.commitment = header.commitment
    due, good = verdicts_due(requests)
    with raw_channel(world) as channel:
        call = channel.stream_stream(
            "/shufl.v1.Intake/Submit",
            request_serializer=shuffler_pb2.SubmitRequest.SerializeToString,
            response_deserializer=shuffler_pb2.SubmitReply.FromString,
        )
        verdicts: list[int] = []
        try:
            for reply in call(iter(requests), timeout=60):
                verdicts += reply.verdicts
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not good and len(verdicts) <= due
        else:
            assert good and len(verdicts) == due
    assert all(Verdict(verdict) for verdict in verdicts)


METHODS = {
    "/shufl.v1.Intake/Agree": shuffler_pb2.AgreeRequest(run_id="run", round=1, commitment="c"),
    "/shufl.v1.Intake/Submit": shuffler_pb2.SubmitRequest(
        run_id="run",
        round=1,
        commitment="c" * 64,
        sealed=b"x" * 64,
        users=[3],
        more=True,
    ),
    "/shufl.v1.Control/CreateRun": shuffler_pb2.CreateRunRequest(
        run_id="run", plan=plan(50, 1), report_bytes=64
    ),
    "/shufl.v1.Control/OpenRound": shuffler_pb2.OpenRoundRequest(
        run_id="run", round=1, model_digest="m", public_key=PUBLIC_KEY
    ),
    "/shufl.v1.Control/CloseRound": shuffler_pb2.CloseRoundRequest(run_id="no"),
    "/shufl.v1.Control/Release": shuffler_pb2.ReleaseRequest(run_id="no", round=1),
    "/shufl.v1.Control/EndRound": shuffler_pb2.EndRoundRequest(run_id="no", round=1),
    "/shufl.v1.Control/EndRun": shuffler_pb2.EndRunRequest(run_id="no"),
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(service="a"),
}


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """Any bytes, or those of a message cut or with a bit flipped."""
    kind = draw(st.sampled_from(["any", "cut", "flip"]))
    if kind == "any":
        return draw(st.binary(max_size=200))
    place = draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        return whole[:place]
    flipped = bytearray(whole)
    flipped[place] ^= 1 << draw(st.integers(0, 7))
    return bytes(flipped)


def credentials_for(world: World, method: str):
    return world.process.submit if "Intake" in method else world.process.control


@pytest.mark.slow
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.sampled_from(sorted(METHODS)))
def test_any_bytes_are_answered_in_our_words_and_the_shuffler_goes_on(fuzzed, data, method):
    world, metrics, _ = fuzzed
    request = METHODS[method]
    messages = data.draw(st.lists(damaged(request.SerializeToString()), max_size=3))
    readable = [parses(type(request), message) for message in messages]
    before = scrape(metrics).get(MALFORMED, 0)
    with raw_channel(world, credentials_for(world, method)) as channel:
        try:
            list(channel.stream_stream(method)(iter(messages), timeout=60))
        except grpc.RpcError as error:
            reason = error.details().partition(":")[0]
            assert reason in Refusal.__members__ or error.code() is grpc.StatusCode.NOT_FOUND
            code, malformed = error.code(), reason == Refusal.MALFORMED
        else:
            code, malformed = grpc.StatusCode.OK, False
    assert malformed is (code is grpc.StatusCode.INVALID_ARGUMENT)
    if method.endswith("Submit"):
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
        assert all(readable) or malformed
    else:
        assert (messages and readable[0]) or malformed
    while scrape(metrics)["shufl_streams"]:  # its end is not yet noticed
        pass
    assert scrape(metrics).get(MALFORMED, 0) == before + malformed


MALFORMED = 'shufl_refusals_total{reason="MALFORMED"}'


def parses(kind: type, message: bytes) -> bool:
    try:
        kind.FromString(message)
    except DecodeError:
        return False
    return True


@pytest.mark.slow
def test_a_call_that_is_silent_or_says_nothing_is_ended(start: Callable[..., World]):
    world = start(limits={"idle_seconds": 0.3})
    for method in METHODS:
        with raw_channel(world, credentials_for(world, method)) as channel:
            call = channel.stream_stream(method)
            silent = Silence()
            with pytest.raises(grpc.RpcError) as ended:
                list(call(iter(silent), timeout=60))
            assert ended.value.code() is grpc.StatusCode.ABORTED
            silent.let_go.set()
            if method.endswith("Submit"):
                assert list(call(iter([]), timeout=60)) == []
                continue
            with pytest.raises(grpc.RpcError) as ended:
                list(call(iter([]), timeout=60))
            assert ended.value.details() == "MALFORMED: not a message of this protocol"
