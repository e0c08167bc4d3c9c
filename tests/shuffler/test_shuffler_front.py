"""A front and its workers, all real processes: one shuffler for the server, whatever dies."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import chisquare
from shuffler_world import plan

from shuffler import (
    ControlClient,
    IntakeClient,
    Outcome,
    Refusal,
    RoundHeader,
    ShufflerProcess,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shuffler.config import ConfigError, FrontConfig, FrontWorker, load_config
from shuffler.front import _WorkerClient
from shuffler.keys import Authority, Caller, Role, caller_of
from shuffler.process import FrontProcess
from shuffler.runs import RunStore

ROOT = Path(__file__).parents[2]
AUTHORITY = Authority.create()
LENGTH = 64
FALSE_ALARM = 1e-6


class Fronted:
    """Workers `a`, `b`, … and their front; each can be killed and started again in its place."""

    def __init__(
        self, stack: ExitStack, folder: Path, shares: list[int], limits: dict | None = None
    ) -> None:
        self.shares = dict(zip("abcdefgh", shares, strict=False))
        self._stack = stack
        self.folder = folder
        self._limits = limits  # of workers
        self.workers: dict[str, ShufflerProcess] = {}
        for name in self.shares:
            self.start_worker(name)
        self.addresses = {name: worker.address for name, worker in self.workers.items()}
        self.start_front()

    def start_worker(self, name: str) -> None:
        old = self.workers.get(name)
        self.workers[name] = self._stack.enter_context(
            ShufflerProcess(
                self.folder / name,
                authority=AUTHORITY,
                worker=name,
                listen=old.address if old else "127.0.0.1:0",
                limits=self._limits,
            )
        )

    def restart_worker(self, name: str) -> None:
        """Starts one that was killed, and waits until the front has found it again."""
        self.start_worker(name)
        wait_until(lambda: refusal(self.control.end_run, "nobody's") is Refusal.UNKNOWN_RUN)

    def start_front(self, **names: str) -> None:
        """Starts it, with other addresses or names than there are if some are given."""
        self.front = self._stack.enter_context(
            FrontProcess(
                [(n, self.addresses[names.get(n, n)], s) for n, s in self.shares.items()],
                AUTHORITY,
                limits={"worker_seconds": 5},
            )
        )
        self.control = self._stack.enter_context(
            ControlClient(self.front.address, self.front.control, timeout=30)
        )

    def restart_front(self, **names: str) -> None:
        kill(self.front)
        self.start_front(**names)

    def begin(self, round: int = 1, minimum: int = 1, users: int = 10, **options) -> RoundHeader:
        run_id, length = options.get("run_id", "run"), options.get("length", LENGTH)
        digest = self.control.create_run(run_id, plan(users, minimum), length)
        self.control.open_round(run_id, round, "model")
        return RoundHeader(run_id, round, "model", digest)

    def submit(self, name: str, header: RoundHeader, users, length: int = LENGTH) -> list[bytes]:
        """Reports of these users of the one node at this worker; all are accepted."""
        reports = [(user, os.urandom(length)) for user in users]
        assert self.verdicts(name, header, reports) == [Verdict.ACCEPTED] * len(reports)
        return [sealed for _, sealed in reports]

    def verdicts(self, name: str, header: RoundHeader, reports) -> list[Verdict]:
        with IntakeClient(self.addresses[name], self.workers[name].submit, timeout=60) as intake:
            return list(intake.submit(header, reports))

    def left(self) -> list[str]:
        """The workers that have anything of a batch on their disks."""
        return sorted({path.parent.name for path in self.folder.glob("*/batch-*")})

    def as_a_front(self, name: str) -> _WorkerClient:
        """What a front may do at one worker, for what one does that dies half-way."""
        worker = FrontWorker(name=name, address=self.addresses[name], users=self.shares[name])
        credentials = AUTHORITY.issue(Role.FRONT, "front", hosts=["127.0.0.1"])
        return self._stack.enter_context(_WorkerClient(worker, credentials, 20))


def kill(process: ShufflerProcess | FrontProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)


def refusal(call: Callable, *arguments: object) -> Refusal:
    with pytest.raises(ShufflerRefused) as refused:
        list(call(*arguments) or [])
    return refused.value.reason


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def fronted() -> Iterator[Fronted]:
    """Two workers for 8 and 6 users; use a run id of your own, and start again what you kill."""
    with ExitStack() as stack:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        yield Fronted(stack, folder, [8, 6])


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with the shared workers, at its end no batch is on their disks."""
    yield
    if "fronted" in request.fixturenames:
        assert request.getfixturevalue("fronted").left() == []


