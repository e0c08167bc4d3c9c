"""The batch of a round: order, room, pieces, and what is on disk. In process, on real files."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare, spearmanr

import shuffler_world
from run_world import LIMIT
from shuffler_world import PUBLIC_KEY, only, plan
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.batch import Batch, Slot
from shufl.shuffler.store.runs import RunStore
from tiny_disk import fill

# Every chi-square test below fails by chance once in a million runs.
FALSE_ALARM = 1e-6
ORDERS = list(itertools.permutations(range(5)))


def batch(place: Path, length: int, users: int, spare: int = 0) -> Batch:
    return Batch(place, length, users, users + spare, allocate=False)


def read(full: Batch, limit: int = 2**20) -> list[bytes]:
    """Everything, in chunks of `limit` bytes; longer reports in pieces."""
    full.end()
    reports, pieces = [], []
    for content, more in full.chunks(limit):
        assert sum(map(len, content)) <= limit
        if more or pieces:
            pieces += content
            if not more:
                reports.append(b"".join(pieces))
                pieces = []
        else:
            reports += content
    return reports


def reserved(of: Batch, user: int, *pieces: bytes) -> Slot:
    """A slot with what was written of a user's report."""
    slot = of.reserve("node", only(user))
    assert isinstance(slot, Slot)
    for piece in pieces:
        slot.append([piece])
    return slot


def on_disk(of: Batch) -> bytes:
    """The batch's file as the file system has it."""
    return Path(f"/proc/self/fd/{of._descriptor}").read_bytes()


def p_value(counts: Counter, cells: list) -> float:
    assert set(counts) <= set(cells)
    return chisquare([counts[cell] for cell in cells]).pvalue


def test_all_orders_of_five_reports_are_equally_likely(memory_path):
    """Three reports, one in pieces, and a blanket: beside one given up, and blankets thrown away.

    Their slots go to those that come later.
    """
    orders: Counter = Counter()
    for _ in range(1800):
        five = batch(memory_path, 1, 4, spare=2)
        assert five.add("node", only(0), 9, b"\0") is Verdict.ACCEPTED
        kept, lost = reserved(five, 3, b"\3"), reserved(five, 7, b"x")
        assert five.add_own(b"y", keep=False)
        assert five.add("node", only(1), 9, b"\1") is Verdict.ACCEPTED
        lost.give_up()
        assert five.add_own(b"\4", keep=True)
        assert five.add("node", only(2), 9, b"\2") is Verdict.ACCEPTED
        assert five.add("node", only(3), 9, kept) is Verdict.ACCEPTED
        orders[tuple(sealed[0] for sealed in read(five))] += 1
        five.close()
    assert p_value(orders, ORDERS) > FALSE_ALARM


def test_the_test_for_uniformity_sees_a_bias():
    """A shuffle that keeps the arrival order one time in twenty does not pass."""
    draw = random.Random(1)
    biased = Counter(
        tuple(range(5)) if draw.random() < 0.05 else tuple(draw.sample(range(5), 5))
        for _ in range(1800)
    )
    assert p_value(biased, ORDERS) < FALSE_ALARM


def test_neighbours_on_arrival_are_not_neighbours_on_release(memory_path):
    """Rank correlation of arrival and release of 10 000 reports, against its normal law."""
    many = batch(memory_path, 2, 10_000)
    for user in range(10_000):
        many.add("node", only(user), 10_000, user.to_bytes(2, "big"))
    order = [int.from_bytes(report, "big") for report in read(many)]
    assert sorted(order) == list(range(10_000))
    assert abs(spearmanr(order, range(10_000)).statistic) < 5.5 / 100  # 5.5 sd of 1/sqrt(n - 1)
    steps = np.abs(np.diff(order))
    # |difference| of two of 0..n-1 has mean (n + 1)/3 and standard deviation about n/sqrt(18).
    assert abs(steps.mean() - 10_001 / 3) < 6 * 10_000 / math.sqrt(18) / math.sqrt(9999)
    many.close()


def test_it_takes_one_report_of_a_user_of_one_length_and_as_many_as_there_are_users(memory_path):
    some = batch(memory_path, 1, 3)
    sent = [("a", 0, b"1"), ("a", 0, b"2"), ("b", 0, b"33"), ("b", 0, b""), ("b", 0, b"3")]
    verdicts = [some.add(sender, only(user), 9, content) for sender, user, content in sent]
    wrong = Verdict.WRONG_LENGTH
    assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE, wrong, wrong, Verdict.ACCEPTED]
    assert some.reserve("b", only(0)) is Verdict.DUPLICATE
    assert some.add("b", only(8), 9, b"4") is Verdict.ACCEPTED
    assert some.add("c", only(0), 9, b"5") is Verdict.ROUND_FULL
    assert some.reserve("c", only(0)) is Verdict.ROUND_FULL
    assert some.add("a", only(0), 9, b"6") is Verdict.DUPLICATE
    assert sorted(read(some)) == [b"1", b"3", b"4"]
    some.close()


