"""What a program, or a module of yours, sets for its whole process stays out of a run."""

import inspect
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import shufl
from nights import by_night
from rounds import check_in
from run_world import same_model
from shufl.accounting import make_accountant

CHANGES = {
    "privacy.rounds": 1, "privacy.target_epsilon": 1e4, "privacy.minimum_batch": 1,
    "simulation.engine": "vectorised",
}  # fmt: skip
MODULE = """
import numpy as np, sys, torch
from torch import nn
{}
def net(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""
AT_IMPORT = """
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.set_default_device("meta")
sys.setrecursionlimit(200)
np.seterr(all="raise")
"""


@contextmanager
def changed(setting, value, before):
    setting(value)
    try:
        yield
    finally:
        setting(before)


def little_depth():
    enough = len(inspect.stack(0)) + 46
    return changed(sys.setrecursionlimit, enough, sys.getrecursionlimit())


SETTINGS = {
    "a dtype": (
        lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
        torch.get_default_dtype,
    ),
    "no gradients": (torch.no_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "a device": (
        lambda: changed(torch.set_default_device, "meta", None), torch.get_default_device
    ),
    "half a precision": (
        lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")
    ),
    "little depth": (little_depth, sys.getrecursionlimit),
}  # fmt: skip
"""Each as it is set for a while, and what tells of it."""


def run(runs, model):
    changes = CHANGES | {"model.name": model}
    return shufl.run("quickstart", changes, runs=runs, progress=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of your model where nothing is set, and the folder of its module."""
    place = tmp_path_factory.mktemp("plain")
    for name, text in (("plain_net", ""), ("setting_net", AT_IMPORT)):
        (place / f"{name}.py").write_text(MODULE.format(text))
    sys.path.insert(0, str(place))
    yield run(place / "runs", "plain_net:net")
    sys.path.remove(str(place))


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "told"), SETTINGS.values(), ids=SETTINGS)
def test_a_run_is_the_same_and_the_setting_stays(plain, setting, told, tmp_path):
    with setting():
        before = told()
        other = run(tmp_path, "plain_net:net")
        model = other.model
        assert told() == before
    assert same_model(plain.folder, other.folder)
    for one, before in zip(other.metrics, plain.metrics, strict=True):
        assert one | {"seconds": 0} == before | {"seconds": 0}
    assert other.epsilon == plain.epsilon
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_what_a_module_sets_when_it_is_imported_ends_there(plain, tmp_path):
    assert same_model(plain.folder, run(tmp_path, "setting_net:net").folder)
    assert np.geterr()["under"] == "ignore" and torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled() and torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("name", ["rdp", *by_night("crowd")])
def test_accountants_answer_whatever_numpy_is_to_raise(name):
    accountant, event = make_accountant(name), check_in(1009, 0.3, 0.9)  # nobody else asks of it
    with np.errstate(all="raise"):
        found = accountant.compose(event, 3).get_epsilon(1e-5)
        assert accountant.get_delta(found) == pytest.approx(1e-5, rel=1e-3)
    assert 0 < found < np.inf
