"""Any sequence of calls and restarts keeps the rules of the rounds, against a model of them."""

import dataclasses
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shuffler_world import PUBLIC_KEY, nameless_files, only, plan, read, refusal, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.callers import Caller, Role
from shufl.shuffler.config import Limits
from shufl.shuffler.public_record import verify
from shufl.shuffler.store import batch
from shufl.shuffler.store.batch import Piece
from shufl.shuffler.store.open_batches import Report
from shufl.shuffler.store.runs import RunStore

USERS, MINIMUM, LENGTH = 6, 3, 64
ROUNDS = st.integers(1, 9)  # none is forgotten before the tenth

REFUSALS = {
    "unknown": Refusal.UNKNOWN_ROUND,
    "open": Refusal.ROUND_NOT_CLOSED,
    "below": Refusal.BELOW_MINIMUM,
    "discarded": Refusal.DISCARDED,
    "lost": Refusal.BATCH_LOST,
    "over": Refusal.ALREADY_RELEASED,
}
OUTCOMES = {
    "below": Outcome.BELOW_MINIMUM,
    "discarded": Outcome.DISCARDED,
    **dict.fromkeys(["closed", "released", "over"], Outcome.RELEASABLE),
}
LIVE = ("open", "closed", "released")


@pytest.fixture(scope="module", autouse=True)
def a_piece_has_16_bytes():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch, "PIECE_BYTES", 16)
        yield


