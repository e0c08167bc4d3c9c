"""The ledger: durable, refuses damage, a crash can only over-count."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from nights import by_night
from rounds import make_plan
from shufl import accounting
from shufl.accounting import ledger as ledger_lib

PLAN = make_plan(
    users=1000, check_in_rate=0.1, noise_multiplier=5.0, rounds=100, delta=1e-5,
    target_epsilon=2.0, minimum_batch=10,
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def three(path):
    with accounting.Ledger.create(path, PLAN, "run-1") as ledger:
        ledger.append_round(1)
        ledger.append_round(2, {"reports": 99})
        ledger.append_round(5)
    return path


def test_what_was_appended_is_read_back(three):
    content = accounting.Ledger.read(three)
    assert content.run_id == "run-1"
    assert content.plan == PLAN
    assert [entry.round for entry in content.entries] == [1, 2, 5]
    assert content.entries[1].note == {"reports": 99}
    assert not any(entry.interrupted for entry in content.entries)
    assert three.read_bytes().count(b"\n") == 4


def test_continuing_keeps_the_rounds_and_their_order(three):
    with accounting.Ledger.open(three, PLAN) as ledger:
        assert ledger.last_round == 5
        assert ledger.run_id == "run-1"
        for wrong in (5, 4, 0, True, 6.0):
            with pytest.raises(ValueError, match="round must be"):
                ledger.append_round(wrong)
        ledger.append_round(6)
    assert [e.round for e in accounting.Ledger.read(three).entries] == [1, 2, 5, 6]


def test_what_cannot_be_made_or_opened_is_refused_and_left_as_it_is(three, tmp_path):
    before, ledger = three.read_bytes(), accounting.Ledger
    other = PLAN.replace(delta=1e-6)
    with ledger.open(three):
        for attempt, message in (
            (lambda: ledger.create(three, PLAN, "run-2"), "exists already"),
            (lambda: ledger.create(tmp_path / "no" / "folder", PLAN, "x"), "cannot create ledger"),
            (lambda: ledger.open(three), "in use by another"),
            (lambda: ledger.open(tmp_path / "none"), "No such file"),
            (lambda: ledger.read(tmp_path / "none"), "No such file"),
        ):
            with pytest.raises(accounting.LedgerError, match=message):
                attempt()
    with pytest.raises(accounting.LedgerError, match=r"belongs to plan .*: privacy\.delta"):
        ledger.open(three, other)
    ledger.open(three).close()
    assert three.read_bytes() == before


def test_who_asks_whether_a_ledger_is_held_keeps_nobody_from_opening_it(three, monkeypatch):
    with three.open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as `is_held` does, for a moment

        def wait(seconds):
            fcntl.flock(asking, fcntl.LOCK_UN)

        monkeypatch.setattr(ledger_lib, "time", SimpleNamespace(sleep=wait))
        accounting.Ledger.open(three).close()


def test_with_allocation_no_round_is_left_out(path):
    """ε counts blocks of rounds, which rounds that are left out would hide."""
    by_allocation = {"accountant": "blanket", "participation": "allocation"}
    plan = PLAN.replace(**by_allocation, shuffler_blankets=1000.0, target_epsilon=100.0)
    with accounting.Ledger.create(path, plan, "run-1") as ledger:
        ledger.append_round(1)
        with pytest.raises(ValueError, match=r"round must be 2, the next one, .* got 11"):
            ledger.append_round(11)


def test_a_line_torn_at_any_byte_counts_as_spent_and_is_repaired(three):
    whole = three.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        three.write_bytes(whole[:cut])
        content = accounting.Ledger.read(three)
        assert len(content.entries) == 3
        assert content.entries[2].interrupted
        assert three.read_bytes() == whole[:cut]  # reading changes nothing
        with accounting.Ledger.open(three) as ledger:
            assert len(ledger.entries) == 3
            ledger.append_round(ledger.last_round + 1)
        repaired = accounting.Ledger.read(three)
        assert len(repaired.entries) == 4
        assert [e.interrupted for e in repaired.entries] == [False, False, True, False]


@pytest.mark.parametrize("garbage", [b"\0" * 40, b'{"round":\r\n', b"\r\r\r", b"[1]", b"\xff\xfe"])
def test_garbage_at_the_end_counts_as_one_spent_round(three, garbage):
    three.write_bytes(three.read_bytes() + garbage)
    assert len(accounting.Ledger.read(three).entries) == 4
    with accounting.Ledger.open(three) as ledger:
        assert ledger.last_round == 6
    assert len(accounting.Ledger.read(three).entries) == 4


def test_damage_elsewhere_is_refused_in_one_line(three):
    lines = three.read_bytes().splitlines(keepends=True)
    damaged = {
        2: lines[1].replace(b'"round":1', b'"round":9'),
        3: lines[2].replace(b'"reports":99', b'"reports":9'),
    }
    for number, line in damaged.items():
        assert line != lines[number - 1]
        three.write_bytes(b"".join([*lines[: number - 1], line, *lines[number:]]))
        for attempt in (accounting.Ledger.read, accounting.Ledger.open):
            with pytest.raises(accounting.LedgerError, match=f"damaged at line {number}") as error:
                attempt(three)
            assert "\n" not in str(error.value)
    three.write_bytes(b"".join([lines[0], *lines[2:]]))  # a round taken out
    with pytest.raises(accounting.LedgerError, match="damaged at line 2"):
        accounting.Ledger.read(three)


def test_a_repair_that_fails_leaves_the_round_counted(three, monkeypatch):
    three.write_bytes(three.read_bytes()[:-40])
    write = os.write

    def short(descriptor, data):
        if len(data) < 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:30])

    with monkeypatch.context() as patch:
        patch.setattr(ledger_lib.os, "write", short)
        with pytest.raises(accounting.LedgerError, match="No space left"):
            accounting.Ledger.open(three)
    assert len(accounting.Ledger.read(three).entries) == 3
    with accounting.Ledger.open(three) as ledger:
        assert len(ledger.entries) == 3


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"format":2', b"hello\n"])
def test_a_file_without_a_first_line_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(accounting.LedgerError, match="no readable first line"):
        accounting.Ledger.read(path)


def test_the_line_is_synced_before_append_returns(path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        real(descriptor)
        synced.append(path.read_bytes().count(b"\n"))

    monkeypatch.setattr(ledger_lib.os, "fsync", fsync)
    ledger = accounting.Ledger.create(path, PLAN, "run")
    assert synced == [1, 1]  # the file, then its directory
    ledger.append_round(1)
    assert synced == [1, 1, 2]


def test_a_disk_that_fills_up_keeps_nothing_of_the_line(three):
    before = three.read_bytes()
    ledger = accounting.Ledger.open(three)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # a real short write, then a real error: the file may grow by 20 bytes only
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        with pytest.raises(accounting.LedgerError, match=r"cannot record round 6 .* halt"):
            ledger.append_round(6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert three.read_bytes() == before
    assert ledger.last_round == 5
    with pytest.raises(accounting.LedgerError, match="takes no more rounds"):
        ledger.append_round(6)
    ledger.close()
    with accounting.Ledger.open(three) as again:
        again.append_round(6)


def test_a_failed_sync_is_not_believed(three, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    ledger = accounting.Ledger.open(three)
    monkeypatch.setattr(ledger_lib.os, "fsync", fail)
    with pytest.raises(accounting.LedgerError, match="may be on disk and will count as spent"):
        ledger.append_round(6)
    assert ledger.last_round == 5


KILLED = textwrap.dedent(
    """
    import sys
    from shufl import accounting
    path, acknowledge = sys.argv[1], open(sys.argv[2], "ab", buffering=0)
    try:
        ledger = accounting.Ledger.open(path)
    except accounting.LedgerError:
        plan = accounting.PrivacyPlan.from_json(sys.argv[3])
        ledger = accounting.Ledger.create(path, plan, "killed")
    while True:
        number = ledger.last_round + 1
        ledger.append_round(number, {"padding": "x" * 20000})
        acknowledge.write(b"%d\\n" % number)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, *by_night(3)])
def test_kill_9_while_appending_loses_no_acknowledged_round(path, tmp_path, kills):
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    for attempt in range(kills):
        before = len(acknowledged.read_text().split())
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), str(acknowledged), PLAN.to_json()]
        )
        while len(acknowledged.read_text().split()) < before + 20 + 7 * attempt:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rounds = [int(word) for word in acknowledged.read_text().split()]
        content = accounting.Ledger.read(path)
        spent = [entry.round for entry in content.entries]
        assert spent == list(range(1, len(spent) + 1))
        assert set(rounds) <= set(spent)
        assert len(spent) <= rounds[-1] + 1
    with accounting.Ledger.open(path) as ledger:
        ledger.append_round(len(spent) + 1)
