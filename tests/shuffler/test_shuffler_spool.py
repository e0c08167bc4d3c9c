"""The batch on disk: uniformly random order, recovery, full disks. In process, on real files."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import secrets
import sqlite3
import stat
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, spearmanr
from shufl.shuffler.store.checks import CHECK_BYTES
from shufl.shuffler.store.runs_file import RunsFile
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.store.storage import connect, without_syncs

import shuffler_world
from shuffler_world import PUBLIC_KEY, plan
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.quota import Quota
from shufl.shuffler.store.runs import RunStore
from tiny_disk import fill

# Every chi-square test below fails by chance once in a million runs.
FALSE_ALARM = 1e-6
ORDERS = list(itertools.permutations(range(5)))


def p_value(counts: Counter, cells: list) -> float:
    assert set(counts) <= set(cells)
    return chisquare([counts[cell] for cell in cells]).pvalue


def report(user: int, digest: str, round: int = 1, length: int = 64, run_id: str = "run"):
    return shuffler_world.report(digest, user, bytes([user % 256]) * length, round, run_id)


def releasing(place: Path, **settings) -> RunStore:
    """A store in which a batch of one report is being released."""
    store = RunStore(place, **settings)
    digest = store.create_run("run", plan(1000), 64)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept([report(1, digest)])
    store.close_round("run", 1)
    store.begin_release("run", 1)
    return store


def read(spool: RoundSpool, limit: int = 3 * 64) -> list[bytes]:
    """Everything, in chunks of `limit` bytes; longer reports in pieces."""
    reports, pieces = [], []
    while (chunk := spool.next_chunk(limit))[0]:
        content, more = chunk
        if more or pieces:
            pieces += content
            if not more:
                reports.append(b"".join(pieces))
                pieces = []
        else:
            reports += content
    return reports


@pytest.mark.slow
def test_all_orders_of_five_reports_are_equally_likely(memory_path):
    orders: Counter = Counter()
    for _ in range(1800):
        spool = RoundSpool(memory_path / "batch.db", 1, 5)
        spool.add([("node", user, bytes([user])) for user in range(3)])
        # A report in pieces, and one that is given up: its slot goes to the next.
        kept, lost = spool.reserve(), spool.reserve()
        kept.append([bytes([3])])
        lost.append([b"x"])
        lost.give_up()
        spool.add([("node", 4, bytes([4])), ("node", 3, kept)])
        orders[tuple(sealed[0] for sealed in read(spool))] += 1
        spool.destroy()
    assert p_value(orders, ORDERS) > FALSE_ALARM


def test_the_test_for_uniformity_sees_a_bias():
    """A shuffle that keeps the arrival order one time in twenty does not pass."""
    draw = random.Random(1)
    biased = Counter(
        tuple(range(5)) if draw.random() < 0.05 else tuple(draw.sample(range(5), 5))
        for _ in range(1800)
    )
    assert p_value(biased, ORDERS) < FALSE_ALARM


def test_the_order_is_independent_of_sender_and_content(memory_path):
    """Position of the report that comes first, has the least name and the least bytes."""
    positions: Counter = Counter()
    for _ in range(600):
        spool = RoundSpool(memory_path / "batch.db", 1, 20)
        spool.add([("node", user, bytes([user])) for user in range(20)])
        positions[read(spool).index(b"\0")] += 1
        spool.destroy()
    assert p_value(positions, list(range(20))) > FALSE_ALARM


@pytest.mark.slow
def test_positions_among_ten_thousand_are_uniform(memory_path):
    """Of the first, of middle and of the last reports, over tenths of the batch; large groups.

    Five of each are all but independent among so many.
    """
    positions: dict[int, Counter] = {0: Counter(), 5000: Counter(), 9995: Counter()}
    for _ in range(20):
        spool = RoundSpool(memory_path / "batch.db", 2, 10_000)
        for first in range(0, 10_000, 2500):
            users = range(first, first + 2500)
            spool.add([("node", user, user.to_bytes(2, "big")) for user in users])
        order = read(spool, 2**20)
        assert sorted(order) == [user.to_bytes(2, "big") for user in range(10_000)]
        for first, counts in positions.items():
            for user in range(first, first + 5):
                counts[order.index(user.to_bytes(2, "big")) // 1000] += 1
        spool.destroy()
    for counts in positions.values():
        assert p_value(counts, list(range(10))) > FALSE_ALARM


def test_neighbours_on_arrival_are_not_neighbours_on_release(tmp_path):
    """Rank correlation of arrival and release of 10 000 reports, against its normal law."""
    spool = RoundSpool(tmp_path / "batch.db", 2, 10_000)
    for first in range(0, 10_000, 100):
        spool.add([("n", user, user.to_bytes(2, "big")) for user in range(first, first + 100)])
    order = [int.from_bytes(report, "big") for report in read(spool, 2**20)]
    assert abs(spearmanr(order, range(10_000)).statistic) < 5.5 / 100  # 5.5 sd of 1/sqrt(n - 1)
    steps = np.abs(np.diff(order))
    # |difference| of two of 0..n-1 has mean (n + 1)/3 and standard deviation about n/sqrt(18).
    assert abs(steps.mean() - 10_001 / 3) < 6 * 10_000 / math.sqrt(18) / math.sqrt(9999)
    spool.destroy()


def filled(monkeypatch, path: Path, order: list[int], group: int) -> list[bytes]:
    """All bytes of a batch's files, filled in this order; what is random does not depend on it."""
    capacity = 5000
    slots = random.Random(1).sample(range(2 * capacity), capacity)
    spool = RoundSpool(path / "batch.db", 40, capacity)
    drawn = (slots[user] for user in order)
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
    for start in range(0, len(order), group):
        users = order[start : start + group]
        some = [(f"node {user % 97}", user, user.to_bytes(40, "big")) for user in users]
        assert spool.add(some) == [Verdict.ACCEPTED] * len(users)
    spool.close()
    assert sorted(file.name for file in path.iterdir()) == [
        "batch.db",
        "batch.db-journal",
        "batch.reports",
    ]
    contents = [file.read_bytes() for file in sorted(path.iterdir())]
    spool.destroy()
    return contents


