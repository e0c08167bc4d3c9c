"""A shuffler that changes what it said of a round, and a server that denies one."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from client_world import Round, reply_content
from shufl.cli.__main__ import app
from shufl.clients import load_device
from shufl.shuffler import ControlClient, ShufflerProcess
from shufl.shuffler.record import START, entry_hash, make_entry, verify
from shufl.shuffler.wire.record_client import RecordClient

OWNER = 'ledger = "device.db"\nmost_epsilon = 1e6\ndelta = 1e-5\naccountant = "local"\n'


def run(*arguments):
    return CliRunner().invoke(app, ["record", *map(str, arguments)])


@pytest.fixture
def recorded(tmp_path):
    """A round that was released, one that was not wanted, and the device that was offered one."""
    owner = tmp_path / "device.toml"
    owner.write_text(OWNER)
    with ShufflerProcess(tmp_path / "spool") as process:
        control = ControlClient(process.address, process.control)
        round = Round(
            process.address, process.submit, control, f"record-{process.pid}",
            ledger=lambda _: load_device(owner),
        ).open()  # fmt: skip
        reply_content(round.announce())
        assert len(round.released()) == 4
        control.open_round(round.header.run_id, 2, "another", round.public_key)
        control.close_round(round.header.run_id, 2, discard=True)
        control.end_run(round.header.run_id)
        yield process, round
        control.close()


def test_the_record_tells_what_became_of_every_round(recorded, tmp_path):
    process, round = recorded
    process.submit.write(tmp_path, "node")
    file = tmp_path / "record.jsonl"
    fetched = run("fetch", process.address, file, "--certificate", tmp_path / "node.pem")
    assert fetched.exit_code == 0, fetched.stderr
    entries = verify(file.read_text().splitlines())
    told = [(entry["round"], entry["event"], entry["reports"]) for entry in entries]
    assert told == [
        (1, "opened", None), (1, "released", 4), (2, "opened", None), (2, "discarded", None),
    ]  # fmt: skip
    assert {entry["plan"] for entry in entries} == {round.plan.digest()}
    assert [entry["commitment"] for entry in entries[:2]] == [round.header.commitment] * 2
    assert entries[-1]["hash"] in fetched.stdout
    head = entries[1]["hash"]
    good = run("verify", file, "--head", head, "--device", tmp_path / "device.toml")
    assert good.exit_code == 0, good.stderr
    assert "4 entries follow each other" in good.stdout


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"run": ["a"], "round": 1, "event": "opened", "commitment": ""},
        {"run": "a", "event": "opened", "commitment": ""},
        {"run": "a", "round": 1, "event": "opened"},
    ],
)
def test_an_entry_that_says_nothing_of_a_round_is_one_line(tmp_path, about):
    (tmp_path / "device.toml").write_text(OWNER)
    for entry in (make_entry(0, START, about), "[" * 100_000, "null"):
        (tmp_path / "record.jsonl").write_text(entry)
        found = run("verify", tmp_path / "record.jsonl", "--device", tmp_path / "device.toml")
        assert found.exit_code == 2 and len(found.stderr.splitlines()) == 1
        assert found.stderr.startswith("error: entry 0 of the record is damaged, or does not")


def test_a_record_that_was_changed_or_forked_is_found_out(recorded, tmp_path):
    process, _ = recorded
    with RecordClient(process.address, process.monitor) as client:
        entries = list(client.entries())
    head = entry_hash(entries[-1])
    file = tmp_path / "record.jsonl"
    for change in (
        entries[1:],
        [entries[0], *entries[2:]],
        [entries[1], entries[0], *entries[2:]],
        [entries[0], entries[1].replace('"reports":4', '"reports":5'), *entries[2:]],
        [*entries[:3], entries[3][:-5]],
    ):
        file.write_text("\n".join(change))
        found = run("verify", file, "--head", head)
        assert found.exit_code == 2
        assert "does not follow the one before it" in found.stderr or "no entry with the hash" in (
            found.stderr
        )
    # A second history, each entry of which follows the one before.
    forked, previous = [], START
    for index, entry in enumerate(entries):
        about = json.loads(entry)
        about.pop("index"), about.pop("previous")
        about["commitment"] = "0" * 64
        forked.append(make_entry(index, previous, about))
        previous = entry_hash(forked[-1])
    file.write_text("\n".join(forked))
    assert run("verify", file).exit_code == 0
    assert "no entry with the hash" in run("verify", file, "--head", head).stderr
    denied = run("verify", file, "--device", tmp_path / "device.toml")
    assert denied.exit_code == 2
    assert "which the device was offered, is not in the record" in denied.stderr
