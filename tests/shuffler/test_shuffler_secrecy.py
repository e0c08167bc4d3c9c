"""The shuffler never holds a plaintext or keeps a batch; a server keeps no key that it dropped."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shuffler_world import open_batches
from shufl.shuffler import seal, sealed_length

MARKER = b"the plaintext marker that must stay sealed"


def memory_holds(pid, needle):
    """Whether a writable region of the process's memory contains the bytes."""
    regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for region in regions:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", region)
            if match is None:
                continue
            start, end = (int(bound, 16) for bound in match.groups())
            try:
                memory.seek(start)
                if needle in memory.read(end - start):
                    return True
            except OSError:  # a region of a device
                continue
    return False


def disk_holds(world, directory, needle):
    """Whether a file there contains the bytes, or one without a name that the process has."""
    named = [path for path in directory.rglob("*") if path.is_file()]
    files = list(Path(f"/proc/{world.process.pid}/fd").iterdir())
    unnamed = [path for path in files if str(directory) in str(path.readlink())]
    assert len(unnamed) > len(named)
    return any(needle in path.read_bytes() for path in [*named, *unnamed])


@pytest.mark.slow
def test_no_plaintext_reaches_the_shuffler_and_nothing_stays_after_a_release(start, tmp_path):
    if not os.access("/proc/self/mem", os.R_OK):
        pytest.skip("process memory cannot be read here")
    place, log = tmp_path / "directory", tmp_path / "log"
    world = start(place, log_file=log)
    pid = world.process.pid
    header = world.begin(report_bytes=sealed_length(len(MARKER) * 20), users=30)
    reports = [(user, seal(MARKER * 20, world.public_key, header)) for user in range(30)]
    world.submit(header, reports)
    _, sealed = reports[-1]
    part = sealed[40:200]

    # The searches find what is there …
    assert memory_holds("self", MARKER)
    assert memory_holds(pid, part)
    assert disk_holds(world, place, header.commitment.encode())
    # … and the plaintext is not, nor is any sealed report on the disk.
    assert not memory_holds(pid, MARKER)
    assert not disk_holds(world, place, MARKER)
    assert not any(disk_holds(world, place, sealed[40:200]) for _, sealed in reports)
    assert not memory_holds(pid, world.private_key.private_bytes_raw())

    assert len(world.released(header)) == 30
    assert not memory_holds(pid, MARKER)
    world.control.end_round("run", 1)
    assert open_batches(world) == 0

    text = log.read_text()
    assert "batch released" in text
    assert MARKER.decode() not in text
    assert all(json.loads(line)["event"] for line in text.splitlines())


HOLDS_A_KEY = """
import ctypes, os, sys
from types import SimpleNamespace
from unittest import mock
from shufl.shuffler import ReportOpener, RoundHeader, generate_key_pair, seal
from shufl.shuffler.wire import sealing

def telling(kind):
    def generate():
        key = kind.generate()
        secret = key.private_bytes_raw()
        os.write(1, secret)
        ctypes.memset(id(secret) + bytes.__basicsize__ - 1, 0, len(secret))
        return key
    return SimpleNamespace(generate=generate)

kinds = "X25519PrivateKey", "MLKEM768PrivateKey"
with mock.patch.multiple(sealing, **{name: telling(getattr(sealing, name)) for name in kinds}):
    key, public = generate_key_pair(sys.argv[1])
header = RoundHeader("r", 1, "m", "d", "k")
assert ReportOpener(key).open(seal(b"x", public, header), header) == b"x"
print("held", flush=True)
sys.stdin.readline()
del key
print("gone", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "lengths"), [("x25519", [32]), ("mlkem768-x25519", [32, 64])])
def test_a_dropped_private_key_is_nowhere_in_memory(suite, lengths):
    """Its parts are found while it is held, and not afterwards."""
    command = [sys.executable, "-c", HOLDS_A_KEY, suite]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        parts = [child.stdout.read(length) for length in lengths]
        assert child.stdout.readline() == b"held\n"
        assert memory_holds(child.pid, parts[0])
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"gone\n"
        assert not any(memory_holds(child.pid, part) for part in parts)
