"""A new engine is a class and a line of the table: run and report use that."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from run_world import LIMIT
from shufl.simulator.config import ConfigError, load
from shufl.simulator.engines import ENGINES
from shufl.simulator.engines.flower import FlowerEngine
from shufl.simulator.run import Run

SILENT = """
import sys
from pathlib import Path
from rich.console import Console
from shufl.server import PlayedRound, Training
from shufl.simulator.engines import ENGINES

class SilentEngine:
    gradients, nodes, repeats_releases = "none", "simulated", True

    def __init__(self, experiment):
        self.description = "silent"
        self._users = experiment.plan.users

    def run(self, training, observe, stop):
        def play(round, model):
            return PlayedRound("below-minimum", None, self._users, 0)

        run = Training(training)
        for round in run.rounds():
            observe(run.end(round, play(round, run.begin(round))), run.result)
        return run.finish()

ENGINES["vectorised"] = SilentEngine

from shufl.simulator.config import load
from shufl.simulator.run import Run

config = load("quickstart", ["simulation.engine=vectorised", "privacy.rounds=2"])
Run.new(config, Path(sys.argv[1]), Console()).train()
"""


@pytest.mark.slow
def test_an_engine_in_the_table_is_run_and_reported(tmp_path):
    command = [sys.executable, "-c", SILENT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr
    assert "engine   silent\n" in result.stdout
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["engine"], summary["gradients"]) == ("vectorised", "none")
    assert (summary["rounds"], summary["stopped_by"]) == (2, "rounds")


def test_keys_of_all_engines_are_known_and_those_of_none_are_named():
    settings = ["simulation.nodes=3", "simulation.workers=2", "simulation.engine=vectorised"]
    simulation = load("quickstart", settings).simulation
    assert (simulation.nodes, simulation.workers) == (3, 2)
    with pytest.raises(ConfigError, match=r"unknown key simulation.worker; did you mean workers\?"):
        load("quickstart", ["simulation.worker=2"])


class Started(Exception):
    pass


class StartedEngine(FlowerEngine):
    """The Flower engine, up to where it would start a shuffler."""

    def run(self, training, observe, stop):
        raise Started(training.reproducible)


@pytest.mark.parametrize(
    ("setting", "repeats"),
    [
        ("seed=1", True),
        ("seed=system", False),
    ],
)
def test_rounds_are_played_again_only_where_they_end_the_same(
    tmp_path, monkeypatch, setting, repeats
):
    monkeypatch.setitem(ENGINES, "flower", StartedEngine)
    with pytest.raises(Started) as started:
        Run.new(load("quickstart", [setting]), tmp_path, Console(quiet=True)).train()
    assert started.value.args == (repeats,)
