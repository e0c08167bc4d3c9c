"""A dataset of the reader's: a module on disk, found by every process of a run that needs it."""

import textwrap

import numpy as np
import pytest
import torch
from rich.console import Console
from run_world import json_lines, model_of, only_folder, shufl, tiny_config

from server import CheckpointError
from simulator.data.datasets import load_dataset
from simulator.run import resume_run

MODULE = """
    import numpy as np
    import torch
    from simulator.data.datasets import Dataset

    def blobs():
        records = torch.from_numpy(np.load("blobs.npy"))  # relative to where `shufl` was called
        labels = torch.arange(len(records)) % 2
        return Dataset(records[:100], labels[:100], records[100:], labels[100:], classes=2)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of the module and its data, as the working directory."""
    (tmp_path / "blobs.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "exits.py").write_text("import sys\nsys.exit()\n")
    write_records(tmp_path, seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    load_dataset.cache_clear()


def write_records(folder, seed):
    """Records whose first number tells the label."""
    records = np.random.default_rng(seed).normal(size=(140, 4)).astype(np.float32)
    records[:, 0] += 4.0 * (np.arange(140) % 2) - 2.0
    np.save(folder / "blobs.npy", records)


def finished(place, name, *overrides):
    """The folder of a run on the reader's data."""
    settings = "data.dataset=blobs:blobs", "model.name=logistic-regression", "model.options={}"
    sets = [part for each in (*settings, *overrides) for part in ("--set", each)]
    result = shufl("run", tiny_config(place, 6), "--runs", place / name, *sets)
    assert result.returncode == 0, result.stderr
    return only_folder(place / name)


@pytest.mark.slow
def test_both_engines_train_on_it_in_processes_of_their_own(place):
    engine = "simulation.engine=vectorised", "simulation.workers=2"
    flower, vectorised = finished(place, "flower"), finished(place, "vectorised", *engine)
    rows = (json_lines(folder / "metrics.jsonl") for folder in (flower, vectorised))
    for row, other in zip(*rows, strict=True):
        assert row["reports"] == other["reports"] > 0
    assert row["accuracy"] > 0.6
    theirs = model_of(vectorised)
    for name, value in model_of(flower).items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=0.02)


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_records_only(place):
    folder = finished(place, "runs", "simulation.engine=vectorised")
    before = model_of(folder)
    assert resume_run(folder, Console(quiet=True)).rounds == 6
    assert all(torch.equal(before[name], value) for name, value in model_of(folder).items())
    write_records(place, seed=1)
    load_dataset.cache_clear()
    with pytest.raises(CheckpointError, match=r"made with data.dataset blobs:blobs .*, it cannot"):
        resume_run(folder, Console(quiet=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:blobs", "data.dataset nowhere:blobs could not be imported: No module named"),
        ("blobs:none", "data.dataset blobs:none could not be imported: module 'blobs' has no"),
        ("exits:blobs", r"exits:blobs could not be imported: it calls sys.exit\(None\)"),
        ("blobs:MODULE", "data.dataset blobs:MODULE could not be imported"),
    ],
)
def test_one_that_is_not_there_is_one_line(place, name, message):
    with pytest.raises(ValueError, match=message) as error:
        load_dataset(name)
    assert "\n" not in str(error.value)
