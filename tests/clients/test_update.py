"""Local updates against hand-made SGD, and the model left as it was."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from shufl.learning import LocalTraining, local_update, user_updates


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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("real", [1, 2, 3, 5])
def test_padding_has_no_weight(model, algorithm, real):
    """One by one and together, whatever the padding is; of 8 records, in batches of 2."""
    training = LocalTraining(algorithm, 3, 0.5, local_batch_size=2)
    features, labels = torch.randn(8, 3), torch.randint(2, (8,))
    expected = local_update(model, features[:real], labels[:real], training, 7)
    padded = local_update(model, features, labels, training, 7, real=real)
    np.testing.assert_allclose(padded, expected, rtol=0, atol=1e-6)
    seeds, counts = torch.tensor([5, 7]), torch.tensor([8, real])
    both = torch.stack([features, features]), torch.stack([labels, labels])
    together = user_updates(model, *both, training, seeds, real=counts)
    flat = torch.cat([each.flatten(1) for each in together.values()], dim=1).numpy()
    np.testing.assert_allclose(flat[1], expected, rtol=0, atol=1e-6)
    whole = local_update(model, features, labels, training, 5)
    np.testing.assert_allclose(flat[0], whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_padding_alone_is_an_update_of_zero(model, algorithm):
    training = LocalTraining(algorithm, 2, 0.5, local_batch_size=2)
    assert not local_update(model, FEATURES, LABELS, training, 7, real=0).any()
