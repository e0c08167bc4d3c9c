"""The batch of a round: order, room, pieces, and what is on disk. In process, on real files."""

import dataclasses
import itertools
import math
import os
import random
import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chisquare, spearmanr

import shuffler_world
from run_world import LIMIT
from shuffler_world import PUBLIC_KEY, only, plan, read, refusal
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.config import Limits
from shufl.shuffler.store import batch as module
from shufl.shuffler.store.batch import RESERVE_BYTES, Batch, Piece
from shufl.shuffler.store.runs import RunStore
from tiny_disk import fill, small_ext4_at

# Every chi-square test below fails by chance once in a million runs.
FALSE_ALARM = 1e-6
ORDERS = list(itertools.permutations(range(5)))


@pytest.fixture
def batch(memory_path):
    """Makes batches, which are closed after the test."""
    with ExitStack() as stack:

        def make(length, users, own=0, uploads=0):
            most = users + own + uploads
            made = Batch(memory_path, length, users, most, uploads, allocate=False)
            return stack.enter_context(closing(made))

        yield make


@pytest.fixture
def pieces_of(monkeypatch):
    """Sets how many bytes a piece of a long report has: a multiple of 16, as the real one is."""
    return lambda length: monkeypatch.setattr(module, "PIECE_BYTES", length)


def add_piece(of, user, content, start, upload=0, sender="node"):
    """Adds one piece of a user's report."""
    piece = content[start : start + module.PIECE_BYTES]
    return of.add(sender, only(user), 500, piece, Piece(upload, start, len(content)))


def ended(full, limit=2**20):
    full.end()
    return read(full, limit)


def on_disk(of):
    """The batch's file as the file system has it."""
    return Path(f"/proc/self/fd/{of._descriptor}").read_bytes()


def p_value(counts, cells):
    assert set(counts) <= set(cells)
    return chisquare([counts[cell] for cell in cells]).pvalue


def test_all_orders_of_five_reports_are_equally_likely(batch, pieces_of):
    """Two reports, two in pieces, and a blanket: beside one given up, and blankets thrown away.

    Their slots go to those that come later.
    """
    pieces_of(16)
    orders = Counter()
    zero, one, two, three, four = (bytes([number]) * 32 for number in range(5))
    for _ in range(1800):
        five = batch(32, 4, own=1, uploads=2)
        assert five.add("node", only(0), 9, zero) is Verdict.ACCEPTED
        assert add_piece(five, 7, bytes(32), 0, upload=1) is None
        assert add_piece(five, 3, three, 16, upload=2) is None
        assert five.add_own(bytes(32), keep=False)
        assert five.add("node", only(1), 9, one) is Verdict.ACCEPTED
        assert add_piece(five, 2, two, 0, sender="b") is None  # the first one's is given up
        assert five.add_own(four, keep=True)
        assert add_piece(five, 2, two, 16, sender="b") is Verdict.ACCEPTED
        assert add_piece(five, 3, three, 0, upload=2) is Verdict.ACCEPTED
        orders[tuple(sealed[0] for sealed in ended(five))] += 1
        five.close()
    assert p_value(orders, ORDERS) > FALSE_ALARM


def test_neighbours_on_arrival_are_not_neighbours_on_release(batch):
    """Rank correlation of arrival and release of 10 000 reports, against its normal law."""
    many = batch(2, 10_000)
    for user in range(10_000):
        many.add("node", only(user), 10_000, user.to_bytes(2, "big"))
    order = [int.from_bytes(report, "big") for report in ended(many)]
    assert sorted(order) == list(range(10_000))
    assert abs(spearmanr(order, range(10_000)).statistic) < 5.5 / 100  # 5.5 sd of 1/sqrt(n - 1)
    steps = np.abs(np.diff(order))
    # |difference| of two of 0..n-1 has mean (n + 1)/3 and standard deviation about n/sqrt(18).
    assert abs(steps.mean() - 10_001 / 3) < 6 * 10_000 / math.sqrt(18) / math.sqrt(9999)


