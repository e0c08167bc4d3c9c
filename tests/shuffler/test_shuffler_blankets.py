"""Blankets in the shuffler: their law, crashes, and nothing that a server reads tells their number.

What a server can read: the answers to its five calls and the health status, how long each takes,
how many sealed reports a release has, how long they are and in which order they come. The order is
tested with the spool, the health status with the service.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from shufl.shuffler.store.checks import Anchor
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.store.spool_rows import BatchRows, BlanketsLeft

import shuffler_world
from shuffler_world import World, kill, logged, raw_channel
from shufl.accounting.mechanisms import GaussianMechanism, SeededRandomness, most_blankets
from shufl.shuffler import (
    Outcome,
    Refusal,
    ReportOpener,
    RoundHeader,
    ShufflerRefused,
    Verdict,
    decode_report,
    encode_report,
    generate_key_pair,
    key_digest,
    report_length,
    seal,
    sealed_length,
)
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.stub import Stub

DIMENSION = 40
EXPECTED = 200.0
MECHANISM = GaussianMechanism(clip_norm=0.5, noise_multiplier=1.5)
LENGTH = sealed_length(report_length(DIMENSION))


def plan(expected: float = EXPECTED, users: int = 1000, minimum: int = 1) -> bytes:
    fields = {"shuffler_blankets": expected, "mechanism": MECHANISM.model_dump()}
    return shuffler_world.plan(users, minimum, **fields)


def mechanism(**change: object) -> dict[str, object]:
    return {"mechanism": MECHANISM.model_dump() | change}


def opened(world: World, round: int = 1, length: int = LENGTH, **of_plan: float) -> RoundHeader:
    digest = world.control.create_run("run", plan(**of_plan), length)
    world.control.open_round("run", round, "model", world.public_key)
    return RoundHeader("run", round, "model", digest, key_digest(world.public_key))


def released(world: World, header: RoundHeader) -> np.ndarray:
    """Closes the round and opens what it releases: int16 of shape (k, d)."""
    assert world.control.close_round("run", header.round) is Outcome.RELEASABLE
    opener = ReportOpener(world.private_key, header)
    batch = list(world.control.release("run", header.round))
    assert {len(sealed) for sealed in batch} <= {LENGTH}
    return np.array([decode_report(opener.open(sealed), DIMENSION) for sealed in batch])


def kept(spool: Path) -> BlanketsLeft:
    """What the file of the open round says of its blankets; only while no shuffler runs."""
    (path,) = spool.glob("batch-*.db")
    checks = Anchor(spool / "generation").checks.of_place(path.stem)
    with sqlite3.connect(path) as connection:
        return BlanketsLeft.read(BatchRows(connection, checks))


def test_a_simulations_blankets_are_reports_of_the_zero_update_from_its_seed(
    start: Callable[..., World],
):
    world = start(simulation_seed=11)
    for round in (1, 2):
        found = released(world, opened(world, round))
        count = SeededRandomness(11).number_of_blankets(round, EXPECTED)
        noise = SeededRandomness(11).blanket_noise(round, np.arange(count), DIMENSION)
        made = [MECHANISM.report(np.zeros(DIMENSION), row) for row in noise]
        assert Counter(map(bytes, found)) == Counter(map(bytes, made))
        assert [bytes(row) for row in found] != [bytes(row) for row in made]  # shuffled


def test_blankets_from_the_system_have_the_mechanisms_law_and_never_come_again(
    start: Callable[..., World],
):
    world = start()
    batches = [released(world, opened(world, round)) for round in (1, 2, 3)]
    rows = np.concatenate(batches)
    noise = rows * MECHANISM.unit(1) / (MECHANISM.clip_norm * MECHANISM.noise_multiplier)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-6
    assert len(set(map(bytes, rows))) == len(rows)
    counts = [len(batch) for batch in batches]
    assert all(stats.poisson.ppf(1e-9, EXPECTED) <= n <= most_blankets(EXPECTED) for n in counts)


@pytest.mark.slow
def test_the_number_of_blankets_is_poisson_over_rounds(start: Callable[..., World]):
    world = start()
    counts = []
    for round in range(1, 201):
        header = opened(world, round, expected=3.0)
        submitted(world, header, 1)  # an empty batch would be below the minimum
        counts.append(len(released(world, header)) - 1)
    cells = np.bincount(np.clip(counts, 0, 7), minlength=8)
    chances = [*stats.poisson.pmf(np.arange(7), 3.0), stats.poisson.sf(6, 3.0)]
    assert stats.chisquare(cells, np.array(chances) * 200).pvalue > 1e-6


def submitted(world: World, header: RoundHeader, count: int) -> list[Verdict]:
    noise = np.random.default_rng(0).standard_normal((count, DIMENSION))
    update = np.full(DIMENSION, 0.05)
    reports = (
        (user, seal(encode_report(MECHANISM.report(update, row)), world.public_key, header))
        for user, row in enumerate(noise)
    )
    return list(world.intake.submit(header, reports))


def test_users_reports_and_blankets_are_one_batch_and_users_keep_their_room(
    start: Callable[..., World],
):
    world = start(simulation_seed=5)
    header = opened(world, users=30)
    assert submitted(world, header, 30) == [Verdict.ACCEPTED] * 30
    assert submitted(world, header, 30) == [Verdict.DUPLICATE] * 30
    count = SeededRandomness(5).number_of_blankets(1, EXPECTED)
    assert len(released(world, header)) == 30 + count


@pytest.mark.parametrize(("minimum", "outcome"), [(1000, "below"), (20, "releasable")])
def test_the_minimum_batch_counts_users_reports_and_blankets_together(
    start: Callable[..., World], minimum: int, outcome: str
):
    world = start(simulation_seed=5)
    header = opened(world, minimum=minimum)
    submitted(world, header, 3)
    expected = Outcome.BELOW_MINIMUM if outcome == "below" else Outcome.RELEASABLE
    assert world.control.close_round("run", 1) is expected


@pytest.mark.slow
def test_killed_at_ten_moments_of_a_round_it_never_draws_a_second_number(
    start: Callable[..., World], memory_path: Path
):
    place = memory_path / "spool"
    length = sealed_length(report_length(10_000))  # so that the blankets take some seconds
    world = start(place)
    keys = world.private_key, world.public_key
    header = opened(world, length=length, expected=2000.0)
    drawn, made = set(), []
    for moment in range(10):
        time.sleep(0.03 * moment)
        kill(world)
        left = kept(place)
        drawn.add((left.drawn, left.work))
        made.append(left.made)
        world = start(place)
        world.private_key, world.public_key = keys
    assert made == sorted(made)  # it goes on where it was
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    batch = list(world.control.release("run", 1))
    assert drawn == {(len(batch), most_blankets(2000.0))}
    opener = ReportOpener(world.private_key, header)  # refuses what it has seen
    assert len({opener.open(sealed) for sealed in batch}) == len(batch)


@pytest.mark.slow
def test_killed_between_closing_and_the_release_the_number_stays(
    start: Callable[..., World], tmp_path: Path
):
    place = tmp_path / "spool"
    world = start(place, simulation_seed=5)
    keys = world.private_key, world.public_key
    header = opened(world)
    world.control.close_round("run", 1)
    kill(world)
    world = start(place, simulation_seed=6)  # another source: nothing is drawn any more
    world.private_key, world.public_key = keys
    count = SeededRandomness(5).number_of_blankets(1, EXPECTED)
    assert len(released(world, header)) == count


def asked_of_the_system(place: Path, kept: int) -> dict[str, int]:
    """Bytes and calls of reading and writing while 2 560 blankets are stored in ten groups."""

    def counts() -> dict[str, int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}

    spool = RoundSpool(place / "batch-1.db", 100, 10**6, 2560, lambda: kept)
    before = counts()
    for _ in range(10):
        spool.add_blankets([bytes(100)] * 256)
    after = counts()
    assert spool.count == kept
    spool.destroy()
    return {name: after[name] - before[name] for name in ("wchar", "syscw", "syscr")}


def test_storing_blankets_asks_the_same_of_the_system_whatever_the_number_kept(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that the time until a round is closed does not tell it; at a million users, many rows."""
    asked = []
    for kept in (0, 1, 1300, 2560):
        draw = random.Random(7).randrange
        monkeypatch.setattr(secrets, "randbelow", draw)
        asked.append(asked_of_the_system(memory_path, kept))
    assert asked[0]["syscw"] > 2560
    assert asked == [asked[0]] * 4


