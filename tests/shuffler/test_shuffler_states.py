"""Any sequence of calls and crashes keeps the rules of the rounds, against a model of them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shufl.shuffler.store.spool import RoundSpool

from shuffler_world import PUBLIC_KEY, plan, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.runs import RunStore

USERS, MINIMUM, LENGTH = 6, 3, 64
ROUNDS = st.integers(1, 9)  # none is forgotten before the tenth
MEMORY = Path("/dev/shm")


def read(spool: RoundSpool) -> list[bytes]:
    reports: list[bytes] = []
    while chunk := spool.next_chunk(2 * LENGTH)[0]:
        reports += chunk
    return reports


class Rounds(RuleBasedStateMachine):
    """One run on a real directory; `self.rounds` is what there should be."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(
            tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.store = RunStore(self.directory)
        self.digest = self.store.create_run("run", plan(USERS, MINIMUM), LENGTH)
        self.rounds: dict[int, tuple[str, dict[int, bytes]]] = {}  # state, report by user
        self.released: set[bytes] = set()
        self.content = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def state(self, number: int) -> str:
        return self.rounds[number][0] if number in self.rounds else "unknown"

    def refusal(self, call, *arguments) -> Refusal | None:
        try:
            call(*arguments)
        except ShufflerRefused as refused:
            return refused.reason
        return None

    @rule(number=ROUNDS)
    def open_round(self, number):
        waiting = sum(state == "closed" for state, _ in self.rounds.values())
        if any(state == "open" for state, _ in self.rounds.values()):
            expected = Refusal.ANOTHER_ROUND_OPEN
        elif self.rounds and number <= max(self.rounds):
            expected = Refusal.ROUND_NOT_INCREASING
        elif waiting == 4:
            expected = Refusal.TOO_MANY_BATCHES
        else:
            expected = None
            self.rounds[number] = ("open", {})
        assert self.refusal(self.store.open_round, "run", number, "model", PUBLIC_KEY) is expected

    @rule(number=ROUNDS, users=st.lists(st.integers(0, USERS), max_size=4))
    def submit(self, number, users):
        reports, expected = [], []
        state, held = self.rounds.get(number, ("unknown", {}))
        for user in users:
            self.content += 1
            sealed = self.content.to_bytes(LENGTH, "big")
            reports.append(report(self.digest, user, sealed, number))
            if state != "open":
                expected.append(Verdict.ROUND_NOT_OPEN)
            elif user == USERS:
                expected.append(Verdict.BAD_SENDER)
            elif user in held:
                expected.append(Verdict.DUPLICATE)
            else:
                expected.append(Verdict.ACCEPTED)
                held[user] = sealed
        assert self.store.batches.accept(reports) == expected

    @rule(number=ROUNDS, user=st.integers(0, USERS - 1), pieces=st.integers(1, 5))
    def submit_in_pieces(self, number, user, pieces):
        """Four pieces are a report; the round may end before `accept` in another rule's way."""
        self.content += 1
        sealed = self.content.to_bytes(LENGTH, "big")
        batches = self.store.batches
        slot = batches.begin(report(self.digest, user, b"", number))
        state, held = self.rounds.get(number, ("unknown", {}))
        if state != "open":
            assert slot is Verdict.ROUND_NOT_OPEN
        elif user in held:
            assert slot is Verdict.DUPLICATE
        else:
            for piece in range(pieces):
                batches.write(slot, [(sealed * 2)[piece * 16 : (piece + 1) * 16]])
            whole = report(self.digest, user, b"", number, slot=slot)
            expected = Verdict.ACCEPTED if pieces == 4 else Verdict.WRONG_LENGTH
            assert self.store.batches.accept([whole]) == [expected]
            if pieces == 4:
                held[user] = sealed

    @rule(number=ROUNDS, discard=st.booleans())
    def close_round(self, number, discard):
        state, held = self.rounds.get(number, ("unknown", {}))
        if state == "unknown":
            assert self.refusal(self.store.close_round, "run", number) is Refusal.UNKNOWN_ROUND
            return
        if state == "open":
            kept = "closed" if len(held) >= MINIMUM else "below"
            state = "discarded" if discard else kept
            self.rounds[number] = (state, held)
        if state == "closed" and discard:
            state = "discarded"
            self.rounds[number] = (state, held)
        outcome = self.store.close_round("run", number, discard)
        expected = {"below": Outcome.BELOW_MINIMUM, "discarded": Outcome.DISCARDED}
        assert outcome is expected.get(state, Outcome.RELEASABLE)

    @rule(number=ROUNDS, finish=st.booleans(), crash=st.booleans())
    def release(self, number, finish, crash):
        state, held = self.rounds.get(number, ("unknown", {}))
        refusals = {
            "unknown": Refusal.UNKNOWN_ROUND,
            "open": Refusal.ROUND_NOT_CLOSED,
            "below": Refusal.BELOW_MINIMUM,
            "discarded": Refusal.DISCARDED,
            "released": Refusal.ALREADY_RELEASED,
        }
        if state in refusals:
            assert self.refusal(self.store.begin_release, "run", number) is refusals[state]
            return
        spool = self.store.begin_release("run", number)
        self.rounds[number] = ("released", {})
        if finish:
            reports = read(spool)
            assert sorted(reports) == sorted(held.values())
            assert not self.released.intersection(reports)
            self.released.update(reports)
        if crash:
            self.restart()
        else:
            self.store.finish_release("run", number)

    @rule()
    def restart(self):
        self.store.close()
        self.store = RunStore(self.directory)

    @precondition(lambda self: self.rounds)
    @rule()
    def create_again(self):
        assert self.store.create_run("run", plan(USERS, MINIMUM), LENGTH) == self.digest
        other = plan(USERS, MINIMUM - 1)
        assert self.refusal(self.store.create_run, "run", other, LENGTH) is Refusal.RUN_EXISTS

    @invariant()
    def files_are_those_of_live_batches(self):
        live = sum(state in ("open", "closed") for state, _ in self.rounds.values())
        assert len(list(self.directory.glob("batch-*.reports"))) == live
        assert len(list(self.directory.glob("batch-*.db"))) == live


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def remembered(store: RunStore, latest: int) -> int:
    """How many rounds the store knows of."""
    known = 0
    for number in range(latest + 1):
        with suppress(ShufflerRefused):
            store.close_round("run", number)
            known += 1
    return known