def test_it_takes_one_report_of_a_user_of_one_length_and_as_many_as_there_are_users(batch):
    some = batch(1, 3, uploads=1)
    sent = [("a", 0, b"1"), ("a", 0, b"2"), ("b", 0, b"33"), ("b", 0, b""), ("b", 0, b"3")]
    verdicts = [some.add(sender, only(user), 9, content) for sender, user, content in sent]
    wrong = Verdict.WRONG_LENGTH
    assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE, wrong, wrong, Verdict.ACCEPTED]
    assert add_piece(some, 0, b"3", 0, sender="b") is Verdict.DUPLICATE
    assert some.add("b", only(8), 9, b"4") is Verdict.ACCEPTED
    assert some.add("c", only(0), 9, b"5") is Verdict.ROUND_FULL
    assert add_piece(some, 0, b"5", 0, sender="c") is Verdict.ROUND_FULL
    assert some.add("a", only(0), 9, b"6") is Verdict.DUPLICATE
    assert sorted(ended(some)) == [b"1", b"3", b"4"]


def test_a_credential_renewed_for_more_users_goes_on_with_its_round(batch):
    some = batch(1, 9)
    assert some.add("node", only(0), 1, b"0") is Verdict.ACCEPTED
    assert some.add("node", only(5), 9, b"5") is Verdict.ACCEPTED
    assert some.add("node", only(0), 9, b"0") is Verdict.DUPLICATE
    assert some.add("node", only(0), 1, b"0") is Verdict.DUPLICATE
    assert sorted(ended(some)) == [b"0", b"5"]


def test_an_ended_batch_takes_nothing_more_and_a_destroyed_one_gives_nothing(batch, pieces_of):
    pieces_of(16)
    some, first = batch(32, 9, uploads=2), b"1" * 32
    assert some.add("a", only(0), 9, first) is Verdict.ACCEPTED
    assert add_piece(some, 1, bytes(32), 0) is None
    some.end()
    assert some.add("a", only(2), 9, bytes(32)) is Verdict.ROUND_NOT_OPEN
    assert add_piece(some, 2, bytes(32), 0, upload=1) is Verdict.ROUND_NOT_OPEN
    assert add_piece(some, 1, bytes(32), 16) is Verdict.ROUND_NOT_OPEN
    assert ended(some) == [first]
    reading = some.chunks(1)
    assert next(reading) == ([b"1"], True)
    some.close()
    some.close()
    for rest in (reading, some.chunks(2**20)):
        assert refusal(list, rest) is Refusal.DISCARDED
    assert not some.add_own(b"44", keep=True)


@pytest.mark.parametrize("limit", [64, 2999, 3000, 9000, 2**20])
def test_a_batch_is_read_again_as_it_was(batch, limit):
    some = batch(3000, 20)
    sent = [os.urandom(3000) for _ in range(20)]
    for user, sealed in enumerate(sent):
        some.add("node", only(user), 20, sealed)
    first = ended(some, limit)
    assert sorted(first) == sorted(sent)
    assert ended(some, limit) == first
    assert ended(some, 2 * limit) == first


def test_pieces_come_in_any_order_and_more_than_once(batch, pieces_of):
    pieces_of(16)
    some, content = batch(5000, 9, uploads=2), os.urandom(5000)
    starts = [*range(0, 5000, 16)] * 2
    random.Random(1).shuffle(starts)
    last = max(starts.index(start) for start in set(starts))  # by then each has come once
    for start in starts[:last]:
        assert add_piece(some, 0, content, start) is None
    assert add_piece(some, 1, bytes(5000), 0, upload=1) is None  # another report, which breaks off
    assert add_piece(some, 0, content, starts[last]) is Verdict.ACCEPTED
    for start in starts[last:]:
        assert add_piece(some, 0, content, start) is Verdict.DUPLICATE
    assert (some.senders, some.count) == (1, 1)
    assert ended(some, 5000) == [content]


def test_what_is_no_piece_of_a_report_is_refused_and_written_nowhere(batch, pieces_of):
    pieces_of(16)
    some, content = batch(40, 3, uploads=3), os.urandom(40)
    wrong = Verdict.WRONG_LENGTH
    for upload, (start, length, piece) in enumerate(
        [
            *((0, 39, 16), (0, 41, 16), (0, 40, 15), (0, 40, 17), (32, 40, 9), (0, 40, 0)),
            *((8, 40, 16), (17, 40, 16), (40, 40, 0), (64, 40, 16)),  # where no piece begins
        ]
    ):
        verdict = some.add("node", only(0), 9, bytes(piece), Piece(upload, start, length))
        assert verdict is wrong, (start, length, piece)
    assert not some._uploads
    for start in (0, 16, 32):
        verdict = add_piece(some, 0, content, start, upload=9)
    assert verdict is Verdict.ACCEPTED
    assert add_piece(some, 1, content, 0) is None
    assert some.add("node", only(1), 9, b"", Piece(0, 16, 40)) is wrong  # which gives it up
    assert [add_piece(some, 1, content, start) for start in (16, 32)] == [None, None]
    assert ended(some) == [content]


