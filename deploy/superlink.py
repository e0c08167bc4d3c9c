"""What the server's operator asks of Flower's SuperLink: `shufl register` and `shufl run --on`.

Flower numbers its nodes, and names none. The numbers of a SuperLink's nodes are in a file beside
its database, so that no node can pass for another, and whatever is said of a node names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shufl.accounting import Ledger
from shufl.deploy.deployment import PROGRAMS, flower_environment
from shufl.deploy.server_app import deployed_experiment
from shufl.deploy.server_site import (
    CONSOLE_FILE,
    FLOWER_FOLDER,
    OUTCOME_FILE,
    REGISTERED_FILE,
    STOP_FILE,
    Registered,
    ServerSite,
    append_log,
    flower_connection,
    read_json,
)
from shufl.deploy.site_files import load_site
from shufl.learning.config import Config
from shufl.learning.your_code import one_line
from shufl.protocol.files import write_whole
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed
from shufl.results.interrupts import interrupts
from shufl.results.run_folder import config_of, make_folder, read_rows
from shufl.server import MOST_IN_VAIN, RoundFailed
from shufl.shuffler.wire.channel import parse_address

# The Flower app: no code, but the names of two modules that are installed where they run.
_APP = Path(__file__).with_name("flower_app")
_POLL_SECONDS = 0.2
_BEGIN_SECONDS = 30.0  # from when Flower has said something last until a ServerApp holds the ledger
_LAST_WORDS_SECONDS = 2.0  # from when a ServerApp lets its ledger go until it tells its outcome
_LEAST_FREE = 2**16
_CONNECT_SECONDS = 2.0
_LISTEN_SECONDS = 60.0  # for a SuperLink that has just been started


def register(site_path: Path) -> Iterator[str]:
    """Registers the agreed nodes, unregisters all others, and yields a line for each.

    It may be run again at any time, also while a run goes on. `site_path` is the server's file.

    Raises:
        ConfigError: a file is missing or damaged.
        EngineFailed: Flower refuses; what was done before stays.
    """
    folder = site_path.absolute().parent
    site, (connection, address) = load_site(site_path, ServerSite), flower_connection(folder)
    if not _listens(address):
        yield f"waiting for the SuperLink at {address}"
        until = time.monotonic() + _LISTEN_SECONDS
        while not (reached := _listens(address)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if not reached:
            yield "it does not listen, or this account may not reach it (sudo -u shufl)"
    listed = _told(folder, "supernode", "list", connection)
    nodes = [each for each in listed["nodes"] if each["status"] != "unregistered"]
    there = {int(each["node-id"]) for each in nodes}
    known = {number: each for number, each in site.registered.items() if number in there}
    keys = {}  # SHA-256 of every node's key for Flower, by name; empty: it is not here
    paths = {each.name: Path(site.nodes).with_name(f"{each.name}.pub") for each in site.entries}
    for name, path in paths.items():
        keys[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
        if not keys[name]:
            yield f"waiting for {path}"

    def remember(did: str, name: str, number: int) -> str:
        told = {number: each._asdict() for number, each in known.items()}
        write_whole(folder / REGISTERED_FILE, json.dumps(told, indent=1).encode(), mode=0o600)
        append_log(folder, did, name=name, flower=number)
        return f"{did} {name}, number {number}"

    for number, each in list(known.items()):
        if keys.get(each.name) in ("", each.key):  # a node whose key is away stays as it is
            del keys[each.name]
            continue
        flwr(folder, "supernode", "unregister", str(number), connection)
        del known[number]
        yield remember("unregistered", each.name, number)
    for name, key in keys.items():
        if not key:
            continue
        try:
            told = _told(folder, "supernode", "register", str(paths[name]), connection)
        except EngineFailed as error:
            raise EngineFailed(
                f"{one_line(error)}. Flower does not take a key twice: make another on the node "
                "(shufl keys flower), or stop the SuperLink and move flower/superlink.db and "
                "flower/nodes.json away"
            ) from error
        number = int(told["node-id"])
        known[number] = Registered(name, key)
        yield remember("registered", name, number)


def _listens(address: str) -> bool:
    host, port, *_ = parse_address(address)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _told(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a command of Flower's tells as JSON; a failure is told there alone, with exit code 0.

    Raises:
        EngineFailed: it failed; with what it said.
    """
    told: dict[str, Any] = json.loads(flwr(folder, *arguments, "--format", "json"))
    if not told["success"]:
        said = one_line(RuntimeError(told["error-message"]))
        raise EngineFailed(f"flwr {' '.join(arguments)}: {said}")
    return told


