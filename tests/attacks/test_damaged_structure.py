"""Bits that flip where SQLite keeps its own numbers, and rows that are not of one commit."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.store.storage import DamagedFile

from shuffler_world import PUBLIC_KEY, plan, report
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.store.runs import RunStore

RUN, LENGTH, HEADER_BYTES = "a run", 64, 108  # the database's header, and its first page's


@pytest.fixture
def filled(memory_path: Path) -> Path:
    """A run with an open round and one report."""
    spool = memory_path / "filled"
    store = RunStore(spool)
    digest = store.create_run(RUN, plan(40), LENGTH)
    store.open_round(RUN, 1, "model", PUBLIC_KEY)
    assert store.batches.accept([report(digest, 0, bytes(LENGTH), run_id=RUN)]) == [
        Verdict.ACCEPTED
    ]
    store.close()
    return spool


def is_lost(spool: Path) -> bool:
    """Whether the round is lost; if not it takes a report more, and is released with both."""
    store = RunStore(spool)
    mine = report(store.create_run("new", plan(40), LENGTH), 1, b"x" * LENGTH, run_id=RUN)
    try:
        taken = store.batches.accept([mine])
        store.close_round(RUN, 1)
        released, _ = store.begin_release(RUN, 1).next_chunk(2**20)
        store.finish_release(RUN, 1)
    except ShufflerRefused as refused:
        assert refused.reason is Refusal.BATCH_LOST
        return True
    finally:
        store.open_round("new", 1, "model", PUBLIC_KEY)  # whatever is damaged, others go on
        assert store.close_round("new", 1) is Outcome.BELOW_MINIMUM
        store.close()
    assert taken == [Verdict.ACCEPTED]
    assert sorted(released) == [bytes(LENGTH), b"x" * LENGTH]
    return False


def flipped(filled: Path, name: str, place: int, bit: int) -> Path:
    spool = filled.with_name("flipped")
    shutil.rmtree(spool, ignore_errors=True)
    shutil.copytree(filled, spool)
    (file,) = spool.glob(name)
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return spool


@pytest.mark.parametrize("name", ["runs.db", "batch-*.db"])
def test_a_file_whose_header_forbids_writing_is_lost(filled: Path, name: str):
    """SQLite opens it and refuses every change: nothing would ever be taken again."""
    assert is_lost(flipped(filled, name, place=18, bit=3))
    assert not is_lost(filled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs.db", "batch-*.db"])
def test_every_bit_of_a_header_is_noticed_or_means_nothing(filled: Path, name: str):
    lost = [
        is_lost(flipped(filled, name, place, bit))
        for place in range(HEADER_BYTES)
        for bit in range(8)
    ]
    assert any(lost)
    assert not all(lost)


@pytest.mark.parametrize("text", [RUN, "CREATE TABLE"])
def test_a_name_that_becomes_no_text_is_lost(filled: Path, text: str):
    """Bytes that are no UTF-8, in a run's id and in the tables' own definitions."""
    content = (filled / "runs.db").read_bytes()
    places = [found.start() for found in re.finditer(text.encode(), content)]
    lost = [is_lost(flipped(filled, "runs.db", place, bit=7)) for place in places]
    assert any(lost)


def test_rows_of_different_commits_do_not_fit_together(tmp_path: Path):
    """Each row is good: a user whose mark is that of an earlier commit could report again."""
    path = tmp_path / "batch.db"
    spool = RoundSpool(path, LENGTH, 40)
    spool.close()
    (before,) = rows(path, "SELECT content FROM reported")
    spool = RoundSpool(path, LENGTH, 40)
    assert spool.add([("node", 1, bytes(LENGTH))]) == [Verdict.ACCEPTED]
    spool.close()
    RoundSpool(path, LENGTH, 40).close()
    rows(path, "UPDATE reported SET content = ?", *before)
    with pytest.raises(DamagedFile, match="do not fit together"):
        RoundSpool(path, LENGTH, 40)


def rows(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path, isolation_level=None)
    found = connection.execute(statement, values).fetchall()
    connection.close()
    return found