def test_every_byte_of_the_files_is_the_same_whatever_the_order_of_arrival(
    memory_path, monkeypatch
):
    """Many senders, slots in many parts, users in many buckets; the key and the slots fixed."""
    monkeypatch.setattr(secrets, "token_bytes", lambda n: bytes(range(n)))
    rising = list(range(3000))
    shuffled = random.Random(2).sample(rising, len(rising))
    first = filled(monkeypatch, memory_path, rising, 7)
    assert first[1] == b""  # the journal
    assert filled(monkeypatch, memory_path, rising[::-1], 7) == first
    assert filled(monkeypatch, memory_path, shuffled, 300) == first
    assert filled(monkeypatch, memory_path, rising[1:], 7) != first


def test_the_files_hold_two_sets_a_key_and_how_far_the_blankets_are(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db", 40, 50)
    spool.add([("node", 1, bytes(40))])
    spool.close()
    rows = sqlite3.connect(tmp_path / "batch.db")
    tables = rows.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")
    names = {"slots", "reported", "hash_key", "blankets"}
    assert {name for (name,) in tables.fetchall()} == names
    ((content,),) = rows.execute("SELECT content FROM blankets").fetchall()
    assert content[:-CHECK_BYTES] == bytes(32)
    rows.close()
    spool.destroy()


def test_a_full_bucket_refuses_the_report_and_loses_none(tmp_path, monkeypatch):
    monkeypatch.setattr("shufl.shuffler.store.spool_rows.USERS_PER_BUCKET", 1000)
    spool = RoundSpool(tmp_path / "batch.db", 2, 1000)
    sent = [("node", user, user.to_bytes(2, "big")) for user in range(300)]
    verdicts = spool.add(sent)
    assert verdicts == [Verdict.ACCEPTED] * 252 + [Verdict.ROUND_FULL] * 48
    assert spool.add(sent) == [Verdict.DUPLICATE] * 252 + [Verdict.ROUND_FULL] * 48
    assert sorted(read(spool)) == [content for *_, content in sent[:252]]
    spool.destroy()


def test_a_batch_takes_one_report_of_a_user_and_as_many_as_there_are_users(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db", 1, 3)
    first = spool.add([("a", 0, b"1"), ("a", 0, b"2"), ("b", 0, b"3")])
    assert first == [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED]
    second = spool.add([("b", 0, b"4"), ("b", 1, b"5"), ("c", 9, b"6"), ("b", 1, b"7")])
    assert second == [Verdict.DUPLICATE, Verdict.ACCEPTED, Verdict.ROUND_FULL, Verdict.DUPLICATE]
    assert sorted(read(spool)) == [b"1", b"3", b"5"]
    spool.destroy()


@pytest.mark.slow
@settings(deadline=None)  # it waits for the disk
@given(st.lists(st.integers(0, 40_000), unique=True, min_size=1, max_size=200), st.data())
def test_the_sets_hold_what_was_put(numbers, data):
    """Any users, over several rows, saved in any groups, are there and no others are."""
    with tempfile.TemporaryDirectory() as directory:
        spool = RoundSpool(Path(directory) / "batch.db", 4, 50_000)
        left = list(numbers)
        while left:
            size = data.draw(st.integers(1, len(left)))
            group, left = left[:size], left[size:]
            added = spool.add([("a", user, user.to_bytes(4, "big")) for user in group])
            assert added == [Verdict.ACCEPTED] * size
        near = {user + step for user in numbers for step in (-1, 0, 1, 2**12) if user + step >= 0}
        assert {user for user in near if spool.has_reported("a", user)} == set(numbers)
        assert not any(spool.has_reported("b", user) for user in numbers)
        spool.close()
        spool = RoundSpool(Path(directory) / "batch.db", 4, 50_000)
        assert spool.count == len(numbers)
        assert sorted(read(spool)) == [user.to_bytes(4, "big") for user in sorted(numbers)]
        spool.destroy()


def test_long_reports_are_read_in_pieces(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db", 10_000, 5)
    sent = [os.urandom(10_000) for _ in range(5)]
    spool.add([("a", user, sealed) for user, sealed in enumerate(sent)])
    assert sorted(read(spool, 3000)) == sorted(sent)
    spool.destroy()


def test_a_failed_sync_spoils_the_reports_that_were_being_written(tmp_path, monkeypatch):
    """The kernel tells of lost pages once; it may have been those of another report in pieces."""
    spool = RoundSpool(tmp_path / "batch.db", 10_000, 9)
    before = [os.urandom(10_000) for _ in range(6)]
    assert spool.add([("a", 0, before[0])]) == [Verdict.ACCEPTED]
    slots = [spool.reserve(), spool.reserve()]
    for slot, content in zip(slots, before[1:3], strict=True):
        slot.append([content])

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "lost pages")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="lost pages"):
        patch.setattr(os, "fdatasync", fails)
        spool.add([("a", 3, before[3])])
    later = spool.reserve()
    later.append([before[4]])
    verdicts = spool.add(
        [("a", 1, slots[0]), ("a", 4, later), ("a", 2, slots[1]), ("a", 5, before[5])]
    )
    lost, kept = Verdict.STORAGE_FAILED, Verdict.ACCEPTED
    assert verdicts == [lost, kept, lost, kept]
    assert not spool.has_reported("a", 1)
    assert spool.add([("a", 1, before[1])]) == [Verdict.ACCEPTED]
    assert sorted(read(spool, 10_000)) == sorted([before[0], before[1], *before[4:]])
    spool.destroy()


def test_a_spool_that_goes_with_its_process_waits_for_no_disk(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise AssertionError("it waits")

    with monkeypatch.context() as patch, without_syncs():
        for name in ("fsync", "fdatasync", "posix_fadvise"):
            patch.setattr(os, name, fails)
        spool = RoundSpool(tmp_path / "batch.db", 10_000, 2)
        slot = spool.reserve()
        slot.append([bytes(10_000)])
        assert spool.add([("a", 0, slot), ("a", 1, bytes(10_000))]) == [Verdict.ACCEPTED] * 2
        assert len(read(spool, 10_000)) == 2
        spool.destroy()
        releasing(tmp_path / "store").close()
    connection = connect(tmp_path / "other.db")
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL again
    with without_syncs():
        connection = connect(tmp_path / "another.db")
    assert connection.execute("PRAGMA synchronous").fetchone() == (0,)


def test_a_report_in_very_many_pieces_is_written(tmp_path):
    """More than the system takes in one call."""
    spool = RoundSpool(tmp_path / "batch.db", 5000, 2)
    slot = spool.reserve()
    content = os.urandom(5000)
    slot.append([content[i : i + 1] for i in range(2500)])
    slot.append([content[i : i + 1] for i in range(2500, 5000)])
    assert spool.add([("a", 0, slot)]) == [Verdict.ACCEPTED]
    assert read(spool, 5000) == [content]
    spool.destroy()


def test_a_round_whose_slots_are_all_promised_refuses_and_goes_on(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db", 3, 2)
    slots = [spool.reserve() for _ in range(4)]
    assert spool.reserve() is None
    assert spool.add([("node", 0, b"one")]) == [Verdict.ROUND_FULL]
    slots.pop().give_up()
    assert spool.add([("node", 0, b"one"), ("node", 1, b"two")]) == [
        Verdict.ACCEPTED,
        Verdict.ROUND_FULL,
    ]
    slots[0].append([b"two"])
    assert spool.add([("node", 1, slots[0])]) == [Verdict.ACCEPTED]
    assert sorted(read(spool)) == [b"one", b"two"]


def test_what_is_destroyed_is_gone_though_a_stream_has_a_slot(tmp_path):
    """A stream that is open has the place of its next report."""
    spool = RoundSpool(tmp_path / "batch.db", 2**20, 5)
    spool.add([("node", 0, bytes(2**20))])
    slot = spool.reserve()
    watch = os.open(tmp_path / "batch.reports", os.O_RDONLY)
    assert os.fstat(watch).st_blocks > 0
    spool.destroy()
    assert os.fstat(watch).st_blocks == 0
    slot.give_up()
    os.close(watch)


def test_the_directory_is_private(tmp_path):
    place = tmp_path / "spool"
    mask = os.umask(0)
    try:
        store = RunStore(place)
        store.create_run("run", plan(), 64)
        store.open_round("run", 1, "model", PUBLIC_KEY)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}
    store.close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "something").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="must have mode 0700, has 0755"):
        RunStore(tmp_path)