def flwr(folder: Path, *arguments: str) -> str:
    """Runs a command of Flower's on the server, whose folder this is; returns what it printed.

    Raises:
        EngineFailed: it failed; with what it said.
        ModuleNotFoundError: Flower is not installed.
    """
    program = PROGRAMS / "flwr"
    if not program.exists():
        raise ModuleNotFoundError("flwr is not installed", name="flwr")
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder,
        env=flower_environment(folder / FLOWER_FOLDER),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EngineFailed(f"flwr {' '.join(arguments)}: {done.stdout} {done.stderr}".strip())
    return done.stdout


def run_on(connection: str, site_path: Path, config: Config, runs: Path) -> str:
    """Begins a run on a SuperLink, and shows it to its end; returns what stopped it.

    `connection` is the name, in Flower's configuration, of a SuperLink on this machine; `site_path`
    is the server's file.

    Raises:
        ConfigError: before any work.
        RoundFailed: the run ended early; its folder stays.
        EngineFailed: Flower did not take the run, or it was killed.
    """
    site = _site(site_path)
    folder = make_folder(runs, deployed_experiment(config, len(site.shufflers)))
    try:
        return _follow(connection, site_path, folder)
    except _NotTaken:
        if not (folder / "ledger.jsonl").exists():
            shutil.rmtree(folder)
        raise


def resume_on(connection: str, site_path: Path, folder: Path) -> str:
    """Goes on with an interrupted run, as a new run of Flower's, and shows it to its end.

    Returns, raises: as `run_on`.
    """
    _site(site_path)
    config_of(folder)
    return _follow(connection, site_path, folder.absolute())


