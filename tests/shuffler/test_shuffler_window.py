"""A round's window: the shuffler opens and closes by its own clock, counts, and books the disk."""

import itertools
from types import SimpleNamespace

import pytest

from run_world import LIMIT, wait_until
from shuffler_world import (
    KEY_DIGEST,
    PUBLIC_KEY,
    Relay,
    fill_up,
    open_batches,
    plan,
    refusal,
    report,
)
from shufl.shuffler import (
    ControlClient,
    Outcome,
    Refusal,
    RoundHeader,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
    key_digest,
    sealed_length,
)
from shufl.shuffler.config import Limits
from shufl.shuffler.store import rounds, runs
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire.errors import Closed

WINDOW = {
    **{"work_until": 0.3, "send_after": 0.4, "send_spread": 0.4, "grace": 0.2},
    **{"answer_every": 0.1, "query_every": 0.1, "most_records": 5},
}
COVERED = {"users": 20, "cover": True, "window": WINDOW, "accountant": "blanket"}
LENGTH = 64


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    for store in (rounds, runs):
        monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def store_of(tmp_path, **fields):
    store = RunStore(tmp_path / "state")
    store.create_run("run", plan(**(COVERED | fields)), LENGTH)
    return store


def test_nothing_is_closed_for_release_before_the_window_ends_nor_taken_after(tmp_path, clock):
    store = store_of(tmp_path)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    before = report(store, 0, bytes(LENGTH))
    late = report(store, 1, bytes(LENGTH))
    assert store.batches.accept(before) is Verdict.ACCEPTED
    clock.now += 0.99
    assert refusal(store.close_round, "run", 1) is Refusal.WINDOW_NOT_OVER
    assert store.batches.agree("run", 1, "", "")[1] == pytest.approx(0.01)
    clock.now += 0.02
    assert store.batches.accept(late) is Verdict.ROUND_NOT_OPEN
    assert refusal(store.batches.agree, "run", 1, "", "") is Refusal.UNKNOWN_ROUND
    assert store.close_round("run", 1) == Closed(Outcome.RELEASABLE, senders=1)


def test_a_round_can_be_given_up_at_any_time_and_tells_nothing(tmp_path, clock):
    store = store_of(tmp_path)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept(report(store, 0, bytes(LENGTH)))
    store.end_round("run", 1)
    assert store.close_round("run", 1) == Closed(Outcome.DISCARDED)


def test_without_cover_no_count_is_told(tmp_path):
    store = store_of(tmp_path, cover=False, window=None)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.batches.accept(report(store, 0, bytes(LENGTH)))
    assert store.close_round("run", 1) == Closed(Outcome.RELEASABLE)


@pytest.mark.parametrize(
    ("accountant", "sent", "expected"),
    [
        ("blanket", 3, Outcome.RELEASABLE),
        ("pld", 3, Outcome.BELOW_MINIMUM),
        ("pld", 4, Outcome.RELEASABLE),
        ("local", 1, Outcome.BELOW_MINIMUM),
    ],
)
def test_the_shuffler_itself_holds_what_the_accountant_counts_on(
    tmp_path, clock, accountant, sent, expected
):
    store = store_of(tmp_path, accountant=accountant, least_present=4, minimum_batch=2)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    for user in range(sent):
        store.batches.accept(report(store, user, bytes(LENGTH)))
    clock.now += 1.01
    assert store.close_round("run", 1) == Closed(expected, senders=sent)


def test_a_node_that_agrees_and_brings_nothing_three_times_is_named(tmp_path, clock):
    store, absent = store_of(tmp_path), []
    digest = store.create_run("run", plan(**COVERED), LENGTH)  # again
    for number in range(1, 6):
        nonce = store.open_round("run", number, "model", PUBLIC_KEY)
        shown = RoundHeader("run", number, "model", digest, KEY_DIGEST)
        for name in ("node", "silent"):
            header, _ = store.batches.agree("run", number, shown.commitment, name)
            assert header.nonce == nonce
        store.batches.agree("run", number, "of something else", "deceived")
        sent = report(store, 0, bytes(LENGTH), number)
        assert store.batches.accept(sent) is Verdict.ACCEPTED
        clock.now += 1.01
        absent.append(store.close_round("run", number).absent)
        store.end_round("run", number)
    assert absent == [(), (), *[("silent",)] * 3]