def test_as_many_are_made_whatever_the_number_kept(tmp_path: Path):
    store = RunStore(tmp_path / "spool")
    store.create_run("run", plan(expected=2.0), LENGTH)
    for round in range(1, 6):
        store.open_round("run", round, "model", generate_key_pair()[1])
        made = 0
        while make := store.batches.next_blankets("run", round):
            sealed = make()
            made += len(sealed)
            store.batches.add_blankets("run", round, sealed)
        assert made == most_blankets(2.0)
        store.close_round("run", round, discard=True)
    store.close()


@pytest.mark.slow
def test_closing_waits_until_the_blankets_are_made_and_discarding_does_not(
    start: Callable[..., World], tmp_path: Path
):
    world = start(tmp_path / "spool")
    length = sealed_length(report_length(50_000))
    header = opened(world, length=length, expected=20_000.0)
    begun = time.monotonic()
    assert world.control.close_round("run", 1, discard=True) is Outcome.DISCARDED
    assert time.monotonic() - begun < 20  # making them takes longer
    assert submitted(world, dataclasses.replace(header, round=1), 1) == [Verdict.ROUND_NOT_OPEN]
    world.control.open_round("run", 2, "model", world.public_key)
    world.control.end_run("run")  # nor does the end of the run
    assert time.monotonic() - begun < 40


