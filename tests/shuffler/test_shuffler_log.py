"""The log file: what is in it, how large it gets; and SIGHUP, which reopens it and never kills."""

import json
import logging
import os
import signal
import threading
import time

import pytest

from run_world import LIMIT, wait_until
from shuffler_world import listening, plan, shuffler_of, tls_section
from shufl.shuffler import ControlClient
from shufl.shuffler.callers import Role
from shufl.shuffler.service.log import LINES_PER_MINUTE, Log

PLACES = 'directory = "directory"\nlog_file = "log"\n'


def events(log):
    if not log.exists():
        return []
    return [json.loads(line)["event"] for line in log.read_text().splitlines()]


def wait_for(log, event, times=1):
    def is_there():
        return sum(said.startswith(event) for said in events(log)) >= times

    wait_until(is_there, LIMIT, event)


@pytest.mark.slow
def test_a_hail_of_sighup_from_its_start_to_its_end_does_not_kill(tmp_path):
    """Without a list of withdrawn credentials. The start waits for us: its configuration is a
    pipe."""
    config = tmp_path / "shuffler.toml"
    os.mkfifo(config)
    _, tls = tls_section(tmp_path / "tls")
    with shuffler_of(config) as child:
        with config.open("w") as pipe:  # it is open when the other end is
            hail = threading.Thread(target=keep_signalling, args=(child,))
            hail.start()
            pipe.write(PLACES + tls)
        listening(child)
        child.terminate()
        hail.join()
        assert child.returncode == 0
    written = [said for said in events(tmp_path / "log") if said.startswith("shuffler")]
    assert written == ["shuffler started", "shuffler stopping", "shuffler stopped"]


def keep_signalling(child):
    while child.poll() is None:
        child.send_signal(signal.SIGHUP)
        time.sleep(0.001)


@pytest.mark.slow
def test_the_first_line_says_what_was_started_and_a_log_moved_away_is_begun_again(start, tmp_path):
    log, moved = tmp_path / "log", tmp_path / "moved"
    world = start(log_file=log, simulation_seed=4711, limits={"uploads": 7})
    text = log.read_text()
    started = json.loads(text)
    assert started["event"] == "shuffler started"
    assert started["address"] == world.process.address
    assert started["version"]
    assert started["configuration"]["limits"]["uploads"] == 7
    assert started["configuration"]["tls"]["key"].endswith("shuffler.key")
    assert "4711" not in text and "PRIVATE" not in text

    log.rename(moved)
    world.control.create_run("before", plan(), 64)
    wait_for(moved, "run created")
    os.kill(world.process.pid, signal.SIGHUP)
    wait_until(log.exists, LIMIT, "another log")
    world.control.create_run("after", plan(), 64)
    wait_for(log, "run created")
    assert events(moved) == ["shuffler started", "run created"]
    # A place where no file can be made: the one before stays.
    log.unlink()
    log.mkdir()
    os.kill(world.process.pid, signal.SIGHUP)
    world.control.end_run("after")
    assert world.process.alive


@pytest.mark.slow
def test_log_files_are_rotated_and_the_oldest_dropped(tmp_path):
    config = tmp_path / "shuffler.toml"
    authority, tls = tls_section(tmp_path / "tls")
    config.write_text(f"{PLACES}log_megabytes = 0.002\nlog_kept = 2\n{tls}")
    server = authority.issue(Role.SERVER, "server")
    with shuffler_of(config) as child:
        with ControlClient(listening(child), server) as control:
            for number in range(LINES_PER_MINUTE - 1):
                control.create_run(f"run {number}", plan(), 64)
                control.end_run(f"run {number}")
        child.terminate()
        assert child.wait() == 0
    files = sorted(tmp_path.glob("log*"))
    assert [path.name for path in files] == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 2000 for path in files)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert events(files[0])[-1] == "shuffler stopped"


def test_the_next_minute_has_room_for_more_lines_of_a_kind(tmp_path, command):
    """`command` puts the logger back."""
    log, logger = Log(tmp_path / "log", 1, 1), logging.getLogger("shufl.shuffler")
    for _ in range(2):
        for number in range(LINES_PER_MINUTE + 5):
            logger.info("a kind, %d", number)
        logger.info("another kind")
        log.next_minute()
    written = events(tmp_path / "log")
    kind = [f"a kind, {number}" for number in range(LINES_PER_MINUTE)]
    assert written == [*kind, "another kind", "lines left out"] * 2
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    left_out = [(line["line"], line["left_out"]) for line in lines if "line" in line]
    assert left_out == [("a kind, %d", 5)] * 2