def test_every_order_of_all_reports_is_equally_likely(fronted: Fronted):
    """Of 1 + 3 reports."""
    orders = list(itertools.permutations(range(4)))
    counts: Counter = Counter()
    header = fronted.begin(run_id="orders")
    fronted.control.close_round("orders", 1, discard=True)
    reports = [bytes([user]) * LENGTH for user in range(4)]
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(IntakeClient(fronted.addresses[n], fronted.workers[n].submit))
            for n in "ab"
        )
        for round in range(2, 202):
            fronted.control.open_round("orders", round, "model")
            header = replace(header, round=round)
            list(a.submit(header, [(0, reports[0])]))
            list(b.submit(header, list(enumerate(reports[1:]))))
            fronted.control.close_round("orders", round)
            released = fronted.control.release("orders", round)
            counts[tuple(reports.index(sealed) for sealed in released)] += 1
    assert set(counts) <= set(orders)
    assert chisquare([counts[order] for order in orders]).pvalue > FALSE_ALARM
    fronted.control.end_run("orders")


def test_the_sum_of_the_parts_is_what_the_minimum_is_compared_with(fronted: Fronted):
    header = fronted.begin(run_id="sum", minimum=4)
    sent = fronted.submit("a", header, range(2)) + fronted.submit("b", header, range(2))
    assert fronted.control.close_round("sum", 1) is Outcome.RELEASABLE
    assert fronted.control.close_round("sum", 1) is Outcome.RELEASABLE
    assert sorted(fronted.control.release("sum", 1)) == sorted(sent)
    assert fronted.control.close_round("sum", 1) is Outcome.RELEASABLE
    assert refusal(fronted.control.release, "sum", 1) is Refusal.ALREADY_RELEASED


def test_below_the_minimum_nothing_is_left_anywhere_and_no_count_is_told(fronted: Fronted):
    header = fronted.begin(run_id="below", minimum=4)
    fronted.submit("a", header, range(3))
    for _ in range(2):
        assert fronted.control.close_round("below", 1) is Outcome.BELOW_MINIMUM
        assert fronted.left() == []
    with pytest.raises(ShufflerRefused) as refused:
        list(fronted.control.release("below", 1))
    assert refused.value.reason is Refusal.BELOW_MINIMUM
    assert not any(character.isdigit() for character in refused.value.detail)
    header = fronted.begin(2, run_id="below", minimum=4)
    fronted.submit("b", header, range(4))
    assert fronted.control.close_round("below", 2) is Outcome.RELEASABLE
    assert len(list(fronted.control.release("below", 2))) == 4  # of an empty part and another


def test_a_batch_that_is_not_wanted_is_destroyed_also_when_it_is_closed(fronted: Fronted):
    for round, closed in ((1, False), (2, True)):
        header = fronted.begin(round, run_id="unwanted")
        fronted.submit("a", header, range(3))
        if closed:
            assert fronted.control.close_round("unwanted", round) is Outcome.RELEASABLE
        assert fronted.control.close_round("unwanted", round, discard=True) is Outcome.DISCARDED
        assert fronted.left() == []
        assert fronted.control.close_round("unwanted", round) is Outcome.DISCARDED
        assert refusal(fronted.control.release, "unwanted", round) is Refusal.DISCARDED


