"""The record file and its directory: what a start makes of them. In process, on real files."""

import json
import os
import tracemalloc

import pytest

from shuffler_world import PUBLIC_KEY, fill_up, plan, refusal, report
from shufl.protocol import hash_chain
from shufl.shuffler import Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.public_record import verify
from shufl.shuffler.store import runs
from shufl.shuffler.store.runs import RunStore


@pytest.fixture
def directory(memory_path):
    """Of a run with a round that was released, one that was discarded, and one that is open."""
    place = memory_path / "directory"
    store = RunStore(place)
    store.create_run("run", plan(10), 64)
    for round in (1, 2, 3):
        store.open_round("run", round, "model", PUBLIC_KEY)
        assert store.batches.accept(report(store, 0, bytes(64), round)) is Verdict.ACCEPTED
        if round == 1:
            store.close_round("run", 1)
            store.release("run", 1)
        if round < 3:
            store.end_round("run", round)
    store.close()
    return place


def events(store):
    return [(line["event"], line.get("round")) for line in verify(store.record(0))]


BEFORE = [
    ("created", None),
    *[("opened", 1), ("released", 1), ("opened", 2), ("discarded", 2), ("opened", 3)],
]


def test_a_start_enters_what_is_lost_once_and_goes_on(directory):
    for _ in range(2):
        store = RunStore(directory)
        assert events(store) == [*BEFORE, ("lost", 3)]
        assert store.close_round("run", 1).outcome is Outcome.RELEASABLE
        assert store.close_round("run", 2).outcome is Outcome.DISCARDED
        for call in (store.close_round, store.release):
            assert refusal(call, "run", 3) is Refusal.BATCH_LOST
        store.end_round("run", 3)  # as often as a server likes
        store.close()
    store = RunStore(directory)
    store.open_round("run", 4, "model", PUBLIC_KEY)
    assert store.close_round("run", 4).outcome is Outcome.BELOW_MINIMUM
    store.end_run("run")
    said = [("opened", 4), ("below-minimum", 4), ("ended", None)]
    assert events(store) == [*BEFORE, ("lost", 3), *said]
    store.close()


