"""A file is written whole or not at all, whatever ends its writer."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shufl.protocol.files import unfinished, whole_file, write_whole
from tiny_disk import fill, tiny_disk_at


def test_a_file_has_all_of_its_parts_and_its_mode_and_nothing_is_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o644)
    write_whole(path, b"new", memoryview(b" parts"), mode=0o600)
    assert path.read_bytes() == b"new parts" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_where_the_writer_fails(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_by_the_file_s_own_name(tmp_path):
    with tiny_disk_at(tmp_path / "disk") as disk:
        path = disk / "a.txt"
        write_whole(path, b"old")
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left on device") as failed:
            write_whole(path, bytes(10**6))
        assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(path))
        assert path.read_bytes() == b"old" and {*disk.iterdir()} == {path, filler}


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as failed, whole_file(tmp_path / "a.txt"):
        (tmp_path / "missing").read_bytes()
    assert Path(failed.value.filename) == tmp_path / "missing"


@pytest.mark.parametrize("there", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_file_that_must_be_new_replaces_nothing(tmp_path, there):
    path = tmp_path / "a.key"
    there(path)
    before = path.lstat()
    with pytest.raises(FileExistsError) as refused:
        write_whole(path, b"a key", must_be_new=True)
    assert refused.value.filename == str(path)
    assert path.lstat() == before and list(tmp_path.iterdir()) == [path]


def test_what_is_written_by_a_killed_process_is_no_file_and_stops_no_other(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, b"old")
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from shufl.protocol.files import whole_file\n"
        "with whole_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, path])
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old" and unfinished(path).read_bytes() == b"half"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_written_through(tmp_path):
    path, other = tmp_path / "a.txt", tmp_path / "other"
    for link in (os.symlink, os.link):
        other.write_text("of somebody else")
        link(other, unfinished(path))
        write_whole(path, b"new")
        assert other.read_text() == "of somebody else" and path.read_bytes() == b"new"


def test_two_processes_may_write_a_shared_file_at_once(tmp_path):
    path = tmp_path / "cache"
    program = (
        "import sys; from pathlib import Path\n"
        "from shufl.protocol.files import whole_file\n"
        "with whole_file(Path(sys.argv[1]), shared=True) as file:\n"
        "    file.write(b'theirs')\n"
    )
    with whole_file(path, shared=True) as file:
        subprocess.run([sys.executable, "-c", program, path], check=True)
        assert path.read_bytes() == b"theirs"
        file.write(b"ours")
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]