def test_one_report_for_each_user_and_at_its_own_worker(fronted: Fronted):
    header = fronted.begin(run_id="once")
    node = AUTHORITY.issue(Role.NODE, "phone", users=2, worker="a")
    reports = [(user, os.urandom(LENGTH)) for user in (0, 0, 1, 2)]
    with IntakeClient(fronted.addresses["a"], node) as intake:
        assert list(intake.submit(header, reports)) == [
            Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED, Verdict.BAD_SENDER
        ]  # fmt: skip
    with IntakeClient(fronted.addresses["b"], node) as intake:
        assert refusal(intake.submit, header, reports) is Refusal.NOT_PERMITTED
    with IntakeClient(fronted.front.address, node) as intake, pytest.raises(ShufflerUnavailable):
        list(intake.submit(header, reports))
    # As many as are enrolled there at most.
    full = [(user, os.urandom(LENGTH)) for user in range(7)]
    expected = [Verdict.ACCEPTED] * 6 + [Verdict.ROUND_FULL]
    assert fronted.verdicts("b", header, full) == expected
    fronted.control.close_round("once", 1)
    assert len(list(fronted.control.release("once", 1))) == 8


def test_long_reports_pass_whole_and_rules_are_a_shuffler_s(fronted: Fronted):
    control, length = fronted.control, 2**21 + 3
    header = fronted.begin(run_id="long", length=length)
    assert refusal(control.release, "long", 1) is Refusal.ROUND_NOT_CLOSED
    assert refusal(control.open_round, "long", 2, "model") is Refusal.ANOTHER_ROUND_OPEN
    sent = fronted.submit("a", header, range(3), length) + fronted.submit("b", header, [0], length)
    control.close_round("long", 1)
    assert sorted(control.release("long", 1)) == sorted(sent)
    assert refusal(control.open_round, "long", 1, "model") is Refusal.ROUND_NOT_INCREASING
    assert refusal(control.release, "long", 2) is Refusal.UNKNOWN_ROUND
    assert refusal(control.close_round, "nobody's", 1) is Refusal.UNKNOWN_RUN
    assert refusal(control.create_run, "long", plan(10, 2), length) is Refusal.RUN_EXISTS
    control.end_run("long")
    control.end_run("long")
    assert refusal(control.end_run, "nobody's") is Refusal.UNKNOWN_RUN
    assert refusal(control.create_run, "long", plan(10, 1), length) is Refusal.RUN_ENDED


def test_a_plan_with_more_users_than_there_is_room_for_is_refused(fronted: Fronted):
    assert fronted.control.create_run("room", plan(14, 1), LENGTH)
    with pytest.raises(ShufflerRefused) as refused:
        fronted.control.create_run("no room", plan(15, 1), LENGTH)
    assert refused.value.reason is Refusal.MALFORMED
    assert refused.value.detail == "the workers have room for 14 users, the plan needs 15"


def test_memory_stays_flat_when_reports_are_long_and_the_server_is_slow(fronted: Fronted):
    header = fronted.begin(run_id="slow", length=2**24)
    for name in "ab":
        fronted.submit(name, header, range(4), 2**24)
    before = memory_mb(fronted.front, "VmRSS")
    fronted.control.close_round("slow", 1)
    released = fronted.control.release("slow", 1)
    lengths = [len(next(released))]
    time.sleep(1)  # time for the front to read on, if it did
    lengths += [len(sealed) for sealed in released]
    assert lengths == [2**24] * 8
    assert memory_mb(fronted.front, "VmHWM") < before + 64


def memory_mb(process: FrontProcess, key: str) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) * 1024 / 1e6


@pytest.mark.parametrize("restarted", [True, False])
def test_a_front_that_dies_between_closing_some_and_the_others(fronted: Fronted, restarted: bool):
    run_id = f"half closed {restarted}"
    header = fronted.begin(run_id=run_id, minimum=4)
    sent = fronted.submit("a", header, range(2)) + fronted.submit("b", header, range(2))
    assert fronted.as_a_front("a").close_round(run_id, 1) is Outcome.RELEASABLE
    if restarted:
        fronted.restart_front()
    assert refusal(fronted.control.release, run_id, 1) is Refusal.ROUND_NOT_CLOSED
    sent += fronted.submit("b", header, [2])
    assert fronted.control.close_round(run_id, 1) is Outcome.RELEASABLE
    if restarted:
        fronted.restart_front()  # between closing and releasing
    assert sorted(fronted.control.release(run_id, 1)) == sorted(sent)