def test_a_credential_renewed_for_more_users_goes_on_with_its_round(memory_path):
    some = batch(memory_path, 1, 9)
    assert some.add("node", only(0), 1, b"0") is Verdict.ACCEPTED
    assert some.add("node", only(5), 9, b"5") is Verdict.ACCEPTED
    assert some.add("node", only(0), 9, b"0") is Verdict.DUPLICATE
    assert some.add("node", only(0), 1, b"0") is Verdict.DUPLICATE
    assert sorted(read(some)) == [b"0", b"5"]
    some.close()


def test_an_ended_batch_takes_nothing_more_and_a_destroyed_one_gives_nothing(memory_path):
    some = batch(memory_path, 2, 9)
    assert some.add("a", only(0), 9, b"11") is Verdict.ACCEPTED
    late = reserved(some, 1, b"22")
    some.end()
    assert some.add("a", only(2), 9, b"33") is Verdict.ROUND_NOT_OPEN
    assert some.reserve("a", only(2)) is Verdict.ROUND_NOT_OPEN
    assert some.add("node", only(1), 9, late) is Verdict.ROUND_NOT_OPEN
    assert read(some) == [b"11"]
    reading = some.chunks(1)
    assert next(reading) == ([b"1"], True)
    some.close()
    some.close()
    for rest in (reading, some.chunks(2**20)):
        with pytest.raises(ShufflerRefused) as refused:
            list(rest)
        assert refused.value.reason is Refusal.DISCARDED
    assert not some.add_own(b"44", keep=True)


@pytest.mark.parametrize("limit", [64, 2999, 3000, 9000, 2**20])
def test_a_batch_is_read_again_as_it_was(memory_path, limit: int):
    some = batch(memory_path, 3000, 20)
    sent = [os.urandom(3000) for _ in range(20)]
    for user, sealed in enumerate(sent):
        some.add("node", only(user), 20, sealed)
    first = read(some, limit)
    assert sorted(first) == sorted(sent)
    assert read(some, limit) == first
    assert read(some, 2 * limit) == first
    some.close()


def test_reports_in_pieces_are_whole_or_have_the_wrong_length(memory_path):
    some = batch(memory_path, 5000, 9)
    content = os.urandom(5000)
    ones = [content[place : place + 1] for place in range(5000)]
    many = reserved(some, 0)
    assert many.append(ones[:2500])  # more than the system takes in one call
    assert many.verdict is Verdict.WRONG_LENGTH
    assert many.append(ones[2500:])
    assert some.add("node", only(0), 9, many) is Verdict.ACCEPTED
    short = reserved(some, 1, content[:-1])
    assert some.add("node", only(1), 9, short) is Verdict.WRONG_LENGTH
    long = reserved(some, 1, content)
    assert not long.append([b"x"])
    assert some.add("node", only(1), 9, long) is Verdict.WRONG_LENGTH
    two = [reserved(some, 1, content), reserved(some, 1, content)]
    verdicts = [some.add("node", only(1), 9, slot) for slot in two]
    assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE]
    assert read(some, 5000) == [content, content]
    some.close()


def test_a_slot_given_up_is_used_again_and_nothing_of_it_is_released(memory_path):
    """Of one slot alone: so each report has the one that was given up."""
    one = batch(memory_path, 4, 1)
    for _ in range(3):
        lost = reserved(one, 0, b"LO", b"S")
        assert one.reserve("node", only(1)) is Verdict.ROUND_FULL
        assert one.add("node", only(1), 9, b"full") is Verdict.ROUND_FULL
        lost.give_up()
    assert one.add_own(b"GONE", keep=False)
    assert one.add("node", only(0), 9, reserved(one, 0, b"LO")) is Verdict.WRONG_LENGTH
    last = reserved(one, 1, b"ke", b"pt")
    assert one.add("node", only(1), 9, last) is Verdict.ACCEPTED  # the last there is, and it has it
    assert read(one) == [b"kept"]
    one.close()


def test_its_file_has_no_name_and_no_bytes_come_twice(memory_path):
    """Reports of zeros: on disk is what encrypts them, which no two reports may share."""
    place = memory_path / "directory"
    place.mkdir()
    some = batch(place, 64, 3)
    assert not list(place.iterdir())
    blocks: Counter[bytes] = Counter()
    for user in (0, 1):
        some.add("node", only(user), 9, bytes(64))
    before = b""
    for _ in range(50):
        slot = reserved(some, 2, bytes(30), bytes(34))  # always the one that is free
        now = on_disk(some)
        changed = [at for at in range(0, 192, 16) if now[at : at + 16] != before[at : at + 16]]
        assert len(changed) == (4 if before else 12)
        blocks.update(now[at : at + 16] for at in changed)
        before = now
        slot.give_up()
    assert set(blocks.values()) == {1}
    assert bytes(16) not in blocks
    assert read(some) == [bytes(64)] * 2
    some.close()


