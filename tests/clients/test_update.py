"""Local updates against hand-made SGD, and the model left as it was."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from shufl.clients import LocalTraining, local_update


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


FEATURES = torch.tensor([[0.1, -0.2, 0.3], [1.0, 0.5, -1.0], [0.0, 2.0, 0.4]])
LABELS = torch.tensor([0, 1, 1])


def test_fedsgd_is_the_gradient_by_finite_differences(model):
    update = local_update(model, FEATURES, LABELS, LocalTraining("fedsgd"), seed=0)
    model = model.double()
    start = parameters_to_vector(model.parameters()).detach()

    def loss(vector):
        nn.utils.vector_to_parameters(vector, model.parameters())
        return nn.functional.cross_entropy(model(FEATURES.double()), LABELS).item()

    step = 1e-6
    differences = [
        (loss(start + step * unit) - loss(start - step * unit)) / (2 * step)
        for unit in torch.eye(len(start), dtype=torch.float64)
    ]
    np.testing.assert_allclose(update, differences, atol=1e-6)


def test_fedavg_with_one_full_batch_step_is_the_gradient_times_the_rate(model):
    gradient = local_update(model, FEATURES, LABELS, LocalTraining("fedsgd"), seed=0)
    training = LocalTraining("fedavg", local_epochs=1, local_learning_rate=0.5, local_batch_size=3)
    delta = local_update(model, FEATURES, LABELS, training, seed=0)
    np.testing.assert_allclose(delta, 0.5 * gradient, atol=1e-6)


def test_fedavg_descends_the_users_loss(model):
    training = LocalTraining("fedavg", local_epochs=20, local_learning_rate=0.5, local_batch_size=1)
    delta = local_update(model, FEATURES, LABELS, training, seed=0)
    before = nn.functional.cross_entropy(model(FEATURES), LABELS).item()
    vector = parameters_to_vector(model.parameters()).detach() - torch.from_numpy(delta)
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert nn.functional.cross_entropy(model(FEATURES), LABELS).item() < before / 2


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_the_model_comes_back_unchanged(model, algorithm):
    before = parameters_to_vector(model.parameters()).detach().clone()
    local_update(model, FEATURES, LABELS, LocalTraining(algorithm, local_batch_size=1), seed=0)
    assert torch.equal(before, parameters_to_vector(model.parameters()).detach())


def test_the_same_seed_gives_the_same_update_with_dropout_and_order():
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2))
    training = LocalTraining("fedavg", local_epochs=3, local_batch_size=1)
    first, again, other = (
        local_update(model, FEATURES, LABELS, training, seed=seed) for seed in (5, 5, 6)
    )
    assert (first == again).all()
    assert (first != other).any()
