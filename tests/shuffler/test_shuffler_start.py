"""Starting on a directory whose files cannot be opened now, or are not what was written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shuffler_world import PUBLIC_KEY, plan, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.runs import RunStore

ROOT = Path(__file__).parents[2]
RUNS = 12


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with one batch each, every second one closed."""
    spool = tmp_path_factory.mktemp("filled") / "spool"
    store = RunStore(spool)
    for number in range(RUNS):
        digest = store.create_run(f"run {number}", plan(1000), 64)
        store.open_round(f"run {number}", 1, "model", PUBLIC_KEY)
        sealed = bytes([number]) * 64
        mine = report(digest, 7, sealed, run_id=f"run {number}")
        assert store.batches.accept([mine]) == [Verdict.ACCEPTED]
        if number % 2:
            store.close_round(f"run {number}", 1)
    store.close()
    return spool


@pytest.fixture
def spool(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "spool")


def contents(spool: Path) -> dict[str, bytes]:
    """Of every file, without empty journals."""
    files = {path.name: path.read_bytes() for path in spool.iterdir() if path.is_file()}
    return {name: content for name, content in files.items() if content}


def all_batches_are_there(store: RunStore) -> None:
    for number in range(RUNS):
        assert store.close_round(f"run {number}", 1) is Outcome.RELEASABLE
        batch = store.begin_release(f"run {number}", 1)
        assert batch.next_chunk(2**20) == ([bytes([number]) * 64], False)
        store.finish_release(f"run {number}", 1)


def lost_batches(spool: Path) -> int:
    """How many runs' batches are lost after a start; every other one comes out as it was."""
    store, lost = RunStore(spool), 0
    for number in range(RUNS):
        try:
            assert store.close_round(f"run {number}", 1) is Outcome.RELEASABLE
            batch = store.begin_release(f"run {number}", 1)
            assert batch.next_chunk(2**20) == ([bytes([number]) * 64], False)
            store.finish_release(f"run {number}", 1)
        except ShufflerRefused as refused:
            assert refused.reason in (Refusal.BATCH_LOST, Refusal.ALREADY_RELEASED)
            lost += 1
    store.close()
    return lost


def start(spool: Path, files: int | None = None) -> subprocess.CompletedProcess:
    """The command, with so many open files; it ends by itself if it starts."""
    config = spool.parent / "shuffler.toml"
    config.write_text(f'plaintext = true\nspool = "{spool}"\nlog_file = "log"\n')
    limit = ["prlimit", f"--nofile={files}"] if files else []
    return subprocess.run(
        [
            *limit,
            sys.executable,
            "-m",
            "shufl.cli",
            "shuffler",
            "--config",
            str(config),
            "--exit-with-parent",
        ],
        env={**os.environ, "SHUFL_CONTROL_TOKEN": "t" * 32},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_too_few_open_files_stop_the_start_and_no_batch_is_lost(spool: Path):
    before = contents(spool)
    refused = start(spool, files=20)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert f"shuffler: {spool}/batch-" in refused.stderr
    assert "cannot be opened" in refused.stderr
    assert contents(spool) == before
    started = start(spool)
    assert (started.returncode, started.stderr) == (0, "")
    assert contents(spool) == before
    store = RunStore(spool)
    all_batches_are_there(store)
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from shufl.shuffler.store.runs import RunStore

refusals = set()
while True:
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 + len(refusals), 4096))
    try:
        RunStore(Path(sys.argv[1])).close()
    except (OSError, ValueError) as error:
        assert "damaged" not in str(error), error
        refusals.add(len(refusals))
    else:
        break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    assert len(list(Path("/proc/self/fd").iterdir())) == used
print(len(refusals))
"""


def test_whichever_file_is_one_too_many_no_batch_is_lost(spool: Path):
    """In one process, with one more open file at each attempt until it starts."""
    before = contents(spool)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(spool)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2 * RUNS
    assert contents(spool) == before


def execute(statement: str) -> Callable[[Path], None]:
    def change(runs: Path) -> None:
        rows = sqlite3.connect(runs, isolation_level=None)
        rows.execute(statement)
        rows.close()

    return change


DAMAGES: list[Callable[[Path], object]] = [
    lambda runs: runs.write_bytes(b"no database" * 999),
    lambda runs: os.truncate(runs, runs.stat().st_size - 4096),
    lambda runs: os.truncate(runs, 0),
    lambda runs: runs.unlink(),
    lambda runs: runs.with_name("generation").write_bytes(b"{}"),
    execute("UPDATE runs SET plan = '{}' WHERE run_id = 'run 3'"),
    execute("UPDATE runs SET owner = 'another' WHERE run_id = 'run 3'"),
    execute("UPDATE runs SET report_bytes = 0"),
    execute("UPDATE runs SET run_id = x'ff' WHERE run_id = 'run 3'"),
    execute("DELETE FROM runs WHERE run_id = 'run 3'"),
    execute("DELETE FROM rounds WHERE run_id = 'run 3'"),
    execute("UPDATE rounds SET state = 'ajar'"),
    execute("UPDATE rounds SET state = 'closed', outcome = 1 WHERE run_id = 'run 2'"),
    execute("UPDATE rounds SET outcome = 9"),
    execute("UPDATE rounds SET round = 'one'"),
    execute("UPDATE rounds SET public_key = 'one'"),
    execute("UPDATE rounds SET model_digest = CAST(x'ff' AS TEXT)"),
    execute("UPDATE directory SET generation = 10000"),
    execute("DROP TABLE rounds"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_damaged_the_rest_goes_on(spool: Path, damage: Callable[[Path], object]):
    damage(spool / "runs.db")
    lost = lost_batches(spool)
    assert lost
    assert lost_batches(spool) == RUNS  # the rest has been released: nothing comes a second time


def test_a_directory_of_another_format_is_refused_and_nothing_is_changed(spool: Path, command):
    for change in (
        lambda: (spool / "generation").unlink(),
        lambda: (spool / "generation").write_text(other_format()),
    ):
        change()
        before = contents(spool)
        refused = command(f'plaintext = true\nspool = "{spool}"\n')
        assert (refused.returncode, refused.stdout) == (2, "")
        assert len(refused.stderr.splitlines()) == 1
        assert "generation" in refused.stderr
        assert contents(spool) == before


def other_format() -> str:
    found = {"format": 99, "generation": 3, "key": "00" * 32}
    check = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return json.dumps(found | {"check": check})


def test_a_crash_while_the_directory_is_made_leaves_nothing_in_the_way(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    (spool / "lock").touch()
    (spool / "runs.new").write_bytes(b"half")
    (spool / "runs.new-journal").write_bytes(b"half")
    store = RunStore(spool)
    assert sorted(path.name for path in spool.iterdir()) == ["generation", "lock", "runs.db"]
    with pytest.raises(ShufflerRefused) as refused:
        store.open_round("run", 1, "model", PUBLIC_KEY)
    assert refused.value.reason is Refusal.UNKNOWN_RUN
    store.close()
