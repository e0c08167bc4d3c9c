"""Blankets in the shuffler: their law, and nothing that a server reads tells their number.

What a server can read: the answers to its six calls and the health status, how long each takes,
how many sealed reports a release has, how long they are and in which order they come. The order is
tested with the batch, the health status with the service.
"""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import shuffler_world
from run_world import LIMIT
from shuffler_world import logged, raw_channel, refusal, stub_of
from shufl.protocol.mechanisms import (
    GaussianMechanism,
    SeededRandomness,
    SystemRandomness,
    most_blankets,
)
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
from tiny_disk import fill

DIMENSION = 40
EXPECTED = 200.0
MECHANISM = GaussianMechanism(clip_norm=0.5, noise_multiplier=1.5)
LENGTH = sealed_length(report_length(DIMENSION))


def plan(expected=EXPECTED, users=1000, minimum_batch=1):
    return shuffler_world.plan(users, minimum_batch, **with_blankets(expected))


def with_blankets(expected):
    return {"shuffler_blankets": expected, "mechanism": MECHANISM.model_dump()}


def opened(world, round=1, **of_plan):
    return world.begin(round=round, report_bytes=LENGTH, **with_blankets(EXPECTED), **of_plan)


def released(world, header):
    """Closes the round and opens what it releases: int16 of shape (k, d)."""
    batch, opener = world.released(header), ReportOpener(world.private_key)
    world.control.end_round("run", header.round)
    assert {len(sealed) for sealed in batch} <= {LENGTH}
    return np.array([decode_report(opener.open(sealed, header), DIMENSION) for sealed in batch])


def test_a_simulations_blankets_are_reports_of_the_zero_update_from_its_seed(here):
    world = here(simulation_seed=11)
    for round in (1, 2):
        found = released(world, opened(world, round))
        count = SeededRandomness(11).number_of_blankets(round, EXPECTED)
        noise = SeededRandomness(11).blanket_noise(round, np.arange(count), DIMENSION)
        made = [MECHANISM.report(np.zeros(DIMENSION), row) for row in noise]
        assert Counter(map(bytes, found)) == Counter(map(bytes, made))
        assert [bytes(row) for row in found] != [bytes(row) for row in made]  # shuffled


@pytest.mark.slow
def test_a_long_blanket_is_made_in_pieces_and_the_same_report(memory_path):
    dimension, expected = 2**20 + 3, 0.01
    seeds = map(SeededRandomness, itertools.count())
    randomness = next(each for each in seeds if each.number_of_blankets(1, expected))
    store = RunStore(memory_path / "directory", randomness=randomness, durable=False)
    private_key, public_key = generate_key_pair()
    length = sealed_length(report_length(dimension))
    digest = store.create_run("run", plan(expected, users=1), length)
    nonce = store.open_round("run", 1, "model", public_key)
    made(store, 1)
    assert store.close_round("run", 1).outcome is Outcome.RELEASABLE
    sealed = b"".join(*next(zip(*store.release("run", 1).chunks(length), strict=True)))
    header = RoundHeader("run", 1, "model", digest, key_digest(public_key), nonce)
    found = decode_report(ReportOpener(private_key).open(sealed, header), dimension)
    (noise,) = randomness.blanket_noise(1, np.arange(1), dimension)
    assert np.array_equal(found, MECHANISM.report(np.zeros(dimension), noise))
    store.close()


def test_blankets_from_the_system_have_the_mechanisms_law_and_never_come_again(here):
    world = here()
    batches = [released(world, opened(world, round)) for round in (1, 2, 3)]
    rows = np.concatenate(batches)
    noise = rows * MECHANISM.unit(1) / (MECHANISM.clip_norm * MECHANISM.noise_multiplier)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-6
    assert len(set(map(bytes, rows))) == len(rows)
    counts = [len(batch) for batch in batches]
    assert all(stats.poisson.ppf(1e-9, EXPECTED) <= n <= most_blankets(EXPECTED) for n in counts)


