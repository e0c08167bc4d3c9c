"""The shuffler's memory does not grow with a report, a round, or the number of streams."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from nights import by_night
from run_world import LIMIT, peak_bytes
from shuffler_world import World, open_batches, raw_channel, wait_for_streams
from shufl.shuffler import IntakeClient, Outcome, Verdict, message_length
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.stub import Stub

FEW = 1e-20  # blankets: two are made, and none is kept


def submit_at_once(world: World, header, streams: int, reports: int, length: int) -> list[Verdict]:
    """The same report from all users, over so many connections."""
    content = os.urandom(length)
    verdicts: list[Verdict] = []

    def stream(number: int) -> None:
        with IntakeClient(world.process.address, world.process.submit, timeout=LIMIT) as intake:
            users = range(number * reports, (number + 1) * reports)
            verdicts.extend(intake.submit(header, ((user, content) for user in users)))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "reports", "length", "most_mb"),
    [
        (8, 5, 4_000_000, 220),
        # 300 MB is what docs/shuffler.md promises.
        *by_night((24, 5, 4_000_000, 300), (4, 2, 64 * 2**20, 300), (24, 50, 250_000, 300)),
    ],
)
def test_memory_stays_flat(
    start: Callable[..., World], streams: int, reports: int, length: int, most_mb: int
):
    """With two blankets made meanwhile: how many of them are kept changes no work."""
    world = start()
    users = streams * reports
    header = world.begin(report_bytes=length, users=users, shuffler_blankets=FEW)
    verdicts = submit_at_once(world, header, streams, reports, length)
    assert verdicts == [Verdict.ACCEPTED] * streams * reports
    assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert sum(len(sealed) for sealed in world.control.release("run", 1)) == (
        streams * reports * length
    )
    assert peak_bytes(world.process.pid) < most_mb * 1e6


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "dimension"), [(3, 4_000_000), *by_night((4, 16_000_000))])
def test_sums_that_are_released_at_once_take_four_bytes_a_parameter(
    start: Callable[..., World], runs: int, dimension: int
):
    world, length = start(), message_length(dimension, "sum")
    sums = {"mixing": "sum", "cover": True, "accountant": "sum-central", "central_noise": 5.0}
    names = [f"run {number}" for number in range(runs)]
    for name in names:
        header = world.begin(name, report_bytes=length, users=1, **sums)
        assert submit_at_once(world, header, 1, 1, length) == [Verdict.ACCEPTED]
        assert world.control.close_round(name, 1).outcome is Outcome.RELEASABLE

    def released(name: str) -> int:
        return sum(map(len, world.control.release(name, 1)))

    with ThreadPoolExecutor(runs) as pool:
        assert list(pool.map(released, names)) == [length] * runs
    promised = 250 * 10**6 + 4 * runs * dimension  # docs/shuffler.md
    assert peak_bytes(world.process.pid) < promised


def pieces(header, count: int, more: bool, user: int = 0):
    for number in range(count):
        yield shuffler_pb2.SubmitRequest(
            run_id=header.run_id,
            round=header.round,
            commitment=header.commitment,
            users=[user],
            sealed=bytes(PIECE_BYTES),
            more=more or number < count - 1,
        )


def raw_submit(world: World, requests) -> list[Verdict]:
    with raw_channel(world) as channel:
        replies = Stub("Intake", channel).Submit(requests)
        return [Verdict(verdict) for reply in replies for verdict in reply.verdicts]


@pytest.mark.parametrize(("count", "verdict"), [(2, 5), (3, 1), (4, 5), (40, 5)])
def test_a_report_in_too_few_or_too_many_pieces_has_the_wrong_length(
    shared: World, count: int, verdict: int
):
    run = f"{count} pieces"
    header = shared.begin(run, report_bytes=3 * PIECE_BYTES, users=1)
    assert raw_submit(shared, pieces(header, count, more=False)) == [Verdict(verdict)]
    again = shared.submit(header, [(0, bytes(3 * PIECE_BYTES))])
    assert again == [Verdict.DUPLICATE if verdict == 1 else Verdict.ACCEPTED]
    shared.control.close_round(run, 1)
    assert list(shared.control.release(run, 1)) == [bytes(3 * PIECE_BYTES)]


@pytest.mark.slow
def test_a_report_that_breaks_off_or_does_not_end_is_not_in_the_batch(here):
    world = here()
    header = world.begin(report_bytes=64 * PIECE_BYTES, users=4)
    for requests in (pieces(header, 10, more=True), pieces(header, 300, more=True)):
        with pytest.raises(grpc.RpcError) as error:
            raw_submit(world, requests)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    one = os.urandom(64 * PIECE_BYTES)
    assert world.submit(header, [(0, one)]) == [Verdict.ACCEPTED]
    world.control.close_round("run", 1)
    assert list(world.control.release("run", 1)) == [one]


def test_the_room_of_pieces_given_up_is_taken_by_the_next(here: Callable[..., World]):
    """However often reports break off: they take no more than those at once."""
    world = here()
    header = world.begin(report_bytes=16 * PIECE_BYTES, users=1)
    for _ in range(10):
        with pytest.raises(grpc.RpcError):
            raw_submit(world, pieces(header, 10, more=True))
    whole = [(0, bytes(16 * PIECE_BYTES))]
    assert world.submit(header, whole) == [Verdict.ACCEPTED]


def test_long_reports_of_several_runs_in_one_stream_go_where_they_belong(
    here: Callable[..., World],
):
    world = here()
    a, b = (world.begin(run_id=run, report_bytes=3 * PIECE_BYTES, users=50) for run in "ab")
    sent = [(a, 0, 3), (a, 0, 3), (b, 0, 3), (b, 1, 3), (a, 1, 2), (a, 1, 3), (a, 50, 3)]
    requests = (
        piece for header, user, count in sent for piece in pieces(header, count, False, user)
    )
    verdicts = raw_submit(world, requests)
    names = "ACCEPTED DUPLICATE ACCEPTED ACCEPTED WRONG_LENGTH ACCEPTED BAD_SENDER"
    assert [verdict.name for verdict in verdicts] == names.split()
    for run in "ab":
        assert world.control.close_round(run, 1).outcome is Outcome.RELEASABLE
        assert list(world.control.release(run, 1)) == [bytes(3 * PIECE_BYTES)] * 2


def test_a_stream_too_many_is_refused_and_the_others_go_on(here: Callable[..., World]):
    world = here()
    header = world.begin()
    [(_, sealed)] = world.reports(header, 1)
    clients = [IntakeClient(world.process.address, world.process.submit, LIMIT) for _ in range(24)]
    hold = threading.Event()

    def reports(number: int):
        yield number, sealed
        hold.wait(LIMIT)
        yield number, sealed

    streams = [client.submit(header, reports(n)) for n, client in enumerate(clients)]
    done: list[list[Verdict]] = []
    threads = [threading.Thread(target=lambda s=s: done.append(list(s))) for s in streams]
    for thread in threads:
        thread.start()
    try:
        wait_for_streams(world.process, len(clients))  # else a probe might take a place
        with raw_channel(world) as channel, pytest.raises(grpc.RpcError) as refused:
            list(Stub("Intake", channel).Submit(iter([])))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        hold.set()
    for thread in threads:
        thread.join()
    assert done == [[Verdict.ACCEPTED, Verdict.DUPLICATE]] * 24
    for client in clients:
        client.close()


def own_memory(pid: int) -> int:
    """Bytes that the process has made, without what is mapped from files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.nightly
def test_rounds_through_the_service_leave_nothing_that_grows(start, memory_path: Path):
    """Of each four one is released, one broken off, one discarded, one below the minimum.

    `test_a_day_of_rounds_leaves_nothing_that_grows` runs 24 hours of rounds without the service.
    """
    world = start(memory_path / "directory")
    pid, observed = world.process.pid, []
    for number in range(928):
        header = world.begin(round=number, minimum_batch=3, users=10, report_bytes=64)
        users = range(2 if number % 4 == 3 else 6)
        world.submit(header, [(user, bytes(64)) for user in users])
        if number % 4 != 2:
            world.control.close_round("run", number)
        if number % 4 < 2:
            release = world.control.release("run", number)
            next(release)
            if number % 4:
                release.close()
            else:
                assert len(list(release)) == 5
        if number % 4 != 3:
            world.control.end_round("run", number)
        if number in (159, 927):
            assert open_batches(world) == 0
            observed.append((len(list(Path(f"/proc/{pid}/fd").iterdir())), own_memory(pid)))
    (before, memory), (after, memory_after) = observed
    assert after == before
    assert memory_after - memory < 3 * 2**20  # four kB a round would be seen
