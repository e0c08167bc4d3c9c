"""`shufl status` on run folders of a simulation."""

import json
import time

import pytest

from run_world import invoke, json_lines, refused, told, trained
from shufl.accounting import Ledger
from shufl.learning.config import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    sets = ["simulation.engine=vectorised", "privacy.rounds=2", "training.evaluate_every=2"]
    return trained(load("quickstart", [*sets, "seed=system"]), runs)


def test_a_run_that_has_ended_says_how(folder):
    found = told("status", folder)
    assert (found["state"], found["why"], found["rounds"]) == ("ended", "rounds", 2)
    assert 0 < found["epsilon"] <= found["target"]
    assert found["seconds_left"] is None
    assert found["score_name"] == "accuracy" and found["score"] > 0
    assert "nodes: none known" in invoke("status", folder).stdout


def test_a_run_that_is_going_on_is_not_disturbed(folder):
    (folder / "summary.json").rename(folder / "aside")
    try:
        with Ledger.open(folder / "ledger.jsonl"):
            assert told("status", folder)["state"] == "running"
        assert told("status", folder)["state"] == "interrupted"
    finally:
        (folder / "aside").rename(folder / "summary.json")


@pytest.mark.parametrize(
    ("notes", "seconds"),
    [
        ([{"begun": moment} for moment in (100.0, 130.0, 160.0, 1000.0, 1031.0, 1061.0)], 30.0),
        ([{}], 2.5),  # of an older version
        ([{}, {"begun": 130.0}], 2.5),
    ],
)
def test_time_left_counts_what_lies_between_rounds(folder, tmp_path, notes, seconds):
    """One long wait does not count: the run went on after a power loss."""
    (row, _) = json_lines(folder / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"seconds": 2.5}) + "\n")
    plan = Ledger.read(folder / "ledger.jsonl").plan.replace(rounds=12)
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round, note in enumerate(notes, 1):
            ledger.append_round(round, note)
        found = told("status", tmp_path)
    assert found["allowed"] == 12
    assert found["seconds_left"] == seconds * (12 - len(notes))


def test_a_round_s_beginning_is_in_the_ledger(folder):
    entries = Ledger.read(folder / "ledger.jsonl").entries
    first, second = (each.note["begun"] for each in entries)
    assert 0 < second - first < time.time() - first


@pytest.mark.parametrize("address", ["nonsense", "s.example:99999", "s.example:0", ":9000"])
def test_a_shuffler_without_an_address_is_one_line(folder, tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "server.toml"
    site.write_text(f'shufflers = ["{address}"]\ncertificate = "x.pem"\nnodes = "agreed.toml"')
    line = refused("status", folder)
    assert "server.toml: shufflers.0: an address" in line and line.endswith(f"got '{address}'")