def test_no_report_is_on_disk_and_the_directory_is_private(tmp_path):
    place = tmp_path / "directory"
    mask = os.umask(0)
    try:
        store = RunStore(place)
        store.create_run("run", plan(50), 64)
        store.open_round("run", 1, "model", PUBLIC_KEY)
    finally:
        os.umask(mask)
    sent = [os.urandom(64) for _ in range(50)]
    for user, sealed in enumerate(sent):
        report = shuffler_world.report(store, user, sealed)
        assert store.batches.accept(report) is Verdict.ACCEPTED
    store.close_round("run", 1)
    file = on_disk(store.release("run", 1))
    assert len(file) >= 50 * 64
    assert not any(sealed[at : at + 8] in file for sealed in sent for at in range(0, 64, 8))
    assert [path.name for path in place.iterdir()] == ["record.jsonl"]
    modes = [oct(path.stat().st_mode & 0o777) for path in (place, place / "record.jsonl")]
    assert modes == ["0o700", "0o600"]
    store.close()


def test_many_threads_lose_and_double_nothing(memory_path):
    """Each user's report from three threads at once, short or in pieces, with blankets between."""
    some = batch(memory_path, 8, 500, spare=60)
    together = threading.Barrier(6)

    def submit(thread: int) -> Counter:
        together.wait(LIMIT)
        verdicts = Counter()
        for user in range(500):
            content = bytes([thread]) + user.to_bytes(7, "big")
            if thread % 2:
                slot = some.reserve("node", only(user))
                if isinstance(slot, Slot):
                    slot.append([content[:3]])
                    slot.append([content[3:]])
                    verdicts[some.add("node", only(user), 500, slot)] += 1
                else:
                    verdicts[slot] += 1
            else:
                verdicts[some.add("node", only(user), 500, content)] += 1
        return verdicts

    def make(keep: bool) -> Counter:
        together.wait(LIMIT)
        for number in range(50):
            assert some.add_own(b"\xff" + number.to_bytes(7, "big"), keep=keep)
        return Counter()

    with ThreadPoolExecutor(6) as threads:
        makers = [threads.submit(make, keep) for keep in (True, False)]
        found = sum(threads.map(submit, range(4)), Counter())
        for maker in makers:
            maker.result()
    assert found == {Verdict.ACCEPTED: 500, Verdict.DUPLICATE: 1500}
    released = Counter(sealed[1:] for sealed in read(some) if sealed[0] != 0xFF)
    assert released == Counter(user.to_bytes(7, "big") for user in range(500))
    assert (some.senders, some.count) == (500, 550)
    some.close()


def test_a_round_for_which_the_disk_has_no_room_is_not_opened(tiny_disk: Path):
    store = RunStore(tiny_disk / "directory")
    store.create_run("large", plan(1000), 20_000)
    for _ in range(2):
        with pytest.raises(ShufflerRefused) as refused:
            store.open_round("large", 1, "model", PUBLIC_KEY)
        assert refused.value.reason is Refusal.STORAGE_FULL
    store.create_run("small", plan(40), 20_000)  # all but what the record may need
    store.open_round("small", 1, "model", PUBLIC_KEY)
    events = [line.partition('"event":"')[2].partition('"')[0] for line in store.record(0)]
    assert events == ["created", "created", "opened"]
    fill(tiny_disk)
    for user in range(40):  # for every report there is room
        report = shuffler_world.report(store, user, bytes(20_000), run_id="small")
        assert store.batches.accept(report) is Verdict.ACCEPTED
    store.close()


def test_where_a_batch_takes_no_room_before_a_full_disk_is_a_verdict(tiny_disk: Path):
    """A simulation's: and the reports that are in it stay."""
    store = RunStore(tiny_disk / "directory", durable=False)
    store.create_run("run", plan(1000), 20_000)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    reports = [shuffler_world.report(store, user, bytes([user]) * 20_000) for user in range(20)]
    assert store.batches.accept(reports[0]) is Verdict.ACCEPTED
    filler = fill(tiny_disk)
    assert {store.batches.accept(report) for report in reports[1:]} == {Verdict.STORAGE_FULL}
    slot = store.batches.begin(reports[1])
    assert isinstance(slot, Slot)
    assert not slot.append([bytes(20_000)])
    assert store.batches.accept(reports[1], slot) is Verdict.STORAGE_FULL
    with pytest.raises(ShufflerRefused) as refused:
        store.create_run("another run", plan() + b" " * 60_000, 20_000)
    assert refused.value.reason is Refusal.STORAGE_FULL
    filler.unlink()
    assert store.batches.accept(reports[3]) is Verdict.ACCEPTED
    assert store.close_round("run", 1).outcome is Outcome.RELEASABLE
    assert {sealed[:1] for sealed in read(store.release("run", 1))} == {b"\0", b"\3"}
    store.create_run("another run", plan(), 20_000)
    store.close()