@pytest.mark.slow
def test_the_number_of_blankets_is_poisson_over_rounds(memory_path):
    """Of rounds without any report; one that has no blanket either is below the minimum."""
    store, counts = RunStore(memory_path / "directory", durable=False), []
    store.create_run("run", plan(expected=3.0), LENGTH)
    for round in range(1, 121):
        store.open_round("run", round, "model", shuffler_world.PUBLIC_KEY)
        made(store, round)
        outcome = store.close_round("run", round).outcome
        counts.append(store.release("run", round).count if outcome is Outcome.RELEASABLE else 0)
        store.end_round("run", round)
    store.close()
    cells = np.bincount(np.clip(counts, 0, 7), minlength=8)
    chances = [*stats.poisson.pmf(np.arange(7), 3.0), stats.poisson.sf(6, 3.0)]
    assert stats.chisquare(cells, np.array(chances) * 120).pvalue > 1e-6


def submitted(world, header, count):
    noise = np.random.default_rng(0).standard_normal((count, DIMENSION))
    update = np.full(DIMENSION, 0.05)
    reports = (
        (user, seal(encode_report(MECHANISM.report(update, row)), world.public_key, header))
        for user, row in enumerate(noise)
    )
    return list(world.intake.submit(header, reports))


def test_users_reports_and_blankets_are_one_batch_and_users_keep_their_room(here):
    world = here(simulation_seed=5)
    header = opened(world, users=30)
    assert submitted(world, header, 30) == [Verdict.ACCEPTED] * 30
    assert submitted(world, header, 30) == [Verdict.DUPLICATE] * 30
    count = SeededRandomness(5).number_of_blankets(1, EXPECTED)
    assert len(released(world, header)) == 30 + count


@pytest.mark.parametrize(
    ("minimum", "outcome"), [(1000, Outcome.BELOW_MINIMUM), (20, Outcome.RELEASABLE)]
)
def test_the_minimum_batch_counts_users_reports_and_blankets_together(here, minimum, outcome):
    world = here(simulation_seed=5)
    submitted(world, opened(world, minimum_batch=minimum), 3)
    assert world.control.close_round("run", 1).outcome is outcome


def made(store, round):
    """Makes all of a round's blankets."""
    while store.batches.make_blankets("run", round):
        pass


def test_as_much_is_done_for_blankets_whatever_the_number_kept(memory_path, monkeypatch):
    """So that the time until a round is closed does not tell it."""
    asked, held = [], []
    for kept in (0, 1, 20, most_blankets(20.0)):
        monkeypatch.setattr(SystemRandomness, "number_of_blankets", lambda *_, n=kept: n)
        store = RunStore(memory_path / str(kept), durable=False)
        store.create_run("run", plan(expected=20.0), LENGTH)
        store.open_round("run", 1, "model", generate_key_pair()[1])
        made(store, 1)  # what is done at the first time only
        store.end_round("run", 1)
        store.open_round("run", 2, "model", generate_key_pair()[1])
        before = asked_of_the_system()
        made(store, 2)
        after = asked_of_the_system()
        asked.append({name: after[name] - before[name] for name in after})
        made(store, 2)  # all are made: again changes nothing
        outcome = store.close_round("run", 2).outcome
        held.append(store.release("run", 2).count if outcome is Outcome.RELEASABLE else 0)
        store.close()
    assert held == [0, 1, 20, most_blankets(20.0)]
    assert asked[0]["syscw"] == most_blankets(20.0)
    assert asked == [asked[0]] * 4


