"""`shufl status` on run folders of a simulation."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shufl.accounting import Ledger
from shufl.cli.__main__ import app
from shufl.learning.config import load
from shufl.results.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    config = load(
        "quickstart",
        ["simulation.engine=vectorised", "privacy.rounds=2", "training.evaluate_every=2"],
    )
    Run.new(config, runs, Console(quiet=True)).train()
    (found,) = runs.iterdir()
    return found


def status(*arguments):
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


def test_a_run_that_has_ended_says_how(folder):
    found = json.loads(status(folder, "--json").stdout)
    assert (found["state"], found["why"], found["rounds"]) == ("ended", "rounds", 2)
    assert 0 < found["epsilon"] <= found["target"]
    assert (
        found["seconds_left"] is None and found["score_name"] == "accuracy" and found["score"] > 0
    )
    shown = status(folder).stdout
    assert "nodes: none known" in shown


def test_a_run_that_is_going_on_is_not_disturbed(folder):
    (folder / "summary.json").rename(folder / "aside")
    try:
        with Ledger.open(folder / "ledger.jsonl"):
            assert json.loads(status(folder, "--json").stdout)["state"] == "running"
        assert json.loads(status(folder, "--json").stdout)["state"] == "interrupted"
    finally:
        (folder / "aside").rename(folder / "summary.json")


@pytest.mark.parametrize("address", ["nonsense", "s.example:99999", "s.example:0", ":9000"])
def test_a_shuffler_without_an_address_is_one_line(folder, tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "server.toml"
    site.write_text(f'shufflers = ["{address}"]\ncertificate = "x.pem"\nnodes = "agreed.toml"')
    done = status(folder)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert "server.toml: shufflers.0: an address" in done.stderr
    assert done.stderr.endswith(f"got '{address}'\n")
