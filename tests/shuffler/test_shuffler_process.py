"""Starting and stopping: the command, its refusals, TLS, and the child process."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from run_world import LIMIT, running, wait_until
from shuffler_world import tls_section
from shufl.cli.__main__ import main
from shufl.shuffler import ShufflerProcess, ShufflerUnavailable
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.channel import parse_address

ROOT = Path(__file__).parents[2]
DIRECTORY = 'directory = "directory"\n'  # in that of the configuration
TLS = '[tls]\ncertificate = "/no"\nkey = "/no"\nauthority = "/no"\n'


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('metrics = "0.0.0.0:0"', "metrics only on a loopback address"),
        ('listen = "127.0.0.1"', "an address is HOST:PORT"),
        ('listen = "127.0.0.1:70000"', "an address is HOST:PORT"),
        ("", "directory is missing"),
        ('spool = "spool"', "unknown key spool"),
        ('directory = "/proc/nowhere"', "/proc/nowhere"),
        ('directory = "/dev/null"', "/dev/null"),
        (DIRECTORY + 'log_file = "/nowhere/log"', "/nowhere/log"),
        ("directry = 3", "unknown key directry; did you mean directory? allowed: listen"),
        (
            "[limits]\nuplods = 1",
            "unknown key limits.uplods; did you mean uploads? allowed: users, ",
        ),
        ("[limits]\nidle_seconds = 1e10", "limits.idle_seconds must be"),
        ("[limits]\nidle_seconds = nan", "must be a number in (0, 10^9], got nan"),
        ("[limits]\nuploads = 0", "limits.uploads must be a whole number from"),
        ("limits = 3", "limits must be a table of values, got 3"),
        ("[limits]\nreports_per_second = 9", "unknown key limits.reports_per_second; "),
        ("[limits]\nstreams = 0", "limits.uploads must be a whole number from"),  # as 0.1.0 has it
        ("[limits]\nstreams = 3\nuploads = 4", "unknown key limits.streams; "),
        ("[limits]\nrelease_hours = 0", "limits.release_hours must be a number in (0, 10^4], got"),
        (DIRECTORY + "simulation_seed = 3", "simulation_seed is for a simulation's own shuffler"),
        ("simulation_seed = -1", "must be a whole number in [0, 2^63), got -1"),
        ("log_file = 3", "log_file must be the path of a file, got 3"),
        ("directory = " + "[" * 5000, "is not valid TOML: it is nested too deeply"),
        ("listen = yes", "is not valid TOML"),
        (DIRECTORY + "plaintext = true", "unknown key plaintext"),
    ],
)
def test_bad_input_is_one_line(command, config, words):
    assert words in refused(command, config)


@pytest.mark.parametrize(
    ("tls", "words"),
    [("", "tls is missing"), (TLS, "No such file"), ("[tls]", "tls.certificate is missing")],
)
def test_without_its_files_for_tls_it_does_not_start(command, tls, words):
    assert words in refused(command, DIRECTORY + tls, tls=False)


def refused(command, config, **options):
    """The one line of a command that does not start."""
    done = command(config, **options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("arguments", [["--config", "/nowhere.toml"], [], ["--bogus"]])
def test_a_configuration_that_is_not_there_and_an_unknown_option_are_one_line(
    monkeypatch, capsys, arguments
):
    monkeypatch.setattr(sys, "argv", ["shufl", "shuffler", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_taken_port_is_refused(here, command):
    address = here().process.address
    words = f"cannot listen on {address}: Address already in use"
    line = refused(command, f'{DIRECTORY}listen = "{address}"')
    assert line.startswith(f"error: {words}")
    assert refused(command, f'{DIRECTORY}metrics = "{address}"') == f"error: metrics: {words}"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("client", "own.pem: not a shuffler's certificate (no serverAuth)"),
        ("expired", "own.pem: valid from"),
        ("authority", "own.pem: not issued by"),
        ("itself", "authority.pem: not a certificate in PEM"),
        ("mode", "own.key: others than its owner may use it"),
        ("key", "own.key: not the key of"),
    ],
)
def test_tls_files_that_no_client_would_accept_are_refused(command, tmp_path, wrong, words):
    authority, shuffler = Authority.create(), (Role.SHUFFLER, "own")
    issued = authority.issue(*shuffler, hosts=["a"], days=-1 if wrong == "expired" else 1)
    if wrong == "client":
        issued = authority.issue(Role.SERVER, "own")
    issued.write(tmp_path, "own")
    match wrong:
        case "authority":
            (tmp_path / "authority.pem").write_bytes(Authority.create().certificate)
        case "itself":
            (tmp_path / "authority.pem").write_bytes(b"nothing")
        case "mode":
            (tmp_path / "own.key").chmod(0o640)
        case "key":
            another = authority.issue(*shuffler, hosts=["a"])
            (tmp_path / "own.key").write_bytes(another.private_key)
    tls = '[tls]\ncertificate = "own.pem"\nkey = "own.key"\nauthority = "authority.pem"'
    assert words in refused(command, DIRECTORY + tls, tls=False)


@pytest.mark.slow
def test_it_prints_one_line_and_stops_at_ctrl_c(tmp_path):
    """As it does at SIGTERM: `test_shuffler_docs.py` and `test_shuffler_log.py` have that."""
    config = tmp_path / "shuffler.toml"
    config.write_text(DIRECTORY + tls_section(tmp_path / "tls")[1])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "shufl.cli", "shuffler", "--config", str(config)],
        env={**os.environ, "TMPDIR": str(scratch)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = child.stdout.readline()
    assert line.startswith("shuffler listening on 127.0.0.1:")
    assert not list(scratch.iterdir())
    assert (tmp_path / "directory" / "record.jsonl").exists()
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=LIMIT)
    assert (child.returncode, output) == (0, "")
    said = [json.loads(line)["event"] for line in errors.splitlines()]
    assert said == ["shuffler started", "shuffler stopping", "shuffler stopped"]


@pytest.mark.slow
def test_a_temporary_directory_goes_at_the_end_also_where_the_child_ignores_sigterm(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ShufflerProcess() as process:
        process.stop_timeout = 0.1
        assert list(tmp_path.glob("shufl-*/shufl-*/record.jsonl"))
        os.kill(process.pid, signal.SIGSTOP)
    assert not process.alive
    assert not list(tmp_path.iterdir())


def test_only_what_is_certain_to_be_loopback_counts_as_loopback():
    """Asked of the check itself, so that no test opens a port to the network."""
    hosts = ("127.0.0.1", "127.9.9.9", "[::1]", "localhost")
    assert all(parse_address(f"{host}:1")[2] for host in hosts)
    strangers = ("0.0.0.0", "[::]", "10.1.2.3", "localhost.example", "127.0.0.1.example")
    assert not any(parse_address(f"{host}:1")[2] for host in strangers)


@pytest.mark.slow
def test_the_child_is_found_from_any_directory_and_ends_with_the_block(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with ShufflerProcess(Path("directory")) as process:
        assert process.alive
        assert (tmp_path / "directory" / "record.jsonl").exists()
        with socket.create_connection(("127.0.0.1", int(process.address.rpartition(":")[2]))):
            pass
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"PRIVATE" not in arguments
    assert not process.alive


@pytest.mark.slow
def test_a_child_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(ShufflerUnavailable, match=r"exit code 2: error: .*metrics only on"),
        ShufflerProcess(metrics="0.0.0.0:0"),
    ):
        pass


@pytest.mark.slow
def test_when_its_parent_is_killed_the_shuffler_ends_and_takes_its_directory_along(tmp_path):
    script = (
        "import time; from shufl.shuffler import ShufflerProcess\n"
        "with ShufflerProcess() as process:\n"
        "    print(process.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
    )
    child = int(parent.stdout.readline())
    assert list(tmp_path.rglob("record.jsonl"))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not running(child), LIMIT, "its end")
    assert not list(tmp_path.rglob("record.jsonl"))
