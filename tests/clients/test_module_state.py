"""A user's update is a function of the model, its own records and the seed alone."""

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import remembering_models as models
import torch
from torch import nn
from typer.testing import CliRunner

from shufl.cli.__main__ import app
from shufl.learning import LocalTraining, ModuleState, StateError, local_update, user_updates
from shufl.learning.model_trial import agrees_one_by_one, try_users
from shufl.learning.models import ModelMaker
from shufl.learning.node_updates import NodeUpdates
from shufl.learning.tasks import Form
from shufl.protocol.validation import ConfigError
from shufl.simulator.engines.user_gradients import fastest_method

TRAININGS = [LocalTraining(), LocalTraining("fedavg", local_epochs=2, local_batch_size=2)]
_GENERATOR = torch.Generator().manual_seed(0)
A, B = (
    (torch.randn(3, 4, generator=_GENERATOR) * size, torch.tensor([0, 1, 2])) for size in (5.0, 1.0)
)


def make(kind):
    torch.manual_seed(0)
    return kind().train()


@pytest.mark.parametrize("training", TRAININGS, ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("kind", [*models.IN_THE_MODULE, models.GlobalGenerators])
def test_nothing_of_one_users_records_is_left_for_the_next(kind, training):
    alone = local_update(make(kind), *B, training, seed=2)
    model = make(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        local_update(model, *A, training, seed=1)
    assert np.array_equal(local_update(model, *B, training, seed=2), alone)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sorted({*models.IN_THE_MODULE, models.Draws} - {*models.NOT_TOGETHER}, key=str)
)
def test_the_users_of_a_node_get_what_each_alone_gets(kind, caplog):
    """The steps of a Flower node behind its messages: one by one, and as many as are grouped."""
    caplog.set_level("INFO", "shufl.learning.node_updates")
    for count in (2, 9):
        work = NodeUpdates(functools.partial(make, kind), TRAININGS[1], together=True)
        work.model.train()
        users, seeds = ([A, B] * count)[:count], np.arange(count, dtype=np.uint64)
        together = list(work.updates(users, seeds))
        for update, records, seed in zip(together, users, seeds.tolist(), strict=True):
            alone = local_update(make(kind), *records, TRAININGS[1], seed)
            np.testing.assert_allclose(update, alone, rtol=1e-4, atol=1e-5)
    assert kind is not models.Draws or "computed one by one" in caplog.text


def test_users_computed_together_share_no_state_of_local_epochs():
    seeds = torch.arange(2)
    features, labels = (torch.stack(each) for each in zip(A, B, strict=True))
    with pytest.raises(RuntimeError, match="keeps bank from one step to the next"):
        user_updates(make(models.List), features, labels, TRAININGS[1], seeds)


@pytest.mark.slow  # each starts a process
@pytest.mark.parametrize(
    "kind",
    [
        models.Unseeded,
        pytest.param(models.FirstOfClass, marks=pytest.mark.nightly),
        pytest.param(models.Global, marks=pytest.mark.nightly),
        pytest.param(models.Cache, marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_keeps_something_elsewhere_is_refused(kind):
    name = f"remembering_models:{kind.__name__}"
    with pytest.raises(ConfigError, match=f"model {name} gives a user another update in another"):
        try_users(make_model(name), LocalTraining(), records=3)


@pytest.mark.slow
def test_it_is_refused_in_one_line_before_any_work(tmp_path):
    name = "remembering_models:OfClass"
    given = ["run", "quickstart", "--runs", str(tmp_path), "--set", f"model.name={name}"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert result.stderr.startswith(f"error: model {name} gives a user another update in another")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_trial_says_which_models_may_be_computed_together():
    assert not try_users(make_model("remembering_models:Attribute"), TRAININGS[1], 3)
    pair = [torch.stack(each) for each in zip(A, B, strict=True)]
    assert agrees_one_by_one(make(models.Attribute), *pair, TRAININGS[0])
    for kind in (models.GlobalGenerators, *models.NOT_TOGETHER):
        assert not agrees_one_by_one(make(kind), *pair, TRAININGS[1])


def make_model(name):
    return ModelMaker(name, Form((4,), 3), 0)


def test_restoring_names_what_had_changed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.steps, model.nothing, model.mask = 0, [], torch.tensor([float("nan")])
    state = ModuleState(model)
    assert state.restore() == []
    model.steps = 1
    model.nothing.append(3)
    model[1].weight.data.zero_()
    model[0].bias.requires_grad_(False)
    changed = state.restore()
    assert sorted(changed) == ["0.bias", "1.weight", "nothing", "steps"]
    assert (model.steps, model.nothing, state.restore()) == (0, [], [])
    assert model[0].bias.requires_grad and model[1].weight.any()


class Hidden(models.Slots):
    """Has a property of the name of its base's slot."""

    @property
    def value(self):
        return object()


def test_slots_are_put_back_whatever_has_their_name():
    model, slot = nn.Linear(2, 2), models.Slots.value
    model.held, model.empty, model.folder = Hidden(), Hidden(), Path("records")
    slot.__set__(model.held, 1)
    state = ModuleState(model)
    hash(model.folder)  # which it then keeps: that is nothing of a record
    assert state.restore() == []
    slot.__delete__(model.held)
    slot.__set__(model.empty, 2)
    assert sorted(state.restore()) == ["empty.value", "held.value"]
    assert slot.__get__(model.held) == 1 and not state.restore()


def test_what_cannot_be_put_back_is_refused():
    class Iterates(models.Model):
        def start(self):
            self.numbers = iter([1.0, 2.0, 3.0])

        def seen(self, mean):
            return next(self.numbers)

    with pytest.raises(StateError, match=r"numbers \(list_iterator\) changes and cannot be put"):
        local_update(make(Iterates), *A, LocalTraining(), seed=0)
    model = make(models.Attribute)
    model.read = (line for line in "abc")
    with pytest.raises(StateError, match=r"read \(generator\) has no state that"):
        ModuleState(model)


class Counts(nn.Module):
    """Keeps numbers and tensors in the ways that TorchScript has."""

    def __init__(self):
        super().__init__()
        self.steps, self.shown = 0, [0.0]
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, records):
        self.steps += 1
        self.shown.append(float(records.sum()))
        self.total += records.detach().sum()
        self.last = records.detach().sum().reshape(1) + self.last
        return records * (1 + self.steps) + self.total + self.last + len(self.shown)


def with_scripts(layers):
    """A model of these layers, some of them TorchScript, and its twin without."""
    torch.manual_seed(0)
    twin = nn.Sequential(*layers())
    torch.manual_seed(0)
    return nn.Sequential(*map(torch.jit.script, layers())).train(), twin.train()


@pytest.mark.parametrize("training", TRAININGS, ids=["fedsgd", "fedavg"])
def test_torchscript_has_the_updates_of_its_twin(training):
    def layers():
        return nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 3))

    scripted, twin = with_scripts(layers)
    traced = copy.deepcopy(twin)
    traced[1] = torch.jit.trace(traced[1], torch.zeros(2, 5))
    expected = [local_update(twin, *each, training, 0) for each in (A, B)]
    features, labels = (torch.stack(each) for each in zip(A, B, strict=True))
    keys = torch.zeros(2, dtype=torch.int64)
    for model in (scripted, traced):
        for _ in range(3):  # it is compiled anew after some calls
            found = [local_update(model, *each, training, 0) for each in (A, B)]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        updates = user_updates(model, features, labels, training, keys).values()
        together = torch.cat([each.flatten(1) for each in updates], dim=1).numpy()
        np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-6)
        assert fastest_method(model, Form((4,), 3), training) == "vmap"


@pytest.mark.parametrize("training", TRAININGS, ids=["fedsgd", "fedavg"])
def test_nothing_is_left_in_torchscript_for_the_next(training):
    scripted, _ = with_scripts(lambda: (nn.Linear(4, 3), Counts()))
    alone = local_update(copy.deepcopy(scripted), *B, training, seed=2)
    for _ in range(3):
        local_update(scripted, *A, training, seed=1)
        assert np.array_equal(local_update(scripted, *B, training, seed=2), alone)
    assert (scripted[1].steps, scripted[1].shown) == (0, [0.0])
    assert not scripted[1].total.any() and not scripted[1].last.any()
    state = ModuleState(scripted)
    assert state.restore() == []
    scripted(A[0])
    assert sorted(state.restore()) == ["1._c", "1.last", "1.total"]
    assert state.restore() == []


class ChangesItsInput(models.Model):
    def forward(self, records):
        return self.layer(records.sub_(0.5).mul_(2.0))


@pytest.mark.parametrize("training", TRAININGS, ids=["fedsgd", "fedavg"])
def test_a_forward_gets_a_copy_of_the_records(training):
    features, labels = A[0].clone(), A[1]
    stacked, seeds = features.clone()[None], torch.zeros(1, dtype=torch.int64)
    local_update(make(ChangesItsInput), features, labels, training, seed=0)
    user_updates(make(ChangesItsInput), stacked, labels[None], training, seeds)
    assert torch.equal(features, A[0]) and torch.equal(stacked[0], A[0])
