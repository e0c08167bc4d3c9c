"""Fixtures: shuffler processes and a tiny disk."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from shuffler_world import here, restored_log, shared, start, tls_section  # noqa: F401
from shufl.cli.__main__ import main
from tiny_disk import in_memory, tiny_disk_at


@pytest.fixture(scope="module", autouse=True)
def temporary_directories_in_memory():
    """Where there is such a place: nothing here needs a disk but what is under `tmp_path`."""
    before = tempfile.tempdir
    if (memory := in_memory()) is not None:
        tempfile.tempdir = str(memory)
    yield
    tempfile.tempdir = before


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `shufl shuffler` in this process, where it ends by itself: with this content of its
    configuration, which lies in `tmp_path`, and with TLS unless it says otherwise."""
    own = tls_section(tmp_path / "tls")[1]
    mask, hang_up = os.umask(0o077), signal.getsignal(signal.SIGHUP)

    def run(config, *arguments, tls=True):
        file = tmp_path / "shuffler.toml"
        file.write_text(f"{config}\n{own if tls else ''}", encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["shufl", "shuffler", "--config", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    with restored_log():
        yield run
    os.umask(mask)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB."""
    with tiny_disk_at(tmp_path / "tiny") as place:
        yield place
