"""A dataset of yours: a module on disk, found by every process of a run that needs it."""

import io
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from rich.console import Console

from run_world import (
    json_lines,
    model_of,
    only_folder,
    python_path,
    set_options,
    shufl,
    tiny_config,
    trained,
)
from shufl.learning.config import Data, load
from shufl.learning.data import features
from shufl.learning.data.datasets import load_dataset
from shufl.learning.data.features import data_digest
from shufl.learning.data.partition import load_users
from shufl.protocol.validation import ConfigError
from shufl.results.run import Run
from shufl.server import CheckpointError

MODULE = """
    import numpy as np
    import torch
    from torchvision import transforms  # as every user of its image folders does
    from shufl.learning.data.datasets import Dataset

    def blobs():
        records = torch.from_numpy(np.load("blobs.npy"))  # relative to where `shufl` was called
        labels = torch.arange(len(records)) % 2
        return Dataset(records[:100], labels[:100], records[100:], labels[100:], classes=2)

    def split_at_random():
        records = torch.from_numpy(np.load("blobs.npy"))[torch.randperm(140)]
        labels = (records[:, 0] > 0).long()
        return Dataset(records[:100], labels[:100], records[100:], labels[100:], classes=2)

    def doubled(records):
        return torch.cat([records, records], 1)

    DIRECTIONS = torch.randn(4, 2)

    def projected(records):
        return records @ DIRECTIONS
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of the module and its data, as the working directory."""
    (tmp_path / "blobs.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "exits.py").write_text("import sys\nsys.exit()\n")
    write_records(tmp_path, seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    features.mapped.cache_clear()
    load_dataset.cache_clear()
    sys.modules.pop("blobs", None)


def write_records(folder, seed):
    """Records whose first number tells the label."""
    records = np.random.default_rng(seed).normal(size=(140, 4)).astype(np.float32)
    records[:, 0] += 4.0 * (np.arange(140) % 2) - 2.0
    np.save(folder / "blobs.npy", records)


SETTINGS = "data.dataset=blobs:blobs", "model.name=logistic-regression", "model.options={}"


def finished(place, name, *more):
    """The folder of a run on your data, on Flower by the command."""
    chosen = set_options(*SETTINGS, *more)
    result = shufl("run", tiny_config(place, 3), "--runs", place / name, *chosen)
    assert result.returncode == 0, result.stderr
    return only_folder(place / name)


def finished_here(place, name, *more):
    """The folder of a run on your data, in this process."""
    chosen = [*SETTINGS, *more, "simulation.engine=vectorised"]
    return trained(load(str(tiny_config(place, 3)), chosen), place / name)


@pytest.mark.slow
@pytest.mark.nightly  # test_api.py has a dataset of yours on Flower
def test_both_engines_train_on_features_of_it(place):
    """Flower does in processes of its own, in the same folder. The map is yours too."""
    doubled = "data.features=blobs:doubled"
    flower = finished(place, "flower", doubled)
    vectorised = finished_here(place, "vectorised", doubled)
    rows = (json_lines(folder / "metrics.jsonl") for folder in (flower, vectorised))
    for row, other in zip(*rows, strict=True):
        assert row["reports"] == other["reports"] > 0
    assert row["accuracy"] > 0.6
    theirs = model_of(vectorised)
    for name, value in model_of(flower).items():
        assert value.shape in {(2, 8), (2,)}
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=0.02)


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_records_only(place):
    folder = finished_here(place, "runs")
    before = model_of(folder)
    assert Run.of(folder, Console(quiet=True)).train().rounds == 3
    assert all(torch.equal(before[name], value) for name, value in model_of(folder).items())
    write_records(place, seed=1)
    load_dataset.cache_clear()
    with pytest.raises(CheckpointError, match=r"made with data.dataset blobs:blobs .*, it cannot"):
        Run.of(folder, Console(quiet=True)).train()


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_features_only(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    maps = place / "maps.py"
    maps.write_text("def scaled(records):\n    return records / 2\n")
    folder = finished_here(place, "runs", "data.features=maps:scaled")
    assert Run.of(folder, Console(quiet=True)).train().rounds == 3
    maps.write_text("def scaled(records):\n    return records / 3\n")
    result = shufl("run", "--resume", folder)
    assert result.returncode != 0
    assert "made with code of blobs:blobs maps:scaled" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blobs:none", "module 'blobs' has no"),
        ("exits:blobs", r"it calls sys.exit\(None\)"),
        ("imports:it", r"No module .* \(imports.py, line 2\)"),
        ("typo:it", r"[^()]* \(typo.py, line 3\)"),
    ],
)
def test_one_that_is_not_there_is_one_line(place, name, message):
    (place / "imports.py").write_text("import sys\nimport nowhere\n")
    (place / "typo.py").write_text("import sys\n\ndef it(:\n")
    with pytest.raises(ConfigError, match=f"data.dataset {name} could not be imported: {message}"):
        load_dataset(name)


@pytest.mark.slow
@pytest.mark.nightly  # the next one shows it without Flower
def test_one_that_differs_between_processes_ends_before_the_first_round(place):
    chosen = set_options(*SETTINGS, "data.dataset=blobs:split_at_random")
    result = shufl("run", tiny_config(place, 6), "--runs", place / "runs", *chosen)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "data.dataset blobs:split_at_random differs between calls: it must be the same" in line
    assert "ended early: 0 rounds spent" in result.stdout


def test_records_and_features_of_one_process_are_refused_in_another(place):
    """Another process is one that imports the module anew."""
    for what in (("blobs:split_at_random", None), ("blobs:blobs", "blobs:projected")):
        here = data_digest(*what)
        data = Data(dataset=what[0], features=what[1], users=100, partition="iid")
        load_users(data, 1, here)
        load_dataset.cache_clear()
        del sys.modules["blobs"]
        with pytest.raises(ConfigError, match="differs between calls") as error:
            load_users(data, 1, here)
        assert all(name in str(error.value) for name in what if name)


@pytest.mark.slow
def test_torchvision_is_imported_in_a_process_of_its_own(place):
    """Beside a CPU wheel of torch its import fails if nothing is done about it."""
    code = "from shufl.learning.data.datasets import load_dataset; load_dataset('blobs:blobs')"
    environment = {"PYTHONPATH": python_path(place)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True)


@pytest.mark.slow
def test_a_run_begins_with_how_the_records_are_shared(place):
    console = Console(record=True, quiet=False, width=200, file=io.StringIO())
    sets = ["simulation.engine=vectorised", "data.users=60", "privacy.rounds=1"]
    Run.new(load(str(tiny_config(place, 1)), sets), place / "runs", console).train()
    by = "made by partition iid (what each gets is taken for one person's)"
    line = f"data digits, 60 users {by}, 23 to 24 records each (median 24), 1 437 in all; mlp"
    assert line in " ".join(console.export_text().split())
