"""Directories and generations that do not belong together: no batch comes out twice or is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shuffler_world import PUBLIC_KEY, plan, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused
from shufl.shuffler.record import verify
from shufl.shuffler.store.runs import RunStore

ROOT = Path(__file__).parents[2]
SEALED = bytes(range(64))


class Place:
    """A spool directory and its generation, elsewhere, with a closed round of one report."""

    def __init__(self, path: Path) -> None:
        self.spool, self.generation = path / "spool", path / "elsewhere" / "generation"
        self.generation.parent.mkdir(parents=True)
        store = self.open()
        digest = store.create_run("run", plan(10), len(SEALED))
        store.open_round("run", 1, "model", PUBLIC_KEY)
        store.batches.accept([report(digest, 0, SEALED)])
        store.close_round("run", 1)
        store.close()

    def open(self, spool: Path | None = None, generation: Path | None = None) -> RunStore:
        return RunStore(spool or self.spool, generation=generation or self.generation)

    def contents(self) -> dict[Path, bytes]:
        files = [*self.spool.iterdir(), *self.generation.parent.iterdir()]
        return {path: path.read_bytes() for path in files if path.stat().st_size}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "one")


def released(store: RunStore) -> list[bytes]:
    batch = store.begin_release("run", 1)
    found, _ = batch.next_chunk(2**20)
    store.finish_release("run", 1)
    return found


def refused(store: Callable[[], RunStore]) -> str:
    with pytest.raises(ValueError, match=r"begin without any run|in use") as error:
        store()
    assert str(error.value).isprintable()
    return str(error.value)


def test_a_copy_beside_the_original_is_not_released_a_second_time(place: Place, tmp_path: Path):
    """Both would begin at the same generation."""
    copy = shutil.copytree(place.spool, tmp_path / "copy")
    original = place.open()
    assert "in use by another shuffler" in refused(lambda: place.open(copy))
    assert released(original) == [SEALED]
    original.close()
    assert f"{copy} is older than it was" in refused(lambda: place.open(copy))


def test_the_generation_of_another_directory_loses_no_batch(place: Place, tmp_path: Path):
    other = Place(tmp_path / "other")
    before = place.contents()
    message = refused(lambda: place.open(generation=other.generation))
    assert "belongs to another directory" in message
    assert place.contents() == before
    for each in (place, other):
        store = each.open()
        assert released(store) == [SEALED]
        store.close()


def test_a_directory_that_is_gone_does_not_begin_anew(place: Place):
    """A disk that is not mounted: run ids would be taken a second time."""
    away = place.spool.rename(place.spool.with_name("away"))
    assert "has no runs" in refused(place.open)
    shutil.rmtree(place.spool)
    away.rename(place.spool)
    store = place.open()
    assert released(store) == [SEALED]
    store.close()


def test_a_generation_from_a_backup_is_refused(place: Place):
    """It would let in every later backup of the directory."""
    backup = place.generation.read_bytes()
    store = place.open()
    released(store)
    store.close()
    place.generation.write_bytes(backup)
    assert f"{place.generation} is older than it was" in refused(place.open)


def test_what_the_generation_does_not_know_of_is_not_released(place: Place):
    """Else the directory as it was before could be put back. It is in the record once."""
    store = place.open()
    blocked = place.generation.with_name("generation.new")
    blocked.mkdir()
    for _ in range(3):
        with pytest.raises(ShufflerRefused) as error:
            store.begin_release("run", 1)
        assert error.value.reason is Refusal.STORAGE_FAILED
    blocked.rmdir()
    assert released(store) == [SEALED]
    events = [entry["event"] for entry in verify(store.record(0, 10))]
    assert events == ["opened", "released"]
    store.close()
    place.open().close()


def test_a_generation_with_no_place_is_refused_in_one_line(tmp_path: Path):
    config = tmp_path / "shuffler.toml"
    config.write_text('plaintext = true\nspool = "spool"\ngeneration = "nowhere/generation"\n')
    done = subprocess.run(
        [
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
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"{tmp_path}/nowhere/generation cannot be opened" in done.stderr


CRASHING = """
import os, sys
from pathlib import Path
from shufl.shuffler.store import checks
from shufl.shuffler.store.runs import RunStore

store = RunStore(Path(sys.argv[1]), generation=Path(sys.argv[2]))
checks.Anchor.advance = lambda self, to: to == self.generation or os.kill(os.getpid(), 9)
store.begin_release("run", 1)
"""


def test_killed_before_the_generation_is_written_a_release_is_lost_and_not_repeated(place: Place):
    """The first change of the process is refused nothing, so it is the release that is cut."""
    before = place.generation.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, str(place.spool), str(place.generation)], cwd=ROOT
    )
    assert done.returncode == -signal.SIGKILL
    assert place.generation.read_bytes() == before
    store = place.open()
    with pytest.raises(ShufflerRefused) as error:
        store.begin_release("run", 1)
    assert error.value.reason is Refusal.ALREADY_RELEASED
    assert store.close_round("run", 1) is Outcome.RELEASABLE  # what closing it found
    assert place.generation.read_bytes() != before
    store.close()
