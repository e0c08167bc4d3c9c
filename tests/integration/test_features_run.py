"""Runs on fixed features of records, on both engines, and resumed."""

import pytest
from rich.console import Console
from torch.testing import assert_close

from run_world import json_lines, model_of, only_folder, shufl, tiny_config
from shufl.learning.config import load
from shufl.learning.data import features
from shufl.results.run import Run

MODULE = "def halved(records):\n    return records.flatten(1) / FACTOR\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of a map of the reader's, and of what is kept, as the working directory."""
    (tmp_path / "maps.py").write_text(MODULE.replace("FACTOR", "2"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    features.mapped.cache_clear()


def finished(place, name, *overrides):
    """The folder of a run: on Flower by the command, else in this process."""
    settings = "model.name=logistic-regression", "model.options={}", *overrides
    config = tiny_config(place, 3)
    if "simulation.engine=vectorised" in overrides:
        Run.new(load(str(config), settings), place / name, Console(quiet=True)).train()
    else:
        sets = [part for each in settings for part in ("--set", each)]
        result = shufl("run", config, "--runs", place / name, *sets)
        assert result.returncode == 0, result.stderr
    return only_folder(place / name)


@pytest.mark.slow
@pytest.mark.nightly  # test_own_dataset.py has a map of the reader's on both engines
@pytest.mark.usefixtures("shared_ray")
def test_both_engines_train_on_the_same_features(place):
    features, engine = "data.features=scattering", "simulation.engine=vectorised"
    flower = finished(place, "flower", features)
    vectorised = finished(place, "vectorised", features, engine)
    rows = (json_lines(folder / "metrics.jsonl") for folder in (flower, vectorised))
    for row, other in zip(*rows, strict=True):
        assert row["reports"] == other["reports"] > 0
    theirs = model_of(vectorised)
    for name, value in model_of(flower).items():
        assert value.shape in {(10, 81 * 2 * 2), (10,)}
        assert_close(theirs[name], value, rtol=1e-3, atol=0.02)


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_features_only(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    folder = finished(place, "runs", "data.features=maps:halved", "simulation.engine=vectorised")
    assert Run.of(folder, Console(quiet=True)).train().rounds == 3
    (place / "maps.py").write_text(MODULE.replace("FACTOR", "3"))
    result = shufl("run", "--resume", folder)
    assert result.returncode != 0
    assert "made with code of maps:halved" in " ".join(result.stderr.split())