def test_a_directory_serves_one_shuffler_at_a_time(tmp_path):
    store = RunStore(tmp_path)
    with pytest.raises(ValueError, match="in use by another shuffler"):
        RunStore(tmp_path)
    store.close()
    RunStore(tmp_path).close()


def test_a_restart_keeps_open_and_closed_rounds_and_deletes_leftovers(tmp_path):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    for round in (1, 2):
        store.open_round("run", round, "model", PUBLIC_KEY)
        store.batches.accept([report(user, digest, round) for user in range(10)])
        if round == 1:
            store.close_round("run", 1)
    store.close()
    for suffix in (".db", ".db-journal", ".reports"):
        (tmp_path / f"batch-{'0' * 64}-1{suffix}").touch()

    store = RunStore(tmp_path)
    assert not list(tmp_path.glob(f"batch-{'0' * 64}*"))
    assert store.create_run("run", plan(), 64) == digest
    again = store.batches.accept([report(user, digest, 2) for user in range(11)])
    assert again == [Verdict.DUPLICATE] * 10 + [Verdict.ACCEPTED]
    assert store.close_round("run", 2) is Outcome.RELEASABLE
    for round, count in ((1, 10), (2, 11)):
        spool = store.begin_release("run", round)
        assert len(read(spool)) == count
        store.finish_release("run", round)
    store.close()
    assert not list(tmp_path.glob("batch-*"))