def go_on(connection: str, site_path: Path, config: Config, runs: Path) -> str:
    """Goes on with the newest run of the configuration's name, or begins one if there is none.

    The run is looked for below `runs`. A run that is under way is shown to its end. If the run has
    ended, nothing is done, even if the configuration has changed: a second run needs another name.

    Returns, raises: as `run_on`; a ConfigError also where the run ended early by itself: to go on
    may cost ε in vain, so that somebody has to look first.
    """
    _site(site_path)
    name = re.compile(rf"{re.escape(config.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    begun = [path for path in runs.glob("*/config.toml") if name.fullmatch(path.parent.name)]
    if not begun:
        return run_on(connection, site_path, config, runs)
    folder = max(begun, key=lambda path: path.stat().st_mtime).parent.absolute()
    ledger = folder / "ledger.jsonl"
    _wait_for_server_app(folder)
    if not ledger.exists():
        return run_on(connection, site_path, config, runs)
    if Ledger.is_held(ledger):
        print(f"{folder} is under way", flush=True)
        return _follow(connection, site_path, folder, under_way=True)
    ended = _outcome(folder / OUTCOME_FILE, "")
    if "error" in ended:
        raise ConfigError(
            f"{folder} ended early: {ended['error']}. When that is mended, shufl run --resume "
            f"{folder} --on {connection} goes on with it"
        )
    if ended.get("stopped_by", "interrupt") != "interrupt":
        print(f"{folder} has ended: {ended['stopped_by']}; a further run needs another name")
        return ended["stopped_by"]
    entries, rows = Ledger.read(ledger).entries, read_rows(folder / "metrics.jsonl")
    released = {row["round"] for row in rows if row["outcome"] == RoundOutcome.RELEASED}
    if len(entries) >= MOST_IN_VAIN and not released & {
        entry.round for entry in entries[-MOST_IN_VAIN:]
    }:
        raise ConfigError(
            f"{folder}: {MOST_IN_VAIN} rounds in a row were spent in vain. When it is known why, "
            f"shufl run --resume {folder} --on {connection} goes on with it"
        )
    return _follow(connection, site_path, folder)


def _wait_for_server_app(folder: Path) -> None:
    """Waits until the run's ledger is held, if a ServerApp may be about to take it."""
    ledger, outcome, log = (folder / name for name in ("ledger.jsonl", OUTCOME_FILE, "flower.log"))
    if outcome.exists() or not log.exists():
        return
    until = log.stat().st_mtime + _BEGIN_SECONDS
    while not (ledger.exists() and Ledger.is_held(ledger)) and time.time() < until:
        time.sleep(_POLL_SECONDS)


def _site(path: Path) -> ServerSite:
    """The server's file, when all is there that it names."""
    site = load_site(path, ServerSite)
    _ = site.credentials, site.agreed
    return site


class _NotTaken(EngineFailed):
    """Flower refused the run, with its own words."""


def _follow(connection: str, site_path: Path, folder: Path, under_way: bool = False) -> str:
    """Hands a run over, unless it is under way, and shows it to its end."""
    outcome_file, stop_file = folder / OUTCOME_FILE, folder / STOP_FILE
    log_folder = site_path.absolute().parent
    append_log(log_folder, "shows" if under_way else "runs", run=str(folder))
    attempt = "" if under_way else secrets.token_hex(8)  # one before may still be ending
    if not under_way:
        for file in (outcome_file, stop_file):
            file.unlink(missing_ok=True)
    stop, log_file = threading.Event(), folder / "flower.log"
    with (
        log_file.open("ab") as log,
        (folder / CONSOLE_FILE).open("a+", encoding="utf-8") as shown,  # from its end on
        interrupts(stop),
    ):
        log_start = log.tell()
        process = None
        if not under_way:
            process = _submit(connection, site_path.absolute(), folder, attempt, log)

        def refusal() -> str:
            if process is None or (process.poll() or 0) <= 0:
                return ""
            return _refusal(log_file.read_bytes()[log_start:])

        def goes_on() -> bool:
            """Also where Flower's command has died alone: then the ServerApp holds the ledger."""
            if process is not None and process.poll() is None:
                return True
            return not refusal() and Ledger.is_held(folder / "ledger.jsonl")

        def show() -> None:
            try:
                print(shown.read(), end="", flush=True)
            except OSError:  # nobody looks any more: the run is not left alone
                stop.set()

        try:
            while goes_on() and not _outcome(outcome_file, attempt):
                show()
                if stop.is_set() and not stop_file.exists():
                    stop_file.touch()
                    with contextlib.suppress(OSError):  # the disk is full
                        append_log(log_folder, "stops", run=str(folder))
                time.sleep(_POLL_SECONDS)
        finally:
            if stop.is_set():
                stop_file.touch()
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
        if not refusal() and not _outcome(outcome_file, attempt):
            time.sleep(_LAST_WORDS_SECONDS)
        outcome = _outcome(outcome_file, attempt)
        show()
    if not outcome and (why := refusal()):
        raise _NotTaken(f"Flower did not take the run: {why}")
    if not outcome:
        full = shutil.disk_usage(folder).free < _LEAST_FREE  # so that no outcome could be written
        why = "the run's disk is full" if full else "the run was killed, or its SuperLink"
        raise EngineFailed(
            f"{why}; {folder}/flower.log says more. "
            f"shufl run --resume {folder} --on {connection} goes on with it"
        )
    if "error" in outcome:
        raise RoundFailed(outcome["error"])
    return outcome["stopped_by"]


def _submit(
    connection: str, site_path: Path, folder: Path, attempt: str, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts Flower's command, which hands the run over and then waits for its end."""
    home = site_path.parent / FLOWER_FOLDER
    if not home.is_dir():
        home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    given = {"site": str(site_path), "folder": str(folder), "attempt": attempt}
    about = " ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
    return subprocess.Popen(
        [str(PROGRAMS / "flwr"), "run", str(_APP), connection, "--stream", "-c", about],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=flower_environment(home),
        process_group=0,  # Ctrl-C ends the run in order, and not this process
    )


def _refusal(output: bytes) -> str:
    """Flower's reason, in one line, from the box that it draws round it; empty: it took the run."""
    said = output.decode(errors="replace")
    if "Successfully started run" in said:
        return ""
    lines = [line.strip("│ ") for line in said.splitlines() if line.startswith("│")]
    return " ".join(lines) or one_line(RuntimeError(said))


def _outcome(file: Path, attempt: str) -> dict[str, str]:
    """How an attempt ended ("": any attempt); empty: it has not ended, or left no outcome."""
    outcome: dict[str, str] = read_json(file, {})
    return outcome if attempt in ("", outcome.get("attempt")) else {}