def answers(world: World, reports: int) -> list[bytes]:
    """Every message that the server gets in a round, but for the sealed reports themselves."""
    stub = Stub("Control", raw_channel(world, world.process.control))
    pb = shuffler_pb2
    found = [stub.CreateRun(pb.CreateRunRequest(run_id="run", plan=plan(), report_bytes=LENGTH))]
    opening = pb.OpenRoundRequest(
        run_id="run", round=1, model_digest="model", public_key=world.public_key
    )
    found.append(stub.OpenRound(opening))
    digest = found[0].plan_digest
    header = RoundHeader("run", 1, "model", digest, key_digest(world.public_key))
    assert set(submitted(world, header, reports)) == {Verdict.ACCEPTED}
    found.append(stub.CloseRound(pb.CloseRoundRequest(run_id="run", round=1)))
    chunks = list(stub.Release(pb.ReleaseRequest(run_id="run", round=1)))
    assert {field.name for chunk in chunks for field, _ in chunk.ListFields()} == {"sealed"}
    found.append(stub.EndRun(pb.EndRunRequest(run_id="run")))
    return [each.SerializeToString() for each in found]


@pytest.mark.slow
def test_no_answer_log_or_metric_tells_how_many_blankets_or_reports_there_were(
    start: Callable[..., World], tmp_path: Path
):
    """A round of few users' reports, and one of many, with other numbers of blankets."""
    said, logs = [], []
    for seed, reports in ((5, 3), (6, 300)):
        log = tmp_path / f"log-{seed}"
        world = start(simulation_seed=seed, log_file=log)
        said.append(answers(world, reports))
        world.process.__exit__(None, None, None)
        logs.append(logged(log))
    assert said[0] == said[1]
    assert logs[0] == logs[1] != []


def test_a_report_for_another_key_than_the_rounds_is_refused(start: Callable[..., World]):
    """So that no server can tell blankets from reports by the key that opens them."""
    world = start()
    header = opened(world)
    own = world.public_key
    world.public_key = generate_key_pair()[1]
    header = dataclasses.replace(header, key_digest=key_digest(world.public_key))
    assert submitted(world, header, 2) == [Verdict.WRONG_COMMITMENT] * 2
    world.public_key = own
    header = dataclasses.replace(header, key_digest=key_digest(own))
    assert submitted(world, header, 2) == [Verdict.ACCEPTED] * 2


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32), bytes(1216)], ids=len)
def test_a_public_key_that_nothing_can_be_sealed_to_is_refused(shared: World, key: bytes):
    run = f"key of {len(key)}"
    shared.control.create_run(run, plan(), LENGTH)
    with pytest.raises(ShufflerRefused, match="the public key is not one to seal") as refused:
        shared.control.open_round(run, 1, "model", key)
    assert refused.value.reason is Refusal.MALFORMED
    shared.control.open_round(run, 1, "model", shared.public_key)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shuffler_blankets": -1.0}, "the plan: shuffler_blankets must be"),
        ({"shuffler_blankets": 1e8}, "the plan: shuffler_blankets must be"),
        ({"shuffler_blankets": "50"}, "the plan: shuffler_blankets must be"),
        ({"shuffler_blankets": None}, "the plan: shuffler_blankets must be"),
        ({"mechanism": None}, "mechanism must be"),
        ({"mechanism": {"name": "gaussian"}}, "noise_multiplier is missing"),
        ({"mechanism": {"name": "laplace"}}, "must be one with the name 'gaussian', 'ldp-sgd'"),
        (mechanism(clip_norm=0.0), "clip_norm must be a number in"),
        (mechanism(noise_multiplier=None), "noise_multiplier must be a number"),
        (mechanism(noise_multiplier=True), "noise_multiplier must be a number"),
        (mechanism(noise_multiplier=10**400), "noise_multiplier must be a number"),
        (mechanism(noise_multiplier=0.0), "noise_multiplier of a plan must lie in"),
        (mechanism(noise_multiplier=2e15), "noise_multiplier must be a number in"),
        (mechanism(clip_norm=1e308), "clip_norm must be a number in"),
        (mechanism(clip_norm=5e-324), "clip_norm must be a number in"),
    ],
)
def test_a_plan_without_what_blankets_need_is_refused(
    shared: World, change: dict[str, object], named: str
):
    fields = {**json.loads(plan()), **change}
    with pytest.raises(ShufflerRefused, match=named) as refused:
        shared.control.create_run("run", json.dumps(fields).encode(), LENGTH)
    assert refused.value.reason is Refusal.MALFORMED