@pytest.mark.parametrize("asked", ["close", "release"])
@pytest.mark.parametrize("destroyed", [True, False])
def test_a_front_that_dies_before_or_while_it_destroys_what_is_too_little(
    fronted: Fronted, asked: str, destroyed: bool
):
    run_id = f"half below {asked} {destroyed}"
    header = fronted.begin(run_id=run_id, minimum=4)
    for name in "ab":
        fronted.submit(name, header, [0])
        fronted.as_a_front(name).close_round(run_id, 1)
    if destroyed:
        fronted.as_a_front("a").destroy(run_id, 1, below_minimum=True)
    assert fronted.left() == ["b"] if destroyed else ["a", "b"]
    if asked == "close":
        assert fronted.control.close_round(run_id, 1) is Outcome.BELOW_MINIMUM
    assert refusal(fronted.control.release, run_id, 1) is Refusal.BELOW_MINIMUM
    assert fronted.left() == []


def test_a_part_whose_release_has_begun_takes_the_others_with_it(fronted: Fronted):
    header = fronted.begin(run_id="half released")
    for name in "ab":
        fronted.submit(name, header, range(2))
    fronted.control.close_round("half released", 1)
    assert len(list(fronted.as_a_front("a").release("half released", 1))) == 2
    assert refusal(fronted.control.release, "half released", 1) is Refusal.ALREADY_RELEASED
    assert fronted.left() == []
    assert fronted.control.close_round("half released", 1) is Outcome.RELEASABLE
    assert refusal(fronted.control.release, "half released", 1) is Refusal.ALREADY_RELEASED


def test_a_round_that_opened_at_some_workers_only_is_never_released(fronted: Fronted):
    header = fronted.begin(run_id="half open")
    fronted.control.close_round("half open", 1, discard=True)
    fronted.as_a_front("a").open_round("half open", 2, "model")
    fronted.submit("a", replace(header, round=2), range(3))
    assert refusal(fronted.control.release, "half open", 2) is Refusal.ROUND_NOT_CLOSED
    assert refusal(fronted.control.close_round, "half open", 2) is Refusal.UNKNOWN_ROUND
    assert fronted.left() == []
    fronted.control.open_round("half open", 3, "model")
    fronted.control.close_round("half open", 3, discard=True)


def test_killed_while_releasing_the_front_leaves_nothing_to_release(fronted: Fronted):
    header = fronted.begin(run_id="front killed", length=2**22)
    for name in "ab":
        fronted.submit(name, header, range(6), 2**22)
    fronted.control.close_round("front killed", 1)
    released = fronted.control.release("front killed", 1)
    next(released)
    kill(fronted.front)
    with pytest.raises(ShufflerUnavailable):
        list(released)
    fronted.start_front()
    assert refusal(fronted.control.release, "front killed", 1) is Refusal.ALREADY_RELEASED
    wait_until(lambda: fronted.left() == [])
    fronted.control.open_round("front killed", 2, "model")
    fronted.control.close_round("front killed", 2, discard=True)


def test_a_server_that_breaks_off_leaves_nothing_to_release(fronted: Fronted):
    header = fronted.begin(run_id="broken off", length=2**22)
    for name in "ab":
        fronted.submit(name, header, range(6), 2**22)
    fronted.control.close_round("broken off", 1)
    released = fronted.control.release("broken off", 1)
    next(released)
    released.close()
    wait_until(lambda: fronted.left() == [])
    assert refusal(fronted.control.release, "broken off", 1) is Refusal.ALREADY_RELEASED


