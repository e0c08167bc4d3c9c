"""A dataset of yours, a module on disk: found, the same in every process, or refused."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from rich.console import Console

from run_world import (
    model_of,
    python_path,
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


def finished_here(place, name, *more):
    """The folder of a run on your data, in this process."""
    chosen = [*SETTINGS, *more, "simulation.engine=vectorised"]
    return trained(load(str(tiny_config(place, 3)), chosen), place / name)


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
