"""The shuffler's memory does not grow with a report, a round, or the number of nodes at once."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nights import by_night
from run_world import LIMIT, peak_bytes
from shuffler_world import SUMS, open_batches, raw_channel, stub_of
from shufl.shuffler import IntakeClient, Outcome, Verdict, message_length
from shufl.shuffler.store import batch
from shufl.shuffler.store.batch import Batch
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES

FEW = 1e-20  # blankets: two are made, and none is kept


def submit_at_once(world, header, nodes, reports, length):
    """The same report from all users, over so many connections."""
    content = os.urandom(length)

    def node(number):
        with IntakeClient(world.process.address, world.process.submit, timeout=LIMIT) as intake:
            users = range(number * reports, (number + 1) * reports)
            return list(intake.submit(header, ((user, content) for user in users)))

    with ThreadPoolExecutor(nodes) as pool:
        return list(itertools.chain.from_iterable(pool.map(node, range(nodes))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "reports", "length", "most_mb"),
    [
        (8, 5, 4_000_000, 220),
        # 300 MB is what docs/shuffler.md promises.
        *by_night((24, 5, 4_000_000, 300), (4, 2, 64 * 2**20, 300), (24, 50, 250_000, 300)),
    ],
)
def test_memory_stays_flat(start, nodes, reports, length, most_mb):
    """With two blankets made meanwhile: how many of them are kept changes no work."""
    world = start()
    users = nodes * reports
    header = world.begin(report_bytes=length, users=users, shuffler_blankets=FEW)
    verdicts = submit_at_once(world, header, nodes, reports, length)
    assert verdicts == [Verdict.ACCEPTED] * nodes * reports
    assert sum(len(sealed) for sealed in world.released(header)) == (nodes * reports * length)
    assert peak_bytes(world.process.pid) < most_mb * 1e6


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "dimension"), [(3, 4_000_000), *by_night((4, 16_000_000))])
def test_sums_that_are_released_at_once_take_four_bytes_a_parameter(start, runs, dimension):
    world, length = start(), message_length(dimension, "sum")
    names = [f"run {number}" for number in range(runs)]
    for name in names:
        header = world.begin(name, report_bytes=length, users=1, central_noise=5.0, **SUMS)
        assert submit_at_once(world, header, 1, 1, length) == [Verdict.ACCEPTED]
        assert world.control.close_round(name, 1).outcome is Outcome.RELEASABLE

    def released(name):
        return sum(map(len, world.control.release(name, 1)))

    with ThreadPoolExecutor(runs) as pool:
        assert list(pool.map(released, names)) == [length] * runs
    promised = 250 * 10**6 + 4 * runs * dimension  # docs/shuffler.md
    assert peak_bytes(world.process.pid) < promised


def piece(header, length, start, user=0, upload=0):
    """A piece of a report of zeros."""
    return shuffler_pb2.SubmitRequest(
        run_id=header.run_id,
        round=header.round,
        commitment=header.commitment,
        users=[user],
        sealed=bytes(min(PIECE_BYTES, length - start)),
        start=start,
        length=length,
        upload=upload,
    )


def send(stub, header, length, user=0, upload=0):
    """Sends all pieces of a report; the verdicts that come."""
    return [
        Verdict(verdict)
        for start in range(0, length, PIECE_BYTES)
        for verdict in stub.Submit(piece(header, length, start, user, upload)).verdicts
    ]


@pytest.mark.parametrize(
    ("more", "verdict"),
    [(-PIECE_BYTES, 5), (-1, 5), (0, 1), (1, 5), (PIECE_BYTES, 5), (37 * PIECE_BYTES, 5)],
)
def test_a_report_in_too_few_or_too_many_pieces_has_the_wrong_length(shared, more, verdict):
    length, run = 3 * PIECE_BYTES, f"{more} more"
    header = shared.begin(run, report_bytes=length, users=1)
    with raw_channel(shared) as channel:
        assert set(send(stub_of("Intake", channel), header, length + more)) == {Verdict(verdict)}
    again = shared.submit(header, [(0, bytes(length))])
    assert again == [Verdict.DUPLICATE if verdict == 1 else Verdict.ACCEPTED]
    assert shared.released(header) == [bytes(length)]


def test_long_reports_of_several_runs_at_once_go_where_they_belong(here):
    world, length = here(), 3 * PIECE_BYTES
    a, b = (world.begin(run_id=run, report_bytes=length, users=50) for run in "ab")
    sent = [(a, 0), (a, 0), (b, 0), (b, 1), (a, 1), (a, 50)]
    verdicts = [[] for _ in sent]
    with raw_channel(world) as channel:
        for start in range(0, length, PIECE_BYTES):
            for upload, (header, user) in enumerate(sent):
                request = piece(header, length, start, user, upload)
                verdicts[upload] += stub_of("Intake", channel).Submit(request).verdicts
    names = [{Verdict(each).name for each in found} for found in verdicts]
    taken, twice = {"ACCEPTED"}, {"DUPLICATE"}
    assert names == [taken, twice, taken, taken, taken, {"BAD_SENDER"}]
    counted = {"ACCEPTED": 4, "DUPLICATE": 1, "BAD_SENDER": 1}  # reports, not pieces
    for verdict, count in counted.items():
        name = f'shufl_reports_total{{verdict="{verdict}"}}'
        assert world.process.scrape()[name] == count
    for header in (a, b):
        assert world.released(header) == [bytes(length)] * 2


def test_a_long_report_that_is_given_up_for_others_is_sent_again_as_a_whole(here, monkeypatch):
    """Another sender's takes its place each time that all but one of its pieces are there."""
    world, length = here(limits={"uploads": 1}), 20 * PIECE_BYTES
    header = world.begin(report_bytes=length, users=1)
    monkeypatch.setattr(batch, "_IDLE_SECONDS", -1.0)  # whatever is there may go
    of, write, taken = Batch._write_piece, Batch._make_room, []

    def write_piece(self, sender, content, about):
        upload = of(self, sender, content, about)
        if len(upload.missing) == 1 and len(taken) < 3:
            taken.append(about.upload)
            write(self, "another")
        return upload

    monkeypatch.setattr(Batch, "_write_piece", write_piece)
    sealed = os.urandom(length)
    assert world.submit(header, [(0, sealed)]) == [Verdict.ACCEPTED]
    assert len(taken) == 3 and len(set(taken)) == 1
    assert world.released(header) == [sealed]


def own_memory(pid):
    """Bytes that the process has made, without what is mapped from files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.nightly
def test_rounds_through_the_service_leave_nothing_that_grows(start, memory_path):
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
