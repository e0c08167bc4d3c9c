"""A shuffler that changes what it said of a round, and a server that denies one."""

import pytest
from typer.testing import CliRunner

from client_world import Round, reply_content
from shuffler_world import ShufflerHere
from shufl.cli.__main__ import app
from shufl.clients import load_device
from shufl.protocol import hash_chain
from shufl.shuffler import ControlClient
from shufl.shuffler.public_record import verify
from shufl.shuffler.wire.control_client import RecordClient

OWNER = 'ledger = "device.db"\nmost_epsilon = 1e6\ndelta = 1e-5\naccountant = "local"\n'


def run(*arguments):
    return CliRunner().invoke(app, ["record", *map(str, arguments)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A round that was released, one that was not wanted, and the device that was offered one."""
    owner = tmp_path_factory.mktemp("recorded") / "device.toml"
    owner.write_text(OWNER)
    with ShufflerHere() as process:
        control = ControlClient(process.address, process.control)
        round = Round(
            process.address, process.submit, control, "record",
            ledger=lambda _: load_device(owner),
        ).open()  # fmt: skip
        reply_content(round.announce())
        assert len(round.released()) == 4
        control.open_round(round.header.run_id, 2, "another", round.public_key)
        control.end_round(round.header.run_id, 2)
        control.end_run(round.header.run_id)
        yield process, round, owner
        control.close()


def test_the_record_tells_what_became_of_every_round(recorded, tmp_path):
    process, round, owner = recorded
    process.submit.write(tmp_path, "node")
    file = tmp_path / "record.jsonl"
    fetched = run("fetch", process.address, file, "--certificate", tmp_path / "node.pem")
    assert fetched.exit_code == 0, fetched.stderr
    entries = verify(file.read_text().splitlines())
    told = [(entry["event"], entry.get("round"), entry.get("reports")) for entry in entries]
    assert told == [
        ("created", None, None),
        *[("opened", 1, None), ("released", 1, 4), ("opened", 2, None), ("discarded", 2, None)],
        ("ended", None, None),
    ]
    assert entries[0]["plan"] == round.plan.to_json()
    assert entries[1]["commitment"] == round.header.commitment
    assert entries[-1]["check"] in fetched.stdout
    head = entries[1]["check"]
    good = run("verify", file, "--head", head, "--device", owner)
    assert good.exit_code == 0, good.stderr
    assert "6 lines follow each other" in good.stdout


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"run": ["a"], "round": 1, "event": "opened", "commitment": ""},
        {"run": "a", "event": "opened", "commitment": ""},
        {"run": "a", "round": 1, "event": "opened"},
        {"run": "a", "round": 1, "event": "opened", "commitment": "", "reports": 3},
        {"run": "a", "round": 1, "event": "renamed"},
    ],
)
def test_a_line_that_says_nothing_of_a_round_is_one_line(tmp_path, about):
    (tmp_path / "device.toml").write_text(OWNER)
    for line in (hash_chain.encode(about, hash_chain.START)[0], b"[" * 100_000, b"null"):
        (tmp_path / "record.jsonl").write_bytes(line)
        found = run("verify", tmp_path / "record.jsonl", "--device", tmp_path / "device.toml")
        assert found.exit_code == 2 and len(found.stderr.splitlines()) == 1
        assert found.stderr.startswith("error: line 1 of the record is damaged, or does not")


def test_a_record_that_was_changed_or_forked_is_found_out(recorded, tmp_path):
    process, _, owner = recorded
    with RecordClient(process.address, process.monitor) as client:
        lines = list(client.entries())
    entries = verify(lines)
    head = entries[-1]["check"]
    file = tmp_path / "record.jsonl"
    for change in (
        lines[1:],
        [lines[0], *lines[2:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines[:2], lines[2].replace('"reports":4', '"reports":5'), *lines[3:]],
        [*lines[:5], lines[5][:-5]],
    ):
        file.write_text("\n".join(change))
        found = run("verify", file, "--head", head)
        assert found.exit_code == 2
        assert "does not follow the one before it" in found.stderr
    file.write_text("\n".join(lines[:5]))
    assert "no line with the hash" in run("verify", file, "--head", head).stderr
    # A second history, each line of which follows the one before.
    forked, previous = [], hash_chain.START
    for entry in entries:
        entry.pop("check")
        if entry["event"] == "opened":
            entry["commitment"] = "0" * 64
        line, previous = hash_chain.encode(entry, previous)
        forked.append(line)
    file.write_bytes(b"".join(forked))
    assert run("verify", file).exit_code == 0
    assert "no line with the hash" in run("verify", file, "--head", head).stderr
    denied = run("verify", file, "--device", owner)
    assert denied.exit_code == 2
    assert "which the device was offered, is not in the record" in denied.stderr