def open_files(directory: str) -> int:
    """How many files in `directory`, deleted ones too, this process holds open."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            count += str(descriptor.readlink()).startswith(directory)
    return count


@pytest.mark.slow
def test_a_day_of_rounds_leaves_nothing_that_grows(tmp_path):
    """A round every 72 s for 24 hours, half below the minimum; no file, or open file, stays."""
    place = MEMORY if MEMORY.is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as directory:
        store = RunStore(Path(directory))
        digest = store.create_run("run", plan(USERS, MINIMUM), LENGTH)
        sizes = []
        for number in range(1200):
            store.open_round("run", number, "model", PUBLIC_KEY)
            users = range(USERS if number % 2 else MINIMUM - 1)
            store.batches.accept([report(digest, u, bytes(LENGTH), number) for u in users])
            outcome = store.close_round("run", number)
            if outcome is Outcome.RELEASABLE:
                assert len(read(store.begin_release("run", number))) == USERS
                store.finish_release("run", number)
            assert not list(Path(directory).glob("batch-*"))
            if number % 120 == 100:
                files = {path.name: path.stat().st_size for path in Path(directory).iterdir()}
                # The public record grows, by two entries a round; and the generation by a digit.
                assert files.pop("runs.db") < 2**16 + 1000 * number
                assert files.pop("generation") < 200
                sizes.append((files, open_files(directory), remembered(store, number)))
        assert sizes[1:] == sizes[:-1]
        store.close()


def test_ended_runs_leave_their_ids_and_unfetched_batches_are_limited(tmp_path):
    store = RunStore(tmp_path / "spool")
    for number in range(200):
        store.create_run(f"run {number}", plan(1, 1), LENGTH)
        store.end_run(f"run {number}")
    for number in range(64):
        store.create_run(f"live {number}", plan(1, 1), LENGTH)
    with pytest.raises(ShufflerRefused) as refused:
        store.create_run("one more", plan(1, 1), LENGTH)
    assert refused.value.reason is Refusal.TOO_MANY_RUNS
    with pytest.raises(ShufflerRefused) as refused:
        store.create_run("run 7", plan(1, 1), LENGTH)
    assert refused.value.reason is Refusal.RUN_ENDED
    store.close()