def test_a_crash_while_releasing_loses_the_batch(tmp_path):
    store = releasing(tmp_path)
    store.close()
    store = RunStore(tmp_path)
    with pytest.raises(ShufflerRefused) as refused:
        store.begin_release("run", 1)
    assert refused.value.reason is Refusal.ALREADY_RELEASED
    assert not list(tmp_path.glob("batch-*"))
    store.close()


@pytest.mark.parametrize("gone", ["batch-*", "batch-*.db", "batch-*.reports"])
def test_a_batch_whose_file_is_gone_is_reported_lost_and_not_released_empty(tmp_path, gone):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept([report(1, digest)])
    store.close()
    for path in tmp_path.glob(gone):
        path.unlink()
    store = RunStore(tmp_path)
    for call in (store.close_round, store.begin_release):
        with pytest.raises(ShufflerRefused) as refused:
            call("run", 1)
        assert refused.value.reason is Refusal.BATCH_LOST
    store.open_round("run", 2, "model", PUBLIC_KEY)
    store.close()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def scribble(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".reports", cut), (".reports", empty), (".db", cut), (".db", empty), (".db", scribble)],
)
@pytest.mark.parametrize("closed", [False, True])
def test_a_damaged_batch_is_reported_lost_and_the_other_runs_go_on(
    tmp_path, suffix, damage, closed
):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(1000), 64)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept([report(1, digest)])
    if closed:
        store.close_round("run", 1)
    (file,) = tmp_path.glob(f"batch-*{suffix}")
    store.create_run("other", plan(1000), 64)
    store.open_round("other", 1, "model", PUBLIC_KEY)
    mine = report(2, digest, run_id="other")
    assert store.batches.accept([mine]) == [Verdict.ACCEPTED]
    store.close()
    damage(file)
    for _ in range(2):  # the second start finds the same
        store = RunStore(tmp_path)
        for call in (store.close_round, store.begin_release):
            with pytest.raises(ShufflerRefused) as refused:
                call("run", 1)
            assert refused.value.reason is Refusal.BATCH_LOST
        assert len(list(tmp_path.glob("batch-*.reports"))) == 1
        assert store.batches.accept([mine]) == [Verdict.DUPLICATE]
        store.close()
    store = RunStore(tmp_path)
    store.open_round("run", 2, "model", PUBLIC_KEY)
    assert store.batches.accept([report(1, digest, 2)]) == [Verdict.ACCEPTED]
    assert store.close_round("other", 1) is Outcome.RELEASABLE
    assert read(store.begin_release("other", 1)) == [mine.sealed]
    store.close()


