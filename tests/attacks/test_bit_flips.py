"""Bits that flip in any file of a spool directory, and a directory that is an older one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from shuffler_world import PUBLIC_KEY, plan, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.runs import RunStore

USERS, LENGTH, MINIMUM = 40, 200, 30


def sealed(run: int, user: int) -> bytes:
    return random.Random(1000 * run + user).randbytes(LENGTH)


def fill(spool: Path) -> None:
    """Two runs: one round is open and one closed, with as many reports as the minimum batch."""
    store = RunStore(spool)
    for run in (0, 1):
        digest = store.create_run(f"run {run}", plan(USERS, MINIMUM), LENGTH)
        store.open_round(f"run {run}", 1, "model", PUBLIC_KEY)
        reports = [
            report(digest, user, sealed(run, user), run_id=f"run {run}") for user in range(MINIMUM)
        ]
        assert set(store.batches.accept(reports)) == {Verdict.ACCEPTED}
    store.close_round("run 1", 1)
    store.close()


def released(store: RunStore, run: int) -> list[bytes] | None:
    """A run's batch; None if it is lost."""
    found: list[bytes] = []
    try:
        assert store.close_round(f"run {run}", 1) is Outcome.RELEASABLE
        batch = store.begin_release(f"run {run}", 1)
        while (chunk := batch.next_chunk(2**20)[0]) != []:
            found += chunk
        store.finish_release(f"run {run}", 1)
    except ShufflerRefused as refused:
        assert refused.reason is Refusal.BATCH_LOST
        return None
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flips", [60, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_no_bit_that_flips_loses_adds_or_changes_a_report_unnoticed(tmp_path, flips):
    """A start always comes about; a batch is the one that was acknowledged, or is said to be lost.

    The other run's is then there, unless what was hit belongs to both.
    """
    fill(tmp_path / "filled")
    draw = random.Random(7)
    files = sorted(path.name for path in (tmp_path / "filled").iterdir() if path.stat().st_size)
    right = [sorted(sealed(run, user) for user in range(MINIMUM)) for run in (0, 1)]
    outcomes = {"both": 0, "one": 0, "none": 0}
    for trial in range(flips):
        spool = shutil.copytree(tmp_path / "filled", tmp_path / "spool")
        file = spool / files[trial % len(files)]
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        store = RunStore(spool)
        batches = [released(store, run) for run in (0, 1)]
        for batch, whole in zip(batches, right, strict=True):
            assert batch is None or sorted(batch) == whole, file.name
        assert "batch-" not in file.name or any(batch is not None for batch in batches)
        store.close()
        outcomes[("both", "one", "none")[batches.count(None)]] += 1
        shutil.rmtree(spool)
    assert min(outcomes.values()) > 0, outcomes


def test_a_restored_backup_is_refused(tmp_path):
    """An open round's directory is copied; the round is released; the copy comes back."""
    spool, anchor = tmp_path / "spool", tmp_path / "elsewhere"
    store = RunStore(spool, generation=anchor)
    store.create_run("run", plan(10), LENGTH)
    store.open_round("run", 1, "model", PUBLIC_KEY)
    store.close()
    shutil.copytree(spool, tmp_path / "backup")
    store = RunStore(spool, generation=anchor)
    store.close_round("run", 1, discard=True)
    store.close()
    shutil.rmtree(spool)
    shutil.copytree(tmp_path / "backup", spool)
    with pytest.raises(ValueError, match="is older than it was, perhaps a restored backup"):
        RunStore(spool, generation=anchor)
    anchor.unlink()
    with pytest.raises(ValueError, match=r"is missing, and .* has runs that it belongs to"):
        RunStore(spool, generation=anchor)