def test_of_a_line_that_a_crash_cut_short_nothing_remains(directory):
    """At every byte of the last line: the discarded round is then lost."""
    file = directory / "record.jsonl"
    whole = file.read_bytes()
    *lines, last, _ = whole.splitlines(keepends=True)
    for length in range(1, len(last)):
        file.write_bytes(b"".join(lines) + last[:length])
        store = RunStore(directory)
        assert events(store) == [*BEFORE[:4], ("lost", 2)]
        store.close()
    file.write_bytes(whole)
    store = RunStore(directory)
    assert events(store)[:-1] == BEFORE
    store.close()


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "a bit": lambda lines: [*lines[:2], flipped(lines[2], 20), *lines[3:]],
    "its check value": lambda lines: [*lines[:2], flipped(lines[2], -5), *lines[3:]],
    "a line is gone": lambda lines: [*lines[:2], *lines[3:]],
    "a line comes twice": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "lines are swapped": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "no JSON": lambda lines: [*lines[:2], b"[" * 100_000 + b"\n", *lines[2:]],
    "no text": lambda lines: [*lines[:2], b"\xff\n", *lines[2:]],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_line_is_named_in_one_line_and_nothing_is_changed(directory, how, command):
    file = directory / "record.jsonl"
    damaged = b"".join(DAMAGES[how](file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(damaged)
    done = command(f'directory = "{directory}"\n')
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"error: {file}: line 3 of the record is damaged" in done.stderr
    assert file.read_bytes() == damaged


def test_lines_that_follow_each_other_and_make_no_sense_are_refused(directory):
    """A record of another version, say."""
    file = directory / "record.jsonl"
    about = {"server": "", "plan": "{}", "report_bytes": 64}
    for nonsense in ({"event": "created", "run": "a", **about}, {"event": "ended", "run": "b"}):
        file.write_bytes(hash_chain.encode(nonsense, hash_chain.START)[0])
        with pytest.raises(ValueError, match=r"record\.jsonl is another version's"):
            RunStore(directory)


def test_a_directory_serves_one_shuffler_at_a_time(directory, command):
    store = RunStore(directory)
    with pytest.raises(ValueError, match="in use by another shuffler"):
        RunStore(directory)
    done = command(f'directory = "{directory}"\n')
    assert done.returncode == 2
    assert done.stderr == f"error: {directory} is in use by another shuffler\n"
    store.close()
    RunStore(directory).close()


def test_a_directory_is_the_shuffler_s_alone(tmp_path):
    mask = os.umask(0)
    try:
        RunStore(tmp_path / "directory").close()
    finally:
        os.umask(mask)
    places = tmp_path / "directory", tmp_path / "directory/record.jsonl"
    assert [place.stat().st_mode & 0o777 for place in places] == [0o700, 0o600]
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="must have mode 0700, has 0755"):
        RunStore(tmp_path)


@pytest.mark.slow
def test_the_record_comes_in_answers_of_bounded_length(memory_path):
    """Also the entries of runs with plans of 60 kB each: four of them fit."""
    store = RunStore(memory_path / "directory", durable=False)
    for number in range(9):
        store.create_run(f"large {number}", plan() + b" " * 60_000, 64)
    for number in range(3000):
        store.create_run("small", plan(), 64) if not number else None
        store.open_round("small", number, "model", PUBLIC_KEY)
        store.end_round("small", number)
    pages, first = [], 0
    while page := store.record(first):
        pages.append(page)
        first += len(page)
    assert all(sum(map(len, page)) <= 2**18 for page in pages)
    assert [len(page) for page in pages[:2]] == [4, 4]
    lines = [line for page in pages for line in page]
    assert (
        "".join(f"{line}\n" for line in lines).encode()
        == (memory_path / "directory" / "record.jsonl").read_bytes()
    )
    assert len(verify(lines)) == 9 + 1 + 2 * 3000
    assert store.record(len(lines)) == store.record(2**64 - 1) == []
    assert store.record(len(lines) - 1) == lines[-1:]
    store.close()


@pytest.mark.slow
def test_a_start_keeps_no_line_of_the_record(directory):
    lines = (directory / "record.jsonl").read_bytes().splitlines(keepends=True)
    check = json.loads(lines[-1])["~check"]
    for number in range(4, 2004):
        about = {"event": "opened", "run": "run", "round": number, "commitment": "0" * 5000}
        line, check = hash_chain.encode(about, check)
        ended, check = hash_chain.encode(
            {"event": "discarded", "run": "run", "round": number}, check
        )
        lines += line, ended
    (directory / "record.jsonl").write_bytes(b"".join(lines) + b"torn")
    tracemalloc.start()
    try:
        store = RunStore(directory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10**6 < sum(map(len, lines))
    assert [json.loads(line)["event"] for line in store.record(len(lines) - 1)] == [
        "discarded",
        "lost",
    ]
    store.open_round("run", 2004, "model", PUBLIC_KEY)
    store.close()


def test_what_is_not_in_the_record_has_not_happened(tiny_disk):
    """On a full disk no round opens, is released or ends; with room again each does."""
    store = RunStore(tiny_disk / "directory", durable=False)
    store.create_run("run", plan(10), 64)
    for round in (1, 2):
        store.open_round("run", round, "model", PUBLIC_KEY)
        store.batches.accept(report(store, 0, bytes(64), round))
        if round == 1:
            store.close_round("run", 1)
    filler = fill_up(tiny_disk, store)
    before = store.record(0)
    for call in (store.release, store.end_round):
        assert refusal(call, "run", 1) is Refusal.STORAGE_FULL
    with pytest.raises(ShufflerRefused):
        store.end_run("run")
    assert store.record(0) == before
    filler.unlink()
    assert [sealed for sealed, _ in store.release("run", 1).chunks(64)] == [[bytes(64)]]
    store.end_run("run")
    assert [event for event in events(store) if event[1] == 1] == [("opened", 1), ("released", 1)]
    store.close()


def test_a_run_of_an_older_shuffler_with_too_short_reports_is_no_reason_not_to_start(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as older:
        older.setattr(runs, "SEALED_BYTES", 0)
        store = RunStore(tmp_path)
        store.create_run("short", plan(), 1)
        store.close()
    store = RunStore(tmp_path)
    with pytest.raises(ShufflerRefused, match="report_bytes must be at least 64, got 63"):
        store.create_run("another", plan(), 63)
    store.end_run("short")
    store.close()