def test_a_worker_killed_before_the_release_loses_nothing(fronted: Fronted):
    header = fronted.begin(run_id="worker killed", minimum=4)
    sent = fronted.submit("a", header, range(2)) + fronted.submit("b", header, range(2))
    kill(fronted.workers["b"])
    closing = fronted.control.close_round, "worker killed", 1
    assert refusal(*closing) is Refusal.WORKER_UNAVAILABLE
    fronted.restart_worker("b")
    assert fronted.control.close_round(*closing[1:]) is Outcome.RELEASABLE
    kill(fronted.workers["b"])
    assert refusal(fronted.control.release, "worker killed", 1) is Refusal.WORKER_UNAVAILABLE
    fronted.restart_worker("b")
    assert sorted(fronted.control.release("worker killed", 1)) == sorted(sent)


def test_a_worker_killed_while_releasing_loses_the_batch(fronted: Fronted):
    header = fronted.begin(run_id="worker killed later", length=2**22)
    for name in "ab":
        fronted.submit(name, header, range(6), 2**22)
    fronted.control.close_round("worker killed later", 1)
    released = fronted.control.release("worker killed later", 1)
    next(released)
    kill(fronted.workers["b"])
    with pytest.raises(ShufflerRefused) as refused:
        list(released)
    assert str(refused.value) == "BATCH_LOST: a worker broke off its release"
    wait_until(lambda: fronted.left() == ["b"])
    fronted.restart_worker("b")
    assert fronted.left() == []
    assert refusal(fronted.control.release, "worker killed later", 1) is Refusal.ALREADY_RELEASED
    header = fronted.begin(2, run_id="worker killed later", length=2**22)
    sent = fronted.submit("b", header, [0], 2**22)
    fronted.control.close_round("worker killed later", 2)
    assert list(fronted.control.release("worker killed later", 2)) == sent


def test_a_part_that_is_damaged_takes_the_others_with_it(fronted: Fronted):
    header = fronted.begin(run_id="damaged")
    for name in "ab":
        fronted.submit(name, header, range(2))
    kill(fronted.workers["b"])
    for path in (fronted.folder / "b").glob("batch-*.reports"):
        path.unlink()
    fronted.restart_worker("b")
    for _ in range(2):
        assert refusal(fronted.control.close_round, "damaged", 1) is Refusal.BATCH_LOST
        assert fronted.left() == []


def test_a_front_that_was_told_other_workers_or_addresses_is_refused(fronted: Fronted):
    header = fronted.begin(run_id="others", minimum=2)
    sent = fronted.submit("a", header, range(2)) + fronted.submit("b", header, range(2))
    fronted.restart_front(a="b", b="a")
    assert refusal(fronted.control.close_round, "others", 1) is Refusal.NOT_PERMITTED
    shares = fronted.shares
    for other in ({"a": 8}, {"a": 8, "b": 7}):
        fronted.shares = other
        fronted.restart_front()
        assert refusal(fronted.control.close_round, "others", 1) is Refusal.RUN_EXISTS
        assert refusal(fronted.control.create_run, "others", plan(8, 2), LENGTH) is (
            Refusal.RUN_EXISTS
        )
    fronted.shares = shares
    fronted.restart_front()
    assert fronted.control.close_round("others", 1) is Outcome.RELEASABLE
    assert sorted(fronted.control.release("others", 1)) == sorted(sent)


def test_one_worker_alone_behind_a_front(tmp_path: Path):
    with ExitStack() as stack:
        single = Fronted(stack, tmp_path, [10])
        header = single.begin(minimum=3)
        sent = single.submit("a", header, range(3))
        assert single.control.close_round("run", 1) is Outcome.RELEASABLE
        assert sorted(single.control.release("run", 1)) == sorted(sent)


def test_a_spool_stays_with_its_worker(tmp_path: Path):
    store = RunStore(tmp_path / "spool", worker="a")
    store.create_run("run", plan(10, 1), LENGTH, [("a", 5), ("b", 5)])
    with pytest.raises(ShufflerRefused, match="worker a is not among b"):
        store.create_run("other", plan(10, 1), LENGTH, [("b", 10)])
    with pytest.raises(ShufflerRefused, match="a front names its workers, and a server none"):
        store.create_run("other", plan(10, 1), LENGTH)
    store.close()
    for worker, words in (("", "a shuffler without a front"), ("b", "worker b")):
        with pytest.raises(ValueError, match=f"holds a run of worker a, this is {words}"):
            RunStore(tmp_path / "spool", worker=worker)
    RunStore(tmp_path / "spool", worker="a").close()