def test_reports_that_are_no_whole_numbers_of_entries_can_have_no_blankets(shared: World):
    shared.control.create_run("odd", plan(), LENGTH + 1)
    with pytest.raises(ShufflerRefused, match="can have no blankets"):
        shared.control.open_round("odd", 1, "model", shared.public_key)


RESERVE = 128 * 2**10


def room(directory: Path) -> int:
    """Bytes of the disk that reports may still take."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize - RESERVE


def test_on_a_full_disk_a_round_without_its_blankets_is_not_released(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk fills after the round was opened; what is reserved is left for closing it."""
    store = RunStore(tiny_disk, reserve_bytes=RESERVE)
    length = sealed_length(report_length(200))
    store.create_run("run", plan(users=10, expected=3.0), length)
    store.open_round("run", 1, "model", generate_key_pair()[1])
    (tiny_disk / "other").write_bytes(bytes(room(tiny_disk) - 20_000))
    with pytest.raises(ShufflerRefused) as refused:
        while make := store.batches.next_blankets("run", 1):
            store.batches.add_blankets("run", 1, make())
    assert refused.value.reason is Refusal.STORAGE_FULL
    assert room(tiny_disk) > 0
    with pytest.raises(ShufflerRefused, match="blankets are not stored"):
        store.close_round("run", 1)
    assert store.close_round("run", 1, discard=True) is Outcome.DISCARDED
    store.close()


def test_a_round_whose_blankets_have_no_room_is_not_opened(tiny_disk: Path):
    store = RunStore(tiny_disk, reserve_bytes=64 * 2**10)
    store.create_run("run", plan(users=10, expected=500.0), LENGTH)
    with pytest.raises(ShufflerRefused) as refused:
        store.open_round("run", 1, "model", generate_key_pair()[1])
    assert refused.value.reason is Refusal.STORAGE_FULL
    assert not list(tiny_disk.glob("batch-*"))
    store.close()


def test_blankets_and_reports_never_share_a_slot(memory_path: Path):
    """With blankets that are thrown away, whose slots are given to the next reports."""
    spool = RoundSpool(memory_path / "batch-1.db", 100, 60, 80, lambda: 37)
    sent = [os.urandom(100) for _ in range(60)]
    blankets = [os.urandom(100) for _ in range(80)]
    for step in range(20):
        spool.add_blankets(blankets[4 * step : 4 * step + 4])
        spool.add([("node", user, sent[user]) for user in range(3 * step, 3 * step + 3)])
        if step == 9:
            spool.close()
            spool = RoundSpool(memory_path / "batch-1.db", 100, 60, 80, lambda: 99)
    assert spool.count == 60 + 37
    found, _ = spool.next_chunk(10**6)
    assert sorted(found) == sorted(sent + blankets[:37])
    spool.destroy()


def test_a_seed_for_blankets_is_for_a_simulations_own_shuffler_only(command, tmp_path: Path):
    done = command('plaintext = true\nsimulation_seed = 3\nspool = "spool"\n')
    assert done.returncode == 2
    words = "simulation_seed is for a simulation's own shuffler"
    assert done.stderr == f"shuffler: {tmp_path / 'shuffler.toml'}: {words}\n"