def test_of_too_many_long_reports_those_go_that_are_idle_or_of_whoever_has_most(
    batch, pieces_of, monkeypatch
):
    pieces_of(16)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    some = batch(32, 9, uploads=4)

    def begin(sender, upload, start=0):
        clock.now += 1.0
        return add_piece(some, upload, bytes(32), start, upload, sender)

    def on_their_way():
        return set(some._uploads)

    greedy = [("greedy", upload) for upload in range(4)]
    assert [begin(*each) for each in greedy] == [None] * 4
    assert refusal(begin, "greedy", 4) is Refusal.BUSY  # nobody's give way to their own
    assert begin("honest", 0) is None
    assert on_their_way() == {*greedy[1:], ("honest", 0)}
    assert begin("another", 0) is None
    assert on_their_way() == {*greedy[2:], ("honest", 0), ("another", 0)}
    with pytest.raises(ShufflerRefused):  # all have one or two, as this one would
        begin("honest", 1)
    for _ in range(30):  # a piece that was there already is no progress
        assert begin(*greedy[2]) is None
    assert begin("honest", 1) is None
    assert on_their_way() == {greedy[3], ("honest", 0), ("another", 0), ("honest", 1)}
    assert begin("honest", 1, start=16) is Verdict.ACCEPTED
    assert begin("greedy", 3, start=16) is Verdict.ACCEPTED
    assert on_their_way() == {("honest", 0), ("another", 0)}


def test_a_slot_given_up_is_used_again_and_nothing_of_it_is_released(
    memory_path, pieces_of, monkeypatch
):
    """Of one slot alone: so each report has the one that was given up."""
    pieces_of(16)
    monkeypatch.setattr(module, "_IDLE_SECONDS", -1.0)
    one, kept = Batch(memory_path, 32, 1, 1, 1, allocate=False), b"kept" * 8
    for upload in range(3):
        assert add_piece(one, 0, bytes(32), 0, upload) is None
    assert one.add("node", only(1), 9, kept) is Verdict.STORAGE_FULL
    assert one.add("node", only(0), 9, b"L", Piece(2, 16, 32)) is Verdict.WRONG_LENGTH
    assert one.add_own(bytes(32), keep=False)
    assert add_piece(one, 1, kept, 16, upload=9) is None
    assert add_piece(one, 1, kept, 0, upload=9) is Verdict.ACCEPTED  # the last, and it has it
    assert ended(one) == [kept]
    one.close()


def test_its_file_has_no_name_and_no_bytes_come_twice(memory_path, pieces_of, monkeypatch):
    """Reports of zeros: on disk is what encrypts them, which no two reports may share."""
    pieces_of(32)
    monkeypatch.setattr(module, "_IDLE_SECONDS", -1.0)
    place = memory_path / "directory"
    place.mkdir()
    some = Batch(place, 64, 3, 3, 1, allocate=False)
    assert not list(place.iterdir())
    blocks = Counter()
    for user in (0, 1):
        some.add("node", only(user), 9, bytes(64))
    before = b""
    for upload in range(50):  # always in the slot that is free
        assert add_piece(some, 2, bytes(64), 32 * (upload % 2), upload) is None
        now = on_disk(some)
        changed = [at for at in range(0, 192, 16) if now[at : at + 16] != before[at : at + 16]]
        assert len(changed) == (2 if before else 12)
        blocks.update(now[at : at + 16] for at in changed)
        before = now
    assert blocks.pop(bytes(16)) == 2  # of the piece that had not come at first
    assert set(blocks.values()) == {1}
    assert ended(some) == [bytes(64)] * 2
    some.close()