def test_a_worker_s_file_need_be_no_longer_than_its_own_part(tmp_path: Path):
    """A limit on the length of files that the whole plan's would pass."""
    with ExitStack() as stack:
        fronted = Fronted(stack, tmp_path, [100, 100])
        limit = 2 * 100 * 4096
        for worker in fronted.workers.values():
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (limit, limit))
        fronted.begin(users=200, length=4096)
        with pytest.raises(ShufflerRefused, match=f"would have {2 * limit} bytes"):
            fronted.control.create_run("longer", plan(200), 8192)


def test_a_part_waits_as_long_as_the_front_does(tmp_path: Path):
    """What a worker alone would take for a release that is not read."""
    with ExitStack() as stack:
        fronted = Fronted(stack, tmp_path, [6, 6], {"release_idle_seconds": 0.2})
        header = fronted.begin(length=2**22)
        for name in "ab":
            fronted.submit(name, header, range(6), 2**22)
        fronted.control.close_round("run", 1)
        released = fronted.control.release("run", 1)
        lengths = [len(next(released))]
        time.sleep(1)
        assert fronted.left() == ["a", "b"]
        lengths += [len(sealed) for sealed in released]
        assert lengths == [2**22] * 12


WORKER = '[[workers]]\nname = "a"\naddress = "127.0.0.1:1"\nusers = 5\n'
TLS = '[tls]\ncertificate = "own.pem"\nkey = "own.key"\nauthority = "authority.pem"\n'


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (WORKER, "tls is missing"),
        (TLS, "workers is missing"),
        ("workers = []\n" + TLS, "workers: List should have at least 1 item"),
        (TLS + WORKER + WORKER, "no two workers have one name, got a, a"),
        (TLS + WORKER + WORKER.replace('"a"', '"b"'), "no two workers have one address"),
        (TLS + WORKER.replace(":1", ":0"), "a worker's port lies in"),
        (TLS + WORKER.replace('"a"', '"a:b"'), "workers.0.name: String should match pattern"),
        (TLS + WORKER.replace("users", "usres"), "unknown key workers.0.usres; allowed: name"),
        (TLS + WORKER.replace("5", "0"), "workers.0.users: Input should be greater than"),
        (TLS + WORKER + "[limits]\nstreams = 1", "unknown key limits.streams; allowed: worker"),
        (TLS + WORKER + "[limits]\nworker_seconds = 1e10", "limits.worker_seconds: Input"),
    ],
)
def test_a_front_s_configuration_that_makes_no_sense_is_one_line(
    tmp_path: Path, config: str, words: str
):
    (tmp_path / "front.toml").write_text(config)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "front.toml", FrontConfig)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_commands_make_a_front_that_starts_and_refuse_another_s_certificate(tmp_path: Path):
    shufl = [sys.executable, "-m", "simulator.cli"]
    node = ["node", "--users", "3", "--worker", "a"]
    for arguments in (["authority"], ["front", "--host", "127.0.0.1"], node):
        made = [*shufl, "keys", arguments[0], str(tmp_path), *arguments[1:]]
        assert subprocess.run(made, cwd=ROOT, capture_output=True, timeout=60).returncode == 0
    caller = caller_of((tmp_path / "node.pem").read_bytes())
    assert caller == Caller(Role.NODE, "node", 3, "a")
    for name in ("front", "own"):
        (tmp_path / f"{name}.toml").write_text(TLS.replace("own", name) + WORKER)
    Authority.read(tmp_path).issue(Role.SHUFFLER, "own", hosts=["127.0.0.1"]).write(tmp_path, "own")
    command = [*shufl, "front", "--config", str(tmp_path / "own.toml")]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr == f"front: {tmp_path / 'own.pem'}: not a front's certificate\n"
    command = [*shufl, "front", "--config", str(tmp_path / "front.toml")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("shuffler listening on 127.0.0.1:")
        child.terminate()
        assert child.wait(20) == 0