def asked_of_the_system():
    """Bytes and calls of writing so far, of this thread alone."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    counts = {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}
    return {name: counts[name] for name in ("wchar", "syscw")}


def test_closing_waits_until_the_blankets_are_made_and_ending_does_not(here, monkeypatch):
    """None is made before the test says so."""
    world, may_be_made = here(), threading.Event()
    batches = world.process.store.batches
    make = batches.make_blankets

    def make_later(*about):
        assert may_be_made.wait(LIMIT)
        return make(*about)

    monkeypatch.setattr(batches, "make_blankets", make_later)
    header = opened(world)
    world.control.end_round("run", 1)
    assert world.control.close_round("run", 1).outcome is Outcome.DISCARDED
    assert submitted(world, header, 1) == [Verdict.ROUND_NOT_OPEN]
    world.control.open_round("run", 2, "model", world.public_key)
    world.control.end_run("run")  # nor does the end of the run
    world.control.create_run("other", plan(), LENGTH)
    world.control.open_round("other", 1, "model", world.public_key)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(world.control.close_round, "other", 1)
        world.control.create_run("another", plan(), LENGTH)  # is answered before
        assert not closing.done()
        may_be_made.set()
        assert closing.result(LIMIT).outcome is Outcome.RELEASABLE


def answers(world, reports):
    """Every message that the server gets in a round, but for the sealed reports themselves."""
    stub = stub_of("Control", raw_channel(world, world.process.control))
    pb = shuffler_pb2
    found = [stub.CreateRun(pb.CreateRunRequest(run_id="run", plan=plan(), report_bytes=LENGTH))]
    opening = pb.OpenRoundRequest(
        run_id="run", round=1, model_digest="model", public_key=world.public_key
    )
    found.append(stub.OpenRound(opening))
    digest = found[0].plan_digest
    key, nonce = key_digest(world.public_key), found[1].nonce
    header = RoundHeader("run", 1, "model", digest, key, nonce)
    found[1].ClearField("nonce")
    assert len(nonce) == 16
    assert set(submitted(world, header, reports)) == {Verdict.ACCEPTED}
    found.append(stub.CloseRound(pb.CloseRoundRequest(run_id="run", round=1)))
    chunks = list(stub.Release(pb.ReleaseRequest(run_id="run", round=1)))
    assert {field.name for chunk in chunks for field, _ in chunk.ListFields()} == {"sealed"}
    found.append(stub.EndRound(pb.EndRoundRequest(run_id="run", round=1)))
    found.append(stub.EndRun(pb.EndRunRequest(run_id="run")))
    return [each.SerializeToString() for each in found]


def test_no_answer_log_or_metric_tells_how_many_blankets_or_reports_there_were(here, tmp_path):
    """A round of few users' reports, and one of many, with other numbers of blankets."""
    said, logs = [], []
    for seed, reports in ((5, 3), (6, 300)):
        log = tmp_path / f"log-{seed}"
        world = here(simulation_seed=seed, log_file=log)
        said.append(answers(world, reports))
        world.process.__exit__(None, None, None)
        logs.append(logged(log))
    assert said[0] == said[1]
    assert logs[0] == logs[1] != []


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32), bytes(1216)], ids=len)
def test_a_public_key_that_nothing_can_be_sealed_to_is_refused(shared, key):
    run = f"key of {len(key)}"
    shared.control.create_run(run, plan(), LENGTH)
    with pytest.raises(ShufflerRefused, match="the public key is not one to seal") as refused:
        shared.control.open_round(run, 1, "model", key)
    assert refused.value.reason is Refusal.MALFORMED
    shared.control.open_round(run, 1, "model", shared.public_key)


def test_reports_that_are_no_whole_numbers_of_entries_can_have_no_blankets(shared):
    shared.control.create_run("odd", plan(), LENGTH + 1)
    with pytest.raises(ShufflerRefused, match="can have no blankets"):
        shared.control.open_round("odd", 1, "model", shared.public_key)


def test_on_a_full_disk_a_round_without_its_blankets_is_not_released(tiny_disk):
    """With room again the rest is made: what was made stays, and nothing is drawn anew."""
    store = RunStore(tiny_disk / "directory", randomness=SeededRandomness(5), durable=False)
    length, key = sealed_length(report_length(2000)), generate_key_pair()[1]
    store.create_run("run", plan(users=10, expected=3.0), length)
    store.open_round("run", 1, "model", key)
    filler = fill(tiny_disk)
    assert refusal(made, store, 1) is Refusal.STORAGE_FULL
    filler.unlink()
    made(store, 1)
    assert store.close_round("run", 1).outcome is Outcome.RELEASABLE
    count = SeededRandomness(5).number_of_blankets(1, 3.0)
    assert store.release("run", 1).count == count > 0
    store.close()
