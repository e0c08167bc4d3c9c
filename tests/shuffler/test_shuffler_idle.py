"""Peers that are slow, silent, or gone without a word."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from threading import Event

import grpc
import pytest

from run_world import LIMIT, wait_until
from shuffler_world import ACCEPTED, Relay, in_release, raw_channel, stub_of
from shufl.shuffler import IntakeClient, ShufflerError, ShufflerUnavailable, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES

IDLE = 2.0  # less, and a busy machine is idle
ENDED = 'shufl_refusals_total{reason="IDLE"}'
"""Counts calls that were ended because they said nothing."""


@pytest.mark.parametrize(("length", "known"), [(100, 1), (PIECE_BYTES + 1, 4)])
def test_a_report_is_sent_before_the_next_is_made(here, length, known):
    """However long that takes. A short one may wait for the next while calls are under way."""
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=length, users=4)
    sent = [os.urandom(length) for _ in range(4)]

    def reports():
        for user, sealed in enumerate(sent):
            due = min(user, known)
            wait_until(lambda: world.process.scrape()[ACCEPTED] >= due, LIMIT, "the report before")  # noqa: B023
            yield user, sealed

    assert list(world.intake.submit(header, reports())) == [Verdict.ACCEPTED] * 4
    assert world.process.scrape()[ENDED] == 0
    assert sorted(world.released(header)) == sorted(sent)


NO_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]


def test_a_node_that_does_not_take_its_answers_keeps_only_itself_out(here):
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
        wait_until(lambda: world.process.scrape()[unknown] == 400, LIMIT, "both calls")
        with raw_channel(world, deaf) as again, pytest.raises(grpc.RpcError) as refused:
            stub_of("Intake", again).Submit(junk, timeout=LIMIT)
        assert refused.value.details().startswith("BUSY")
        assert world.submit(header, world.reports(header, 1)) == [Verdict.ACCEPTED]
        assert [len(next(call).verdicts) for call in calls] == [200, 200]


def test_a_report_that_stops_on_its_way_is_sent_again(here):
    """And what it holds meanwhile is given back, as where a machine stands still."""
    world, go_on = here(limits={"idle_seconds": IDLE, "calls_per_sender": 1}), Event()
    header = world.begin(report_bytes=8 * PIECE_BYTES, users=2)
    between = Relay(world.process.address, to_shuffler=repeat(3 * PIECE_BYTES), go_on=go_on)
    sealed, other = os.urandom(8 * PIECE_BYTES), bytes(8 * PIECE_BYTES)
    with (
        IntakeClient(between.address, world.process.submit, LIMIT) as intake,
        ThreadPoolExecutor() as threads,
    ):
        sending = threads.submit(lambda: list(intake.submit(header, [(0, sealed)])))
        wait_until(lambda: world.process.scrape()[ENDED], LIMIT, "an idle call")
        assert world.submit(header, [(1, other)]) == [Verdict.ACCEPTED]
        go_on.set()
        assert sending.result(LIMIT) == [Verdict.ACCEPTED]
    assert sorted(world.released(header)) == sorted([sealed, other])


def test_a_report_is_sent_again_for_no_longer_than_a_verdict_may_take(here):
    """Nothing of it passes any more, and what is in between stands still."""
    world = here(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=8 * PIECE_BYTES, users=1)
    between = Relay(world.process.address, to_shuffler=repeat(3 * PIECE_BYTES), go_on=Event())
    with (
        IntakeClient(between.address, world.process.submit, timeout=0.5) as intake,
        pytest.raises(ShufflerError, match=r"IDLE|nothing within 0.5 s"),
    ):
        list(intake.submit(header, [(0, bytes(8 * PIECE_BYTES))]))


@pytest.mark.slow
def test_a_release_that_is_not_read_ends_and_can_be_asked_for_again(here, tmp_path):
    log = tmp_path / "log"
    world = here(log_file=log, limits={"idle_seconds": IDLE})
    release = in_release(world)
    wait_until(lambda: "a release is not read" in log.read_text(), LIMIT, "its end")
    with pytest.raises(ShufflerUnavailable, match="the release is not read"):
        list(release)
    assert len(list(world.control.release("run", 1))) == 40
