"""`shufl status` on run folders of a simulation."""

import pytest

from run_world import invoke, refused, told, trained
from shufl.accounting import Ledger
from shufl.learning.config import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    sets = ["simulation.engine=vectorised", "privacy.rounds=2", "training.evaluate_every=2"]
    return trained(load("quickstart", sets), runs)


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


@pytest.mark.parametrize("address", ["nonsense", "s.example:99999", "s.example:0", ":9000"])
def test_a_shuffler_without_an_address_is_one_line(folder, tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "server.toml"
    site.write_text(f'shufflers = ["{address}"]\ncertificate = "x.pem"\nnodes = "agreed.toml"')
    line = refused("status", folder)
    assert "server.toml: shufflers.0: an address" in line and line.endswith(f"got '{address}'")
