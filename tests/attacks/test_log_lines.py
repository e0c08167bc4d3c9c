"""What other parties say stays on its line of a log, and reaches no terminal as an escape code."""

import json
import logging

import pytest

from shufl.protocol import hash_chain
from shufl.protocol.text import logs_to
from shufl.server.broadcast import _reason
from shufl.server.connected_nodes import read_node
from shufl.shuffler.public_record import verify

HOSTILE = "x\n2026-11-25 12:00:00,000 INFO forged\r\x1b[2J\x7f\x9b2J\u202e\u2028\ud800forged\x00"


def said(path, tell):
    """The lines of a log, to which `tell` has written."""
    with logs_to(path, "a test"):
        tell(logging.getLogger("a test"))
    with path.open(encoding="utf-8", newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")


def test_an_event_is_one_printable_line_of_a_limited_length(tmp_path):
    lines = said(tmp_path / "log", lambda log: log.warning("node %s: %s", HOSTILE, "é" * 10**6))
    assert len(lines) == 1
    assert lines[0].isprintable() and len(lines[0]) < 10_000
    assert "x\\n2026-11-25 12:00:00,000 INFO forged\\r\\x1b[2J\\x7f\\x9b2J\\u202e" in lines[0]
    assert lines[0].endswith("é")


def test_a_traceback_is_indented_so_that_no_line_of_it_looks_like_an_event(tmp_path):
    def tell(log):
        try:
            raise ValueError(HOSTILE)
        except ValueError as error:
            cause = error
        try:
            raise RuntimeError(HOSTILE + "e" * 10**6) from cause
        except RuntimeError:
            log.exception(HOSTILE)

    event, *traceback = said(tmp_path / "log", tell)
    assert " ERROR x\\n2026" in event
    assert "    Traceback (most recent call last):" in traceback
    assert any(line.startswith("    2026-11-25 12:00:00,000 INFO forged") for line in traceback)
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)
    assert sum(map(len, traceback)) < 10_000


def test_a_node_cannot_make_the_servers_log_long():
    with pytest.raises(ValueError, match="must say for how many users") as error:
        read_node({"number": HOSTILE, "users": "u" * 10**7, HOSTILE: [1] * 10**6}, 1, "sum")
    assert str(error.value).isprintable() and len(str(error.value)) < 400
    assert _reason(HOSTILE + "m" * 10**7).isprintable()
    assert len(_reason("m " * 10**7)) <= 300


def test_a_run_of_any_name_is_one_line_of_ascii_in_the_shufflers_log(here, tmp_path):
    name = HOSTILE.replace("\ud800", "")  # which is no text that gRPC sends
    world = here(log_file=tmp_path / "log")
    world.begin(run_id=name)
    content = (tmp_path / "log").read_bytes()
    assert all(byte == 10 or 32 <= byte < 127 for byte in content)
    lines = [json.loads(line) for line in content.split(b"\n")[:-1]]
    assert next(line["event"] for line in lines if line.get("run") == name) == "run created"


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.replace(",", ",\n", 1),
        lambda entry: entry.replace("a run", "a \x9b2J"),
        lambda entry: entry.replace("a run", "a \u202erun"),
        lambda entry: entry.replace("{", '{"run":"\x7f",', 1),
        lambda entry: f" {entry}",
    ],
)
def test_an_entry_of_a_record_is_one_line_of_ascii(change):
    about = {"run": "a run", "round": 1, "event": "opened", "commitment": "c"}
    entry = hash_chain.encode(about, hash_chain.START)[0].decode()[:-1]
    assert verify([entry])[0]["run"] == "a run"
    with pytest.raises(ValueError, match="line 1 of the record is damaged"):
        verify([change(entry)])