class Rounds(RuleBasedStateMachine):
    """One run on a real directory; `self.rounds` is what there should be."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = RunStore(self.directory, Limits(uploads=2))
        self.digest = self.store.create_run("run", plan(USERS, MINIMUM), LENGTH)
        self.rounds = {}  # state, report by user
        self.headers = {}  # how a report to the round looked, when it was open
        self.orders = {}  # of what was released
        self.content = 0

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.directory)

    def refusal(self, call, *arguments):
        try:
            call(*arguments)
        except ShufflerRefused as refused:
            return refused.reason
        return None

    def round(self, number):
        return self.rounds.get(number, ("unknown", {}))

    def made(self, number, user):
        """A report of this user, as one for the round looked when it was open."""
        self.content += 1
        sealed = self.content.to_bytes(LENGTH, "big")
        nobodys = Report("run", number, "0" * 64, only(0), b"", Caller(Role.NODE, "node", 2**32))
        known = self.headers.get(number, nobodys)
        return dataclasses.replace(known, users=only(user), sealed=sealed)

    @rule(number=ROUNDS)
    def open_round(self, number):
        states = [state for state, _ in self.rounds.values()]
        if "open" in states:
            expected = Refusal.ANOTHER_ROUND_OPEN
        elif self.rounds and number <= max(self.rounds):
            expected = Refusal.ROUND_NOT_INCREASING
        elif sum(state in LIVE for state in states) == 4:
            expected = Refusal.TOO_MANY_BATCHES
        else:
            expected = None
        assert self.refusal(self.store.open_round, "run", number, "model", PUBLIC_KEY) is expected
        if expected is None:
            self.rounds[number] = ("open", {})
            self.headers[number] = report(self.store, 0, b"", number)

    def judged(self, number, user):
        state, held = self.round(number)
        if state != "open":
            return Verdict.ROUND_NOT_OPEN
        if user == USERS:
            return Verdict.BAD_SENDER
        return Verdict.DUPLICATE if user in held else Verdict.ACCEPTED

    @rule(number=ROUNDS, users=st.lists(st.integers(0, USERS), max_size=4))
    def submit(self, number, users):
        for user in users:
            sent, expected = self.made(number, user), self.judged(number, user)
            assert self.store.batches.accept(sent) is expected
            if expected is Verdict.ACCEPTED:
                self.round(number)[1][user] = sent.sealed

    @rule(number=ROUNDS, user=st.integers(0, USERS - 1), order=st.permutations(range(0, 64, 16)))
    def submit_in_pieces(self, number, user, order):
        """Four pieces are a report; they may come twice."""
        sent, expected = self.made(number, user), self.judged(number, user)
        for start in [*order[:2], *order]:
            content, piece = sent.sealed[start : start + 16], Piece(self.content, start, LENGTH)
            sent_now = dataclasses.replace(sent, sealed=content, piece=piece)
            verdict = self.store.batches.accept(sent_now)
            if expected is Verdict.ACCEPTED and start != order[-1]:
                assert verdict is None
            else:
                assert verdict is expected
        if expected is Verdict.ACCEPTED:
            self.round(number)[1][user] = sent.sealed

    @rule(number=ROUNDS, user=st.integers(0, USERS - 1))
    def break_off(self, number, user):
        """One piece alone; the others never come."""
        sent, expected = self.made(number, user), self.judged(number, user)
        sent = dataclasses.replace(sent, sealed=sent.sealed[:16], piece=Piece(0, 0, LENGTH))
        verdict = self.store.batches.accept(sent)
        assert verdict is (None if expected is Verdict.ACCEPTED else expected)

    @rule(number=ROUNDS)
    def close_round(self, number):
        state, held = self.round(number)
        if state == "open":
            state = "closed" if len(held) >= MINIMUM else "below"
            self.rounds[number] = (state, held)
        if state in OUTCOMES:
            assert self.store.close_round("run", number).outcome is OUTCOMES[state]
        else:
            refusal = self.refusal(self.store.close_round, "run", number)
            assert refusal is REFUSALS[state]

    @rule(number=ROUNDS)
    def release(self, number):
        state, held = self.round(number)
        if state in REFUSALS:
            assert self.refusal(self.store.release, "run", number) is REFUSALS[state]
            return
        released = read(self.store.release("run", number))
        assert len(released) >= MINIMUM
        assert sorted(released) == sorted(held.values())
        assert self.orders.setdefault(number, released) == released
        self.rounds[number] = ("released", held)

    @rule(number=ROUNDS)
    def end_round(self, number):
        state, held = self.round(number)
        if state == "unknown":
            assert self.refusal(self.store.end_round, "run", number) is Refusal.UNKNOWN_ROUND
            return
        self.store.end_round("run", number)
        state = {"released": "over", "open": "discarded", "closed": "discarded"}.get(state, state)
        self.rounds[number] = (state, held)

    @rule()
    def end_old_rounds(self):
        self.store.end_old_rounds(0.0)
        for number, (state, _) in self.rounds.items():
            if state in LIVE:
                self.end_round(number)

    @rule()
    def restart(self):
        self.store.close()
        self.store = RunStore(self.directory, Limits(uploads=2))
        for number, (state, held) in self.rounds.items():
            if state in LIVE:
                self.rounds[number] = ("over" if state == "released" else "lost", held)

    @precondition(lambda self: self.rounds)
    @rule()
    def create_again(self):
        assert self.store.create_run("run", plan(USERS, MINIMUM), LENGTH) == self.digest
        other = plan(USERS, MINIMUM - 1)
        assert self.refusal(self.store.create_run, "run", other, LENGTH) is Refusal.RUN_EXISTS

    @invariant()
    def batches_are_those_of_live_rounds(self):
        live = sum(state in LIVE for state, _ in self.rounds.values())
        assert nameless_files(os.getpid(), str(self.directory)) == live

    @invariant()
    def the_record_says_how_each_round_ended(self):
        """Once, and as soon as it has; what was released is not said to be lost or discarded."""
        said = {}
        for line in verify(self.store.record(0))[1:]:
            said.setdefault(line["round"], []).append(line["event"])
        events = {"open": [], "closed": [], "below": ["below-minimum"], "over": ["released"]}
        assert said == {
            number: ["opened", *events.get(state, [state])]
            for number, (state, _) in self.rounds.items()
        }


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def remembered(store, latest):
    """How many rounds the store knows of."""
    known = 0
    for number in range(latest + 1):
        with suppress(ShufflerRefused):
            store.close_round("run", number)
            known += 1
    return known


@pytest.mark.slow
def test_a_day_of_rounds_leaves_nothing_that_grows(memory_path):
    """A round every 72 s for 24 hours, half below the minimum; no file, or open file, stays."""
    store, sizes = RunStore(memory_path), []
    store.create_run("run", plan(USERS, MINIMUM), LENGTH)
    for number in range(1200):
        store.open_round("run", number, "model", PUBLIC_KEY)
        for user in range(USERS if number % 2 else MINIMUM - 1):
            store.batches.accept(report(store, user, bytes(LENGTH), number))
        if store.close_round("run", number).outcome is Outcome.RELEASABLE:
            assert len(read(store.release("run", number))) == USERS
            store.end_round("run", number)
        assert nameless_files(os.getpid(), str(memory_path)) == 0
        if number % 120 == 100:
            (file,) = memory_path.iterdir()
            assert file.stat().st_size < 2**12 + 600 * number  # the record, by two lines a round
            sizes.append((len(list(Path("/proc/self/fd").iterdir())), remembered(store, number)))
    assert sizes[1:] == sizes[:-1]
    store.close()


def test_ended_runs_leave_their_ids_and_runs_at_once_are_limited(tmp_path):
    store = RunStore(tmp_path / "directory", Limits(runs_per_server=100))
    for number in range(200):
        store.create_run(f"run {number}", plan(1, 1), LENGTH)
        store.end_run(f"run {number}")
    for number in range(64):
        store.create_run(f"live {number}", plan(1, 1), LENGTH)
    assert refusal(store.create_run, "one more", plan(1, 1), LENGTH) is Refusal.TOO_MANY_RUNS
    store.close()
    store = RunStore(tmp_path / "directory")
    assert refusal(store.create_run, "run 7", plan(1, 1), LENGTH) is Refusal.RUN_ENDED
    store.close()
