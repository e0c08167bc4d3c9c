"""Health, metrics, logs, limits, shutdown; and what arbitrary bytes do."""

import hashlib
import itertools
import json
import os
import re
import signal

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from run_world import LIMIT
from shuffler_world import (
    KEY_DIGEST,
    METHODS,
    PUBLIC_KEY,
    Silence,
    exit_code,
    in_release,
    logged,
    plan,
    raw_channel,
    stub_of,
)
from shufl.shuffler import (
    ControlClient,
    Refusal,
    RoundHeader,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.service import grpc_server
from shufl.shuffler.wire import shuffler_pb2


def test_metrics_count_reasons_and_the_log_names_nobody(here, tmp_path):
    log = tmp_path / "log"
    world = here(log_file=log)
    header = world.begin(minimum_batch=2)
    reports = world.reports(header, 3)
    world.submit(header, [*reports, reports[0], (9, b"short"), (10**9, reports[0][1])])
    with pytest.raises(ShufflerRefused):
        list(world.control.release("run", 1))
    world.released(header)
    world.control.open_round("run", 2, "m", world.public_key)
    world.control.close_round("run", 2)
    assert world.process.scrape() == {
        'shufl_reports_total{verdict="ACCEPTED"}': 3,
        'shufl_reports_total{verdict="DUPLICATE"}': 1,
        'shufl_reports_total{verdict="WRONG_LENGTH"}': 1,
        'shufl_reports_total{verdict="BAD_SENDER"}': 1,
        'shufl_rounds_total{outcome="RELEASABLE"}': 1,
        'shufl_rounds_total{outcome="BELOW_MINIMUM"}': 1,
        "shufl_releases_total": 1,
        "shufl_disagreements_total": 0,
        'shufl_refusals_total{reason="ROUND_NOT_CLOSED"}': 1,
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


def test_health_is_told_to_a_monitor(shared):
    with raw_channel(shared, shared.process.monitor) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unserved:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT))
        assert unserved.value.code() is grpc.StatusCode.UNIMPLEMENTED


def until_calls_are_refused(world):
    with ControlClient(world.process.address, world.process.control, timeout=LIMIT) as other:
        while True:
            try:
                other.create_run("late", plan(), 64)
            except ShufflerUnavailable:
                return


@pytest.mark.slow
def test_a_release_that_runs_at_the_end_is_finished_and_new_calls_are_refused(here, monkeypatch):
    """Also where other calls get no time at all."""
    monkeypatch.setattr(grpc_server, "_STOP_SECONDS", 0.0)
    world = here(limits={"stop_seconds": LIMIT})
    release = in_release(world)
    stopped, _ = world.process.begin_to_stop()
    until_calls_are_refused(world)
    assert not stopped.done()
    assert len(list(release)) == 39
    stopped.result(LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [{"stop_seconds": 0.1}, {"stop_seconds": 2 * LIMIT, "idle_seconds": 2.0}]
)
def test_a_release_at_the_end_gets_no_more_than_its_time_nor_goes_on_unread(
    here, monkeypatch, limits
):
    monkeypatch.setattr(grpc_server, "_STOP_SECONDS", 0.0)
    world = here(limits=limits)
    release = in_release(world)
    world.process.begin_to_stop()[0].result(LIMIT)
    with pytest.raises(ShufflerUnavailable):
        list(release)


@pytest.mark.slow
def test_a_release_at_sigterm_goes_on_until_a_second_signal(start, tmp_path):
    world = start(tmp_path / "directory", limits={"stop_seconds": 2 * LIMIT})
    release = in_release(world)
    os.kill(world.process.pid, signal.SIGTERM)
    until_calls_are_refused(world)
    next(release)
    os.kill(world.process.pid, signal.SIGTERM)
    assert exit_code(world) == 0
    with pytest.raises(ShufflerUnavailable):
        list(release)


def test_a_message_with_more_reports_than_a_client_sends_at_once_is_refused(shared):
    shared.begin("many", users=1000)

    def message(number):
        users = range(number)
        return shuffler_pb2.SubmitRequest(run_id="many", users=users, sealed=bytes(number))

    with raw_channel(shared) as channel:
        stub = stub_of("Intake", channel)
        assert len(stub.Submit(message(256), timeout=LIMIT).verdicts) == 256
        with pytest.raises(grpc.RpcError, match="must have at most 256 reports") as ended:
            stub.Submit(message(257), timeout=LIMIT)
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def fuzzed(shared):
    """A round, and a channel for each role."""
    shared.control.create_run("run", plan(50, 1), 64)
    nonce = shared.control.open_round("run", 1, "m", PUBLIC_KEY)
    digest = hashlib.sha256(plan(50, 1)).hexdigest()
    header = RoundHeader("run", 1, "m", digest, KEY_DIGEST, nonce)
    with raw_channel(shared) as node, raw_channel(shared, shared.process.control) as server:
        yield shared.process, header, {"Intake": node, "Control": server, "Health": server}