def test_many_threads_lose_and_double_nothing(batch, pieces_of):
    """Each user's report from four threads at once, short or in pieces, with blankets between."""
    pieces_of(16)
    some = batch(40, 500, own=51, uploads=2)
    together = threading.Barrier(6)

    def submit(thread):
        together.wait(LIMIT)
        verdicts = Counter()
        for user in range(500):
            content = bytes([thread]) + user.to_bytes(39, "big")
            if thread % 2:
                upload, starts = 1000 * thread + user, (0, 16, 32)
                found = (add_piece(some, user, content, start, upload) for start in starts)
                verdicts[next(verdict for verdict in found if verdict is not None)] += 1
            else:
                verdicts[some.add("node", only(user), 500, content)] += 1
        return verdicts

    def make(keep):
        together.wait(LIMIT)
        for number in range(50):
            assert some.add_own(b"\xff" + number.to_bytes(39, "big"), keep=keep)
        return Counter()

    with ThreadPoolExecutor(6) as threads:
        makers = [threads.submit(make, keep) for keep in (True, False)]
        found = sum(threads.map(submit, range(4)), Counter())
        for maker in makers:
            maker.result()
    assert found == {Verdict.ACCEPTED: 500, Verdict.DUPLICATE: 1500}
    released = Counter(sealed[1:] for sealed in ended(some) if sealed[0] != 0xFF)
    assert released == Counter(user.to_bytes(39, "big") for user in range(500))
    assert (some.senders, some.count) == (500, 550)


def test_a_round_for_which_the_disk_has_no_room_is_not_opened(tiny_disk):
    store = RunStore(tiny_disk / "directory")
    store.create_run("large", plan(1000), 20_000)
    for _ in range(2):
        assert refusal(store.open_round, "large", 1, "model", PUBLIC_KEY) is Refusal.STORAGE_FULL
    store.create_run("small", plan(40), 20_000)  # all but what the record may need
    store.open_round("small", 1, "model", PUBLIC_KEY)
    events = [line.partition('"event":"')[2].partition('"')[0] for line in store.record(0)]
    assert events == ["created", "created", "opened"]
    fill(tiny_disk)
    for user in range(40):  # for every report there is room
        report = shuffler_world.report(store, user, bytes(20_000), run_id="small")
        assert store.batches.accept(report) is Verdict.ACCEPTED
    store.close()


def test_whether_the_disk_is_full_does_not_tell_how_many_have_reported(tmp_path):
    """Their room is taken before, but ext4 takes more to note which parts of it are written."""

    def free():
        subprocess.run(["sync", "-f", disk], check=True)
        return shutil.disk_usage(disk).free

    with (
        small_ext4_at(tmp_path / "disk") as disk,
        closing(RunStore(disk / "directory")) as store,
    ):
        store.create_run("run", plan(3000), 2000)
        store.create_run("later", plan(10), 2000)
        store.open_round("run", 1, "model", PUBLIC_KEY)
        filler = disk / "filler"
        filler.write_bytes(bytes(free() - RESERVE_BYTES - 2**12))
        before = free()
        assert before >= RESERVE_BYTES and not store.is_full
        for user in range(1500):
            report = shuffler_world.report(store, user, bytes(2000))
            assert store.batches.accept(report) is Verdict.ACCEPTED
        assert free() < RESERVE_BYTES  # so this disk would tell
        assert not store.is_full
        assert refusal(store.reserve, "later") is Refusal.STORAGE_FULL
        assert not store.is_full
        store.end_round("run", 1)
        assert not store.is_full
        with pytest.raises(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert store.is_full
        filler.unlink()
        assert not store.is_full


def test_where_a_batch_takes_no_room_before_a_full_disk_is_a_verdict(tiny_disk, pieces_of):
    """A simulation's: and the reports that are in it stay."""
    pieces_of(10_000)
    store = RunStore(tiny_disk / "directory", Limits(uploads=1), durable=False)
    store.create_run("run", plan(1000), 20_000)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    reports = [shuffler_world.report(store, user, bytes([user]) * 20_000) for user in range(20)]
    assert store.batches.accept(reports[0]) is Verdict.ACCEPTED
    filler = fill(tiny_disk)
    assert {store.batches.accept(report) for report in reports[1:]} == {Verdict.STORAGE_FULL}
    piece = dataclasses.replace(reports[1], sealed=bytes(10_000), piece=Piece(1, 0, 20_000))
    assert store.batches.accept(piece) is Verdict.STORAGE_FULL
    long = plan() + b" " * 60_000
    assert refusal(store.create_run, "another run", long, 20_000) is Refusal.STORAGE_FULL
    filler.unlink()
    assert store.batches.accept(reports[3]) is Verdict.ACCEPTED
    assert store.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert {sealed[:1] for sealed in read(store.release("run", 1))} == {b"\0", b"\3"}
    store.create_run("another run", plan(), 20_000)
    store.close()