def test_a_plan_with_cover_and_no_window_is_for_simulations(tmp_path):
    store = RunStore(tmp_path / "state")
    covered = plan(**(COVERED | {"window": None}))
    assert refusal(store.create_run, "run", covered, LENGTH) is Refusal.MALFORMED
    simulated = RunStore(tmp_path / "simulated", durable=False)
    simulated.create_run("run", plan(**COVERED), LENGTH)
    simulated.open_round("run", 1, "model", PUBLIC_KEY)
    assert simulated.batches.agree("run", 1, "", "")[1] == 0.0  # its window means nothing
    assert simulated.close_round("run", 1).outcome is Outcome.BELOW_MINIMUM


def test_a_lease_books_the_disk_until_it_ends_and_leaves_no_line(tmp_path, clock):
    store = RunStore(tmp_path / "state", Limits(open_rounds_per_server=1))
    for run in ("run", "other"):
        store.create_run(run, plan(**COVERED), LENGTH, "server")
    lines = len(store.record(0))
    store.reserve("run")
    store.reserve("run")
    assert refusal(store.reserve, "other") is Refusal.TOO_MANY_ROUNDS
    clock.now += 59
    store.reserve("run")
    clock.now += 59
    store.end_old_rounds(3600)
    assert refusal(store.reserve, "other") is Refusal.TOO_MANY_ROUNDS
    clock.now += 2
    store.end_old_rounds(3600)
    assert len(store.record(0)) == lines
    store.reserve("other")
    store.end_run("other")
    store.reserve("run")
    store.open_round("run", 1, "model", PUBLIC_KEY)
    assert refusal(store.reserve, "run") is Refusal.ANOTHER_ROUND_OPEN


def test_what_nobody_closes_or_ends_is_given_up_even_where_the_disk_is_full(tiny_disk, clock):
    store = RunStore(tiny_disk / "state")
    for run in ("open", "booked"):
        store.create_run(run, plan(**COVERED), LENGTH)
    store.open_round("open", 1, "model", PUBLIC_KEY)
    clock.now += 3600
    store.reserve("booked")
    store.end_old_rounds(3600)
    assert store.seconds_left("open", 1) == 0.0  # its window has ended less than an hour ago
    fill_up(tiny_disk, store)
    clock.now += 61
    store.end_old_rounds(3600)  # the lease first, which makes room for the round's line
    assert sum(run.held for run in store._runs.values()) == 0
    assert store.close_round("open", 1) == Closed(Outcome.DISCARDED)


def test_a_round_without_a_window_that_its_server_leaves_open_is_given_up(tmp_path, clock):
    store = store_of(tmp_path, cover=False, window=None)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    clock.now += 3600
    store.end_old_rounds(3600)
    assert store.seconds_left("run", 1) == 0.0
    clock.now += 1
    store.end_old_rounds(3600)
    assert store.close_round("run", 1) == Closed(Outcome.DISCARDED)


def test_the_shuffler_closes_by_itself_and_whoever_asks_before_waits(here, tmp_path):
    world = here(tmp_path / "state")
    length = sealed_length(100)
    digest = world.control.create_run("run", plan(**COVERED), length)
    whole = []
    for number in itertools.count(1):
        nonce = world.control.open_round("run", number, "model", world.public_key)
        header = RoundHeader("run", number, "model", digest, key_digest(world.public_key), nonce)
        if world.submit(header, world.reports(header, 3)) != [Verdict.ACCEPTED] * 3:
            assert world.control.close_round("run", number, 1.0).senders < 3  # a busy machine
            world.control.end_round("run", number)
            continue
        if not whole:  # nobody asks for its close
            wait_until(lambda n=number: releasable(world.control, n), LIMIT, "its close")
        whole.append(number)
        assert world.control.close_round("run", number, 1.0) == Closed(Outcome.RELEASABLE, 3)
        assert len(list(world.control.release("run", number))) == 3
        world.control.end_round("run", number)
        if len(whole) == 2:
            break
    assert open_batches(world) == 0


def releasable(control, number):
    try:
        return bool(list(control.release("run", number)))
    except ShufflerRefused as refused:
        assert refused.reason is Refusal.ROUND_NOT_CLOSED
        return False


@pytest.mark.slow
def test_a_release_that_breaks_off_goes_on_where_it_broke(here):
    world = here()
    header = world.begin(report_bytes=2**16, users=200)
    world.submit(header, [(user, user.to_bytes(2) * 2**15) for user in range(200)])
    whole = world.released(header)
    assert sorted(int.from_bytes(each[:2]) for each in whole) == list(range(200))
    cut = Relay(world.process.address, to_client=[2**21, 2**22, 2**22])
    with ControlClient(cut.address, world.process.control, patience=LIMIT) as control:
        assert list(control.release("run", 1)) == whole
    cut = Relay(world.process.address, to_client=[2**21])
    with (
        ControlClient(cut.address, world.process.control) as control,
        pytest.raises(ShufflerUnavailable),
    ):
        list(control.release("run", 1))
