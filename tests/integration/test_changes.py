"""What changes while a process runs, or before a run is resumed: files, modules, objects."""

import json
import sys

import pytest
import torch
from torch import nn

import shufl
from run_world import same_model
from shufl.learning.config import load
from shufl.learning.data.features import check_digest
from shufl.learning.data.files import RecordFile
from shufl.learning.given_objects import carried
from shufl.protocol.validation import ConfigError
from shufl.server import CheckpointError
from shufl.simulator.grid.definition import Point, grid_over
from shufl.simulator.grid.grid_points import play, read_result, rests_on

PRIVACY = {
    "check_in_rate": 1.0, "noise_multiplier": 1.0, "target_epsilon": 1e4, "rounds": 1,
    "accountant": "local", "minimum_batch": 1,
}  # fmt: skip
MODULE = "from torch import nn\ndef net(shape, outputs):\n    return nn.Linear(2, outputs)\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with records and a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_records(tmp_path / "v.csv", 0)
    (tmp_path / "own_net.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("own_net", None)


def write_records(path, flipped):
    rows = [f"u{i % 40},{i % 7},{i % 5},{(i % 2) ^ flipped}" for i in range(400)]
    path.write_text("\n".join(["id,a,b,y", *rows]) + "\n")


def configuration(file="v.csv", model="logistic-regression"):
    return {
        "name": "t", "seed": 7, "privacy": PRIVACY,
        "data": {"dataset": {"file": file, "user": "id", "label": "y", "classes": 2}},
        "model": {"name": model}, "training": {"learning_rate": 1.0},
        "simulation": {"engine": "vectorised"},
    }  # fmt: skip


def run(*about, **given):
    return shufl.run(configuration(*about), progress=False, **given)


@pytest.mark.slow
def test_a_file_that_has_changed_is_read_again(place):
    before = run()
    write_records(place / "v.csv", 1)
    write_records(place / "other.csv", 1)
    again, other = run(), run("other.csv")
    assert same_model(again.folder, other.folder)
    assert not same_model(before.folder, again.folder)


def test_a_process_that_finds_another_file_says_so(place):
    about = configuration()["data"]["dataset"] | {"file": str(place / "v.csv")}
    with pytest.raises(ConfigError, match=r"v.csv differs between calls: it must be the same"):
        check_digest(RecordFile.checked("it", about), None, "0" * 64)


@pytest.mark.slow
def test_a_module_that_has_changed_is_never_used_as_it_was(place):
    """Neither by a new run nor by one that is resumed: it would play spent rounds otherwise."""
    finished = run("v.csv", "own_net:net")
    with (place / "own_net.py").open("a") as file:
        file.write("# a comment\n")
    assert shufl.resume(finished.folder, progress=False).score == finished.score
    (place / "own_net.py").write_text(MODULE.replace("return", "return nn.Tanh() and"))
    for asked in (
        lambda: run("v.csv", "own_net:net"),
        lambda: shufl.resume(finished.folder, progress=False),
        lambda: shufl.load_run(finished.folder).model,
    ):
        with pytest.raises(ConfigError, match=r"own_net.py has changed since this process"):
            asked()
    del sys.modules["own_net"]  # as in a new process
    with pytest.raises(CheckpointError, match=r"made with code of own_net:net .*, it cannot go on"):
        shufl.resume(finished.folder, progress=False)


@pytest.mark.slow
def test_another_object_in_place_of_a_model_does_not_go_on(place):
    models = [nn.Sequential(nn.Linear(2, 2), kind()) for kind in (nn.ReLU, nn.Tanh)]
    finished = run(model=models[0])
    with pytest.raises(CheckpointError, match="made with code of object:Sequential "):
        shufl.resume(finished.folder, model=models[1], progress=False)


def is_there(point, place):
    """Whether a grid would not play the point again."""
    result = read_result(place / point.key)
    return result is not None and result["rests_on"] == rests_on(point)


@pytest.mark.slow
def test_results_of_a_grid_stay_as_long_as_their_data_and_code(place):
    point = Point("s", 1, 7, "shufl", load(configuration("v.csv", "own_net:net")))
    play(point, place / point.key, 1)
    assert is_there(point, place)
    write_records(place / "v.csv", 1)
    shufl.learning.data.datasets.load_dataset.cache_clear()  # as `play_points` does
    assert not is_there(point, place)
    write_records(place / "v.csv", 0)
    shufl.learning.data.datasets.load_dataset.cache_clear()
    assert is_there(point, place)
    (place / "own_net.py").write_text(MODULE.replace("2, outputs", "1 + 1, outputs"))
    del sys.modules["own_net"]
    assert not is_there(point, place)
    older = read_result(place / point.key)
    del older["rests_on"]
    (place / point.key / "result.json").write_text(json.dumps(older))
    assert not is_there(point, place)


def test_an_object_that_has_changed_is_another(place):
    """Numbers of a dataset, a model's buffers, and what an object that is called has."""
    norm = nn.BatchNorm1d(4).requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), norm, nn.Linear(4, 2))
    model(torch.zeros(2, 3))
    labels = torch.arange(4) % 2
    data = shufl.Dataset(torch.zeros(4, 3), labels, torch.zeros(2, 3), labels[:2], classes=2)
    step = Step()
    seen = set()
    for edit in (
        lambda: None,
        lambda: data.train_labels.zero_(),
        lambda: norm.running_mean.add_(3.0),
        lambda: setattr(step, "rate", 0.1),
    ):
        edit()
        objects = carried(data, None, None, model, step, None)
        _, grid = grid_over("quickstart", {"privacy.rounds": [1]}, [1], {}, objects)
        (point,) = grid.points(objects)
        shufl.learning.data.datasets.load_dataset.cache_clear()  # as `play_points` does
        seen.add(rests_on(point))
    assert len(seen) == 4


class Step:
    rate = 1.0

    def __call__(self, parameters, gradients, start, state, learning_rate):
        return {name: own - self.rate * gradients[name] for name, own in parameters.items()}, {}


@pytest.mark.slow
def test_a_point_of_objects_goes_on_and_is_played_again_with_other_objects(place):
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    rounds = {"privacy.rounds": [2], "privacy.target_epsilon": [1e4]}
    folder, runs = place / "point", []
    for change in (0.0, 0.0, 1.0):  # the second time its run is there, but no result
        nn.init.constant_(linear[1].bias, change)
        objects = carried(None, None, None, linear, None, None)
        _, grid = grid_over("quickstart", rounds, [1], {}, objects)
        (point,) = grid.points(objects)
        play(point, folder, 1)
        runs.append({path.parent.name for path in folder.glob("*/summary.json")})
        (folder / "result.json").unlink()
    assert runs[0] == runs[1] and all(map(len, runs))
    assert (folder / "rests_on").read_text() != "" and len(runs[2]) == 1
