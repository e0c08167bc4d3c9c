"""Starting on a directory whose files cannot be opened now, or are not what was written."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shuffler_world import PUBLIC_KEY, plan, report

from shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shuffler.store.runs import RunStore

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


def start(spool: Path, files: int | None = None) -> subprocess.CompletedProcess:
    """The command, with so many open files; it ends by itself if it starts."""
    config = spool.parent / "shuffler.toml"
    config.write_text(f'plaintext = true\nspool = "{spool}"\nlog_file = "log"\n')
    limit = ["prlimit", f"--nofile={files}"] if files else []
    return subprocess.run(
        [*limit, sys.executable, "-m", "shuffler", "--config", str(config), "--exit-with-parent"],
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
from shuffler.store.runs import RunStore

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


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda runs: runs.write_bytes(b"no database" * 999), "damaged: file is not a database"),
    (lambda runs: os.truncate(runs, runs.stat().st_size - 4096), "damaged: "),
    (lambda runs: os.truncate(runs, 0), "damaged: it has no format number"),
    (lambda runs: runs.unlink(), "damaged: it is missing, and there are batches"),
    (lambda runs: (runs.unlink(), runs.mkdir()), "cannot be opened: unable to open"),
    (execute("PRAGMA user_version = 2"), "has format 2, this shuffler reads format 5"),
    (execute("UPDATE runs SET plan = '{}' WHERE run_id = 'run 3'"), "a row does not parse"),
    (execute("UPDATE runs SET plan = x'00' WHERE run_id = 'run 3'"), "a row does not parse"),
    (execute("UPDATE runs SET report_bytes = 0"), "a row does not parse"),
    (execute("UPDATE runs SET run_id = x'ff' WHERE run_id = 'run 3'"), "a row does not parse"),
    (execute("DELETE FROM runs WHERE run_id = 'run 3'"), "a row does not parse"),
    (execute("UPDATE rounds SET state = 'ajar'"), "a row does not parse"),
    (execute("UPDATE rounds SET outcome = 9"), "a row does not parse"),
    (execute("UPDATE rounds SET round = 'one'"), "a row does not parse"),
    (execute("UPDATE rounds SET public_key = 'one'"), "a row does not parse"),
    (execute("UPDATE rounds SET model_digest = CAST(x'ff' AS TEXT)"), "damaged: "),
    (execute("DROP TABLE rounds"), "damaged: no such table: rounds"),
]


def outcome(spool: Path) -> str:
    """What is said of `runs.db`; empty if it starts. Nothing is deleted or changed."""
    before, names = contents(spool), {path.name for path in spool.iterdir()}
    try:
        RunStore(spool).close()
    except (ValueError, OSError) as error:
        assert str(error).startswith(f"{spool}/runs.db ")
        assert str(error).isprintable()
        assert contents(spool) == before
        assert {path.name for path in spool.iterdir()} == names
        return str(error)
    return ""


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_runs_that_cannot_be_read_are_refused_and_nothing_is_deleted(
    spool: Path, damage: Callable[[Path], object], words: str
):
    damage(spool / "runs.db")
    assert words in outcome(spool)


@pytest.mark.parametrize(("damage", "words"), [DAMAGES[0], DAMAGES[5], DAMAGES[-1]])
def test_the_command_says_it_in_one_line(
    command, spool: Path, damage: Callable[[Path], object], words: str
):
    damage(spool / "runs.db")
    refused = command(f'plaintext = true\nspool = "{spool}"\n')
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.splitlines()) == 1
    assert words in refused.stderr


@pytest.mark.slow
def test_bytes_that_are_overwritten_are_found_or_change_nothing_else(filled: Path, tmp_path: Path):
    """Whatever the place: one line that names the file, or a start."""
    draw = random.Random(5)
    outcomes = []
    for trial in range(120):
        spool = tmp_path / str(trial)
        shutil.copytree(filled, spool)
        runs = bytearray((spool / "runs.db").read_bytes())
        length = draw.choice([1, 16, 500, 4096])
        place = draw.randrange(len(runs) - length + 1)
        runs[place : place + length] = draw.randbytes(length)
        (spool / "runs.db").write_bytes(runs)
        outcomes.append(outcome(spool))
        shutil.rmtree(spool)
    assert 10 < outcomes.count("") < 110


def test_a_crash_while_the_directory_is_made_leaves_nothing_in_the_way(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    (spool / "lock").touch()
    (spool / "runs.new").write_bytes(b"half")
    (spool / "runs.new-journal").write_bytes(b"half")
    store = RunStore(spool)
    assert sorted(path.name for path in spool.iterdir()) == ["lock", "runs.db"]
    with pytest.raises(ShufflerRefused) as refused:
        store.open_round("run", 1, "model", PUBLIC_KEY)
    assert refused.value.reason is Refusal.UNKNOWN_RUN
    store.close()