REQUESTS = st.builds(
    shuffler_pb2.SubmitRequest,
    run_id=st.sampled_from(["run", "", "nun"]),
    round=st.integers(0, 2**64 - 1) | st.just(1),
    commitment=st.text(max_size=70),
    users=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 60), max_size=3),
    sealed=st.binary(max_size=100) | st.sampled_from([b"a" * 64, b"a" * 128]),
    count=st.integers(0, 2**64 - 1) | st.just(0),
    step=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**64 - 1) | st.just(0),
    start=st.integers(0, 2**64 - 1) | st.just(0),
    upload=st.integers(0, 2**64 - 1),
)


def verdicts_due(request):
    """How many there may be: one for each report, at most one for a piece; none: malformed."""
    users = len(request.users)
    alone = request.length or request.count > 1
    if not users or len(request.sealed) % users or (alone and users > 1):
        return range(0)
    return range(0, 2) if request.length else range(users, users + 1)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS, st.booleans())
def test_any_well_formed_request_gets_its_verdicts_and_any_other_is_refused(
    fuzzed, request_, right
):
    _, header, channels = fuzzed
    if right:
        request_.round, request_.run_id = 1, "run"
        request_.commitment = header.commitment
    due = verdicts_due(request_)
    try:
        verdicts = stub_of("Intake", channels["Intake"]).Submit(request_, timeout=LIMIT).verdicts
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not due
    else:
        assert len(verdicts) in due
        assert all(Verdict(verdict) for verdict in verdicts)


@st.composite
def damaged(draw, whole):
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


def service_of(method):
    return method.split("/")[1].rpartition(".")[2]


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(sorted(METHODS)))
def test_any_bytes_are_answered_in_our_words_and_the_shuffler_goes_on(fuzzed, data, method):
    shuffler, _, channels = fuzzed
    request = METHODS[method]
    messages = data.draw(st.lists(damaged(request.SerializeToString()), max_size=3))
    readable = [parses(type(request), message) for message in messages]
    before = shuffler.scrape()[MALFORMED]
    try:
        call = channels[service_of(method)].stream_stream(method)
        list(call(iter(messages), timeout=LIMIT))
    except grpc.RpcError as error:
        reason = error.details().partition(":")[0]
        assert reason in Refusal.__members__ or error.code() is grpc.StatusCode.NOT_FOUND
        code, malformed = error.code(), reason == Refusal.MALFORMED.name
    else:
        code, malformed = grpc.StatusCode.OK, False
    assert malformed is (code is grpc.StatusCode.INVALID_ARGUMENT)
    assert readable == [True] or malformed
    assert shuffler.scrape()[MALFORMED] == before + malformed


MALFORMED = 'shufl_refusals_total{reason="MALFORMED"}'


def parses(kind, message):
    try:
        kind.FromString(message)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_a_call_that_says_nothing_is_malformed(shared, method):
    role = shared.process.submit if "Intake" in method else shared.process.control
    with raw_channel(shared, role) as channel:
        call = channel.stream_stream(method)
        with pytest.raises(grpc.RpcError) as ended:
            list(call(iter([]), timeout=LIMIT))
        assert ended.value.details() == "MALFORMED: not a message of this protocol"


@pytest.mark.parametrize(
    ("messages", "why"),
    [(0, Refusal.IDLE), (1, Refusal.IDLE), (2, Refusal.MALFORMED)],
)
def test_a_call_that_does_not_end_with_its_message_is_ended_and_not_answered(here, messages, why):
    """Else who reads no answer might send more and more: gRPC keeps 2 MB of it for each call."""
    limits = {"idle_seconds": 0.01 if why is Refusal.IDLE else LIMIT}
    world, silent = here(limits=limits), Silence()
    with raw_channel(world) as node, raw_channel(world, world.process.control) as server:
        for method, request in METHODS.items():
            channel = node if "Intake" in method else server
            said = [request.SerializeToString()] * messages
            call = channel.stream_stream(method)(itertools.chain(said, silent), timeout=LIMIT)
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.details().startswith(why.name)
        silent.let_go.set()
