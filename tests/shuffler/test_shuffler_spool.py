"""The batch on disk: uniformly random order, recovery, full disks. In process, on real files."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import stat
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import chisquare
from shuffler_world import plan

from shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shuffler.runs import Report, RunStore
from shuffler.spool import RoundSpool

# Every chi-square test below fails by chance once in a million runs.
FALSE_ALARM = 1e-6
ORDERS = list(itertools.permutations(range(5)))


def p_value(counts: Counter, cells: list) -> float:
    assert set(counts) <= set(cells)
    return chisquare([counts[cell] for cell in cells]).pvalue


def report(user: int, digest: str, round: int = 1, length: int = 64) -> Report:
    return Report("run", round, "model", digest, f"user-{user}", bytes([user % 256]) * length)


def read(spool: RoundSpool) -> list[bytes]:
    return list(itertools.chain.from_iterable(iter(lambda: spool.next_reports(3), [])))


def test_all_orders_of_five_reports_are_equally_likely(tmp_path):
    orders: Counter = Counter()
    for _ in range(1800):
        spool = RoundSpool(tmp_path / "batch.db")
        spool.add([(f"user-{user}", bytes([user])) for user in range(3)], 5)
        spool.add([(f"user-{user}", bytes([user])) for user in range(3, 5)], 5)
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


def test_the_order_is_independent_of_sender_and_content(tmp_path):
    """Position of the report that comes first, has the least name and the least bytes."""
    positions: Counter = Counter()
    for _ in range(600):
        spool = RoundSpool(tmp_path / "batch.db")
        spool.add([(f"user-{user:02}", bytes([user])) for user in range(20)], 20)
        positions[read(spool).index(b"\0")] += 1
        spool.destroy()
    assert p_value(positions, list(range(20))) > FALSE_ALARM


def test_no_row_connects_a_sender_with_a_report(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db")
    spool.add([(f"user-{user}", bytes([user]) * 40) for user in range(50)], 50)
    spool.close()
    rows = sqlite3.connect(tmp_path / "batch.db")
    tables = rows.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    assert {name for name, _ in tables} == {"reports", "senders"}
    assert all("WITHOUT ROWID" in sql for _, sql in tables)  # a rowid would tell the arrival order
    assert [len(row) for row in rows.execute("SELECT * FROM senders LIMIT 1")] == [1]
    keys = [key for key, _ in rows.execute("SELECT key, sealed FROM reports")]
    assert {len(key) for key in keys} == {16}
    rows.close()


def test_a_batch_takes_one_report_of_a_sender_and_as_many_as_there_are_users(tmp_path):
    spool = RoundSpool(tmp_path / "batch.db")
    first = spool.add([("a", b"1"), ("a", b"2"), ("b", b"3")], 3)
    assert first == [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED]
    second = spool.add([("b", b"4"), ("c", b"5"), ("d", b"6"), ("c", b"7")], 3)
    assert second == [Verdict.DUPLICATE, Verdict.ACCEPTED, Verdict.ROUND_FULL, Verdict.DUPLICATE]
    assert sorted(read(spool)) == [b"1", b"3", b"5"]
    spool.destroy()


def test_the_directory_is_private(tmp_path):
    place = tmp_path / "spool"
    mask = os.umask(0)
    try:
        store = RunStore(place)
        store.create_run("run", plan(), 64)
        store.open_round("run", 1, "model")
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
        store.open_round("run", round, "model")
        store.accept([report(user, digest, round) for user in range(10)])
        if round == 1:
            store.close_round("run", 1)
    store.close()
    (tmp_path / f"batch-{'0' * 64}-1.db-wal").touch()

    store = RunStore(tmp_path)
    assert not list(tmp_path.glob(f"batch-{'0' * 64}*"))
    assert store.create_run("run", plan(), 64) == digest
    again = store.accept([report(user, digest, 2) for user in range(11)])
    assert again == [Verdict.DUPLICATE] * 10 + [Verdict.ACCEPTED]
    assert store.close_round("run", 2) is Outcome.RELEASABLE
    for round, count in ((1, 10), (2, 11)):
        spool, _ = store.begin_release("run", round)
        assert len(read(spool)) == count
        store.finish_release("run", round)
    store.close()
    assert not list(tmp_path.glob("batch-*"))


def test_a_crash_while_releasing_loses_the_batch(tmp_path):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    store.open_round("run", 1, "model")
    store.accept([report(1, digest)])
    store.close_round("run", 1)
    store.begin_release("run", 1)
    store.close()
    store = RunStore(tmp_path)
    with pytest.raises(ShufflerRefused) as refused:
        store.begin_release("run", 1)
    assert refused.value.reason is Refusal.ALREADY_RELEASED
    assert not list(tmp_path.glob("batch-*"))
    store.close()


def test_a_batch_whose_file_is_gone_is_reported_lost_and_not_released_empty(tmp_path):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    store.open_round("run", 1, "model")
    store.accept([report(1, digest)])
    store.close()
    for path in tmp_path.glob("batch-*"):
        path.unlink()
    store = RunStore(tmp_path)
    for call in (store.close_round, store.begin_release):
        with pytest.raises(ShufflerRefused) as refused:
            call("run", 1)
        assert refused.value.reason is Refusal.BATCH_LOST
    store.open_round("run", 2, "model")
    store.close()


def test_ending_a_run_while_it_is_released_stops_the_release(tmp_path):
    store = RunStore(tmp_path)
    digest = store.create_run("run", plan(), 64)
    store.open_round("run", 1, "model")
    store.accept([report(user, digest) for user in range(10)])
    store.close_round("run", 1)
    spool, _ = store.begin_release("run", 1)
    assert spool.next_reports(2)
    store.end_run("run")
    with pytest.raises(ShufflerRefused):
        spool.next_reports(2)
    store.finish_release("run", 1)
    store.close()


def test_a_disk_that_others_fill_is_a_verdict_and_the_reports_stay(tiny_disk: Path):
    """Without the reserve it is SQLite that meets the full disk."""
    store = RunStore(tiny_disk / "spool", reserve_bytes=-(2**40))
    digest = store.create_run("run", plan(), 20_000)
    store.open_round("run", 1, "model")
    assert store.accept([report(0, digest, length=20_000)]) == [Verdict.ACCEPTED]
    filler = tiny_disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    group = [report(user, digest, length=20_000) for user in range(1, 20)]
    assert set(store.accept(group)) == {Verdict.STORAGE_FULL}
    with pytest.raises(ShufflerRefused) as refused:
        store.create_run("another run", plan() + b" " * 100_000, 20_000)
    assert refused.value.reason is Refusal.STORAGE_FULL
    filler.unlink()
    assert store.accept(group[:3]) == [Verdict.ACCEPTED] * 3
    assert store.close_round("run", 1) is Outcome.RELEASABLE
    spool, _ = store.begin_release("run", 1)
    assert sorted(sealed[0] for sealed in read(spool)) == [0, 1, 2, 3]
    store.finish_release("run", 1)
    store.close()
