"""Killed at the worst moments, the shuffler loses nothing acknowledged and repeats nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shuffler_world import World, kill
from shufl.shuffler import (
    Outcome,
    Refusal,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)


@pytest.mark.slow
def test_killed_before_closing_all_acknowledged_reports_are_released(
    start: Callable[..., World], memory_path: Path
):
    world = start(memory_path / "spool")
    header = world.begin()
    reports = world.reports(header, 100)
    assert world.submit(header, reports) == [Verdict.ACCEPTED] * 100
    kill(world)
    world = start(memory_path / "spool")
    assert world.submit(header, reports[:1]) == [Verdict.DUPLICATE]
    more = world.reports(header, 5, first=100)
    assert world.submit(header, more) == [Verdict.ACCEPTED] * 5
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    kill(world)
    world = start(memory_path / "spool")
    released = list(world.control.release("run", 1))
    assert sorted(released) == sorted(sealed for _, sealed in reports + more)
    with pytest.raises(ShufflerRefused) as refused:
        list(world.control.release("run", 1))
    assert refused.value.reason is Refusal.ALREADY_RELEASED


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "length"), [*((n, 148) for n in range(3)), (3, 2**18 + 5)])
def test_killed_while_submitting_what_was_acknowledged_is_released_once(
    start: Callable[..., World], memory_path: Path, trial: int, length: int
):
    """Short reports, and long ones that come in pieces."""
    world = start(memory_path / "spool")
    header = world.begin(report_bytes=length)
    count = 20_000 if length < 1000 else 500
    sent = [(user, os.urandom(length)) for user in range(count)]
    acknowledged = 0
    kill_after = random.Random(trial).randrange(1, count // 13)
    with pytest.raises(ShufflerUnavailable):
        for verdict in world.intake.submit(header, iter(sent), deadline=10):
            assert verdict is Verdict.ACCEPTED
            acknowledged += 1
            if acknowledged == kill_after:
                os.kill(world.process.pid, signal.SIGKILL)
    assert acknowledged < len(sent)
    kill(world)
    world = start(memory_path / "spool")
    more = count // 66
    again = world.submit(header, sent[: acknowledged + more])  # a client that does not know
    assert set(again[:acknowledged]) == {Verdict.DUPLICATE}
    assert set(again) <= {Verdict.ACCEPTED, Verdict.DUPLICATE}
    world.control.close_round("run", 1)
    released = list(world.control.release("run", 1))
    assert len(set(released)) == len(released)
    assert {sealed for _, sealed in sent[: acknowledged + more]} <= set(released)
    assert set(released) <= {sealed for _, sealed in sent}


@pytest.mark.slow
def test_killed_while_releasing_the_batch_is_lost_and_not_released_again(
    start: Callable[..., World], memory_path: Path
):
    world = start(memory_path / "spool")
    header = world.begin(report_bytes=2**20)
    world.submit(header, [(user, os.urandom(2**20)) for user in range(40)])
    world.control.close_round("run", 1)
    release = world.control.release("run", 1)
    next(release)
    kill(world)
    with pytest.raises(ShufflerUnavailable):
        list(release)
    world = start(memory_path / "spool")
    with pytest.raises(ShufflerRefused) as refused:
        list(world.control.release("run", 1))
    assert refused.value.reason is Refusal.ALREADY_RELEASED
    assert not list((memory_path / "spool").glob("batch-*"))
    world.control.open_round("run", 2, "model 2", world.public_key)


@pytest.mark.slow
def test_stopped_in_order_it_keeps_a_given_spool(start: Callable[..., World], memory_path: Path):
    world = start(memory_path / "spool")
    header = world.begin()
    world.submit(header, world.reports(header, 4))
    world.process.__exit__(None, None, None)
    world = start(memory_path / "spool")
    world.control.close_round("run", 1)
    assert len(list(world.control.release("run", 1))) == 4


def test_a_full_disk_is_a_verdict_and_the_accepted_reports_are_released(
    start: Callable[..., World], tiny_disk: Path
):
    world = start(tiny_disk / "spool")
    length = 10_000
    for round in (1, 2):  # the second: releasing has made room again
        header = world.begin(round=round, users=1000, report_bytes=length)
        reports = [(user, os.urandom(length)) for user in range(150)]
        verdicts = world.submit(header, reports)
        assert set(verdicts) == {Verdict.ACCEPTED, Verdict.STORAGE_FULL}
        assert world.control.close_round("run", round) is Outcome.RELEASABLE
        accepted = [
            sealed
            for (_, sealed), verdict in zip(reports, verdicts, strict=True)
            if verdict is Verdict.ACCEPTED
        ]
        assert sorted(world.control.release("run", round)) == sorted(accepted)
    assert world.process.alive


def test_when_its_parent_is_killed_the_shuffler_ends_and_takes_its_spool_along(tmp_path: Path):
    script = (
        "import time; from shufl.shuffler import ShufflerProcess\n"
        "with ShufflerProcess() as process:\n"
        "    print(process.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert list(tmp_path.rglob("runs.db"))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(child)
    assert not list(tmp_path.rglob("runs.db"))


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
