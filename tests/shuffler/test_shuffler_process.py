"""Starting and stopping: the command, its refusals, TLS, and the child process."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from shuffler_world import PAYLOAD_BYTES, World, plan
from typer.testing import CliRunner

from shuffler import (
    ControlClient,
    IntakeClient,
    RoundHeader,
    ShufflerProcess,
    ShufflerUnavailable,
    Verdict,
    sealed_length,
)
from shuffler.channel import parse_address
from shuffler.cli import shuffler_command

ROOT = Path(__file__).parents[2]
TOKEN = "t" * 32


def command(
    *arguments: str, token: str = TOKEN, timeout: float = 20
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "shuffler", *arguments],
        env={**os.environ, "SHUFL_CONTROL_TOKEN": token},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    paths = directory / f"{name}.crt", directory / f"{name}.key"
    paths[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        ([], "t" * 31, "SHUFL_CONTROL_TOKEN must hold a token of at least 32 characters"),
        ([], "é" * 32, "the control token must be printable ASCII"),
        (["--listen", "0.0.0.0:0"], TOKEN, "plaintext only on a loopback address: 0.0.0.0:0"),
        (["--listen", "[::]:0"], TOKEN, "plaintext only on a loopback address"),
        (["--listen", "somewhere.example:0"], TOKEN, "plaintext only on a loopback address"),
        (["--listen", "127.0.0.1"], TOKEN, "an address is HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], TOKEN, "an address is HOST:PORT"),
        (["--tls-key", "key.pem"], TOKEN, "--tls-certificate and --tls-key go together"),
        (["--tls-key", "/no", "--tls-certificate", "/no"], TOKEN, "No such file"),
        (["--spool", "/proc/nowhere"], TOKEN, "/proc/nowhere"),
        (["--log-file", "/nowhere/log"], TOKEN, "/nowhere/log"),
        (["--listen", "127.0.0.1:1", "--spool", "/dev/null"], TOKEN, "/dev/null"),
        (["--bogus"], TOKEN, "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], token: str, words: str):
    done = command(*arguments, token=token)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_taken_port_and_a_taken_spool_are_refused(start: Callable[..., World], tmp_path: Path):
    world = start(tmp_path / "spool")
    taken = command("--listen", world.process.address)
    assert taken.returncode == 2
    assert len(taken.stderr.splitlines()) == 1
    assert f"can not listen on {world.process.address}: Address already in use" in taken.stderr
    shared = command("--spool", str(tmp_path / "spool"))
    assert shared.returncode == 2
    assert "in use by another shuffler" in shared.stderr


def test_a_certificate_that_does_not_fit_its_key_is_refused(tmp_path: Path):
    chain, _ = certificate(tmp_path, "one")
    _, key = certificate(tmp_path, "two")
    done = command("--tls-certificate", str(chain), "--tls-key", str(key))
    assert done.returncode == 2
    assert "TLS certificate and key do not fit: KEY_VALUES_MISMATCH" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_one_line_starts_quickly_and_stops_on_a_signal(number: int, tmp_path: Path):
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "shuffler"],
        env={**os.environ, "SHUFL_CONTROL_TOKEN": TOKEN, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    assert time.monotonic() - begun < 5
    assert line.startswith("shuffler listening on 127.0.0.1:")
    assert list(tmp_path.iterdir())
    child.send_signal(number)
    output, errors = child.communicate(timeout=10)
    assert (child.returncode, output, errors) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_the_command_can_be_mounted_in_another_application():
    app = typer.Typer()
    app.command("shuffler")(shuffler_command)
    app.command("other")(lambda: None)
    shown = CliRunner().invoke(app, ["shuffler", "--help"])
    assert shown.exit_code == 0
    assert "shuffler" in shown.output
    refused = CliRunner().invoke(app, ["shuffler", "--listen", "0.0.0.0:0"], env={})
    assert refused.exit_code == 2


def test_tls_works_with_the_right_authority_only(start: Callable[..., World], tmp_path: Path):
    chain, key = certificate(tmp_path, "right")
    other, _ = certificate(tmp_path, "wrong")
    process = start(tls_certificate=chain, tls_key=key).process
    with (
        ControlClient(process.address, process.control_token, chain.read_bytes()) as control,
        IntakeClient(process.address, chain.read_bytes()) as intake,
    ):
        length = sealed_length(PAYLOAD_BYTES)
        digest = control.create_run("run", plan(), length)
        control.open_round("run", 1, "m")
        header = RoundHeader("run", 1, "m", digest)
        assert list(intake.submit(header, [(0, bytes(length))])) == [Verdict.ACCEPTED]
        for trusted in (other.read_bytes(), None):
            with (
                IntakeClient(process.address, trusted, timeout=5) as stranger,
                pytest.raises(ShufflerUnavailable),
            ):
                list(stranger.submit(header, [(1, bytes(length))]))
        control.close_round("run", 1)
        assert list(control.release("run", 1)) == [bytes(length)]


def test_only_what_is_certain_to_be_loopback_counts_as_loopback():
    """Asked of the check itself, so that no test opens a port to the network."""
    hosts = ("127.0.0.1", "127.9.9.9", "[::1]", "localhost")
    assert all(parse_address(f"{host}:1")[2] for host in hosts)
    strangers = ("0.0.0.0", "[::]", "10.1.2.3", "localhost.example", "127.0.0.1.example")
    assert not any(parse_address(f"{host}:1")[2] for host in strangers)


def test_the_child_is_found_from_any_directory_and_ends_with_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with ShufflerProcess(Path("spool")) as process:
        assert process.alive
        assert (tmp_path / "spool" / "runs.db").exists()
        with socket.create_connection(("127.0.0.1", int(process.address.rpartition(":")[2])), 5):
            pass
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert process.control_token.encode() not in arguments
    assert not process.alive


def test_a_child_that_does_not_start_says_why(tmp_path: Path):
    with (
        pytest.raises(ShufflerUnavailable, match=r"exit code 2: shuffler: plaintext only on"),
        ShufflerProcess(listen="0.0.0.0:0"),
    ):
        pass


def test_a_child_that_ignores_sigterm_is_killed():
    with ShufflerProcess(stop_timeout=0.5) as process:
        os.kill(process.pid, signal.SIGSTOP)
    assert not process.alive


def test_importing_the_package_does_not_load_the_service():
    code = (
        "import sys, shuffler; "
        "print([m for m in sys.modules if m in "
        "('shuffler.service', 'shuffler.runs', 'sqlite3', 'typer', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
