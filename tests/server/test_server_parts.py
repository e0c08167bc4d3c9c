"""Evaluation and checkpoints."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from server_world import optimiser_of
from shufl import clients, server
from shufl.learning import evaluate
from shufl.learning.tasks import CLASSIFICATION
from shufl.server import Checkpoint, CheckpointError, load_checkpoint, read_checkpoint


def test_evaluation_counts_every_record_across_batches(device):
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.bias.zero_()
    features = torch.cat([torch.ones(1500, 1), -torch.ones(601, 1)])
    labels = torch.zeros(2101, dtype=torch.long)
    result = evaluate(model, features.to(device), labels.to(device), CLASSIFICATION.measure)
    assert model.training and model.weight.device.type == "cpu"
    assert result["accuracy"] == pytest.approx(1500 / 2101)
    right, wrong = (torch.log1p(torch.exp(torch.tensor(s * 2.0))).item() for s in (-1, 1))
    assert result["loss"] == pytest.approx((1500 * right + 601 * wrong) / 2101, rel=1e-5)


_OPTIMISERS = """
import copy, sys
import torch
from shufl.server import Optimiser
from shufl.learning.config import Optimisers, Training

first, found = torch.nn.Linear(3, 2), {}
for name in Optimisers.__args__:
    keys = Training(optimiser=name, learning_rate=0.1, averaging=0.5)
    model, optimiser = copy.deepcopy(first), Optimiser(keys, 1)
    stepper, average = optimiser.build(model), optimiser.average_of(model)
    for step in range(3):
        optimiser.step(stepper, model, torch.arange(8.0).numpy(), step + 1)
        average.update_parameters(model)
    stepper.load_state_dict(stepper.state_dict())
    stepper.zero_grad()
    found[name] = f"{model.state_dict()} {stepper.state_dict()}"
assert "torch._dynamo" not in sys.modules
kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
for name in found:
    model = copy.deepcopy(first)
    stepper = kinds[name](model.parameters(), lr=keys.learning_rate)
    for step in range(3):
        model.weight.grad, model.bias.grad = torch.arange(6.0).view(2, 3), torch.arange(6.0, 8.0)
        stepper.step()
    assert found[name] == f"{model.state_dict()} {stepper.state_dict()}", name
"""


@pytest.mark.slow
def test_an_optimiser_steps_as_torch_s_does_and_does_not_load_what_compiles():
    subprocess.run([sys.executable, "-c", _OPTIMISERS], check=True)


@pytest.mark.slow
def test_a_checkpoint_of_which_one_bit_or_the_end_is_wrong_is_refused(tmp_path):
    model, path = nn.Linear(2, 1), tmp_path / "checkpoint.pt"
    optimiser = torch.optim.SGD(model.parameters())
    Checkpoint("run", {}, 7, model.state_dict(), optimiser.state_dict(), None).save(path)
    whole = path.read_bytes()
    assert read_checkpoint(path)[0] == load_checkpoint(path).round == 7
    flipped = (
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in (range(8) if place < 120 else (place % 8,))
    )
    cut = (whole[:length] for length in range(0, len(whole), 7))
    for damaged in (*flipped, *cut, whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"^checkpoint .* (is damaged|cannot be read)"
        ) as e:
            load_checkpoint(path)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "policy", [server.Simulated, server.Deployed, clients.Simulated, clients.Deployed]
)
def test_no_field_of_a_policy_can_be_forgotten(policy):
    with pytest.raises(TypeError, match=f"missing {len(dataclasses.fields(policy))} required"):
        policy()


def test_the_learning_rate_falls_to_zero_behind_the_last_round():
    rates = {
        schedule: [
            optimiser_of(2.0, rounds=4, schedule=schedule).learning_rate_at(k) for k in range(1, 6)
        ]
        for schedule in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [2.0] * 5
    assert rates["linear"] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates["cosine"] == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0])


def test_the_average_follows_the_models_with_its_decay():
    model = nn.Linear(1, 1, bias=False)
    average = optimiser_of(averaging=0.75).average_of(model)
    assert optimiser_of().average_of(model) is None
    for weight in (8.0, 4.0, 0.0):
        nn.init.constant_(model.weight, weight)
        average.update_parameters(model)
    assert average.module.weight.item() == 0.75 * (0.75 * 8 + 0.25 * 4)