@pytest.mark.parametrize("written", [True, False])
def test_after_a_crash_while_releasing_it_starts_on_a_disk_that_others_filled(
    tiny_disk: Path, monkeypatch, written: bool
):
    """Deleting makes room for the entry; where it does not, the round is over all the same."""
    place = tiny_disk / "spool"
    store = releasing(place)
    store.close()
    filler = fill(tiny_disk)
    with monkeypatch.context() as patch:
        if not written:
            full = ShufflerRefused(Refusal.STORAGE_FULL, "full")
            patch.setattr(RunsFile, "move", lambda *_: (_ for _ in ()).throw(full))
        store = RunStore(place)
    assert not list(place.glob("batch-*"))
    filler.unlink()
    for _ in range(2):
        with pytest.raises(ShufflerRefused) as refused:
            store.begin_release("run", 1)
        assert refused.value.reason is Refusal.ALREADY_RELEASED
        store.close()
        store = RunStore(place)
    store.open_round("run", 2, "model", PUBLIC_KEY)
    store.close()


def test_ending_a_run_while_it_is_released_stops_the_release(tmp_path):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept([report(user, digest) for user in range(10)])
    store.close_round("run", 1)
    spool = store.begin_release("run", 1)
    assert len(spool.next_chunk(2 * 64)[0]) == 2
    store.end_run("run")
    with pytest.raises(ShufflerRefused):
        spool.next_chunk(2 * 64)
    store.finish_release("run", 1)
    store.close()


def test_a_release_ends_where_ending_the_run_has_failed(tmp_path, monkeypatch):
    store = releasing(tmp_path)
    with monkeypatch.context() as patch:
        full = ShufflerRefused(Refusal.STORAGE_FULL, "full")
        patch.setattr(RunsFile, "end_run", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(ShufflerRefused, match="full"):
            store.end_run("run")
    store.finish_release("run", 1)
    store.open_round("run", 2, "model", PUBLIC_KEY)
    store.end_run("run")
    store.close()


def test_the_room_of_a_released_batch_is_taken_until_it_is_given_back(tmp_path):
    """A round for which it lacks waits for it; where nothing is given back, it is refused."""
    most = 1000 * (32 + 4096)
    store = releasing(tmp_path, quota=Quota(disk_bytes=most))
    with pytest.raises(ShufflerRefused) as refused:
        store.open_round("run", 2, "model", PUBLIC_KEY)
    assert refused.value.reason is Refusal.STORAGE_FULL
    may_free, waits = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads:

        def submit(free):
            def later():
                assert may_free.wait(60)
                free()

            return threads.submit(later)

        def in_turn(step):
            try:
                return step()
            except ShufflerRefused:
                waits.set()
                raise

        store.finish_release("run", 1, submit)
        opening = threads.submit(store.open_round, "run", 2, "model", PUBLIC_KEY, in_turn)
        assert waits.wait(60)
        with pytest.raises(TimeoutError):
            opening.result(0.1)
        may_free.set()
        opening.result(60)
    assert store.open_rounds() == [("run", 2)]
    store.close()


def test_a_disk_that_others_fill_is_a_verdict_and_the_reports_stay(tiny_disk: Path):
    """Without the reserve it is SQLite that meets the full disk."""
    store = RunStore(tiny_disk / "spool", reserve_bytes=-(2**40))
    digest = store.create_run("run", plan(1000), 20_000)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    assert store.batches.accept([report(0, digest, length=20_000)]) == [Verdict.ACCEPTED]
    filler = fill(tiny_disk)
    group = [report(user, digest, length=20_000) for user in range(1, 20)]
    assert set(store.batches.accept(group)) == {Verdict.STORAGE_FULL}
    with pytest.raises(ShufflerRefused) as refused:
        store.create_run("another run", plan() + b" " * 100_000, 20_000)
    assert refused.value.reason is Refusal.STORAGE_FULL
    filler.unlink()
    assert store.batches.accept(group[:3]) == [Verdict.ACCEPTED] * 3
    assert store.close_round("run", 1) is Outcome.RELEASABLE
    spool = store.begin_release("run", 1)
    assert sorted(sealed[0] for sealed in read(spool, 2**20)) == [0, 1, 2, 3]
    fill(tiny_disk)
    store.finish_release("run", 1)  # for which the batch's own room is enough
    store.close()
