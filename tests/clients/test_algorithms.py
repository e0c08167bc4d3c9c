"""Steps of users' local training: those that ship, and one's own, alone and together."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shufl.learning import LocalTraining, as_keys, local_update, record_orders, user_updates
from shufl.learning.config import load
from shufl.learning.data.partition import Together
from shufl.learning.from_config import local_training
from shufl.learning.models import mlp
from shufl.protocol.mechanisms import clip
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.simulator.engines.gradient_forms import Clipping
from shufl.simulator.engines.user_gradients import Computation, clipped_sum_of_updates

SIZES = [5, 1, 3, 7]


def with_momentum(parameters, gradients, start, state, learning_rate, decay=0.9):
    """SGD with momentum: what is kept from one step to the next."""
    speed = {name: decay * state[name] + g if state else g for name, g in gradients.items()}
    return {name: p - learning_rate * speed[name] for name, p in parameters.items()}, speed


def by_torch(training, model, features, labels, seed):
    """Parameters before less after, by a usual loop with torch's optimiser."""
    own = copy.deepcopy(model)
    momentum = 0.0 if training.own is None else 0.9
    optimiser = torch.optim.SGD(own.parameters(), training.local_learning_rate, momentum)
    start = [parameter.detach().clone() for parameter in own.parameters()]
    seeds = np.array([seed], dtype=np.uint64)
    orders = record_orders(seeds, training.local_epochs, len(labels))
    for order in orders.unbind(1)[0]:
        for batch in order.split(training.local_batch_size):
            optimiser.zero_grad()
            loss = functional.cross_entropy(own(features[batch]), labels[batch])
            if training.algorithm == "fedprox":
                for parameter, before in zip(own.parameters(), start, strict=True):
                    near = (parameter - before).square().sum()
                    loss = loss + training.options["proximal"] / 2 * near
            loss.backward()
            optimiser.step()
    pairs = zip(start, own.parameters(), strict=True)
    return torch.cat([(old - new).flatten() for old, new in pairs]).detach().numpy()


TRAININGS = {
    "fedsgd": LocalTraining("fedsgd", 1, 1.0, 99),  # a step of length 1 is the gradient
    "fedavg": LocalTraining("fedavg", 3, 0.3, 2),
    "fedprox": LocalTraining("fedprox", 3, 0.3, 2, options={"proximal": 2.0}),
    "own": LocalTraining("x:y", 3, 0.3, 2, own=with_momentum),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_updates_are_those_of_a_usual_loop_alone_and_together(training):
    """Together in one tensor and in buckets, where short users have steps without records."""
    torch.manual_seed(0)
    model = mlp((6,), 3).train()
    records = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in SIZES]
    expected = [by_torch(training, model, *own, seed) for seed, own in enumerate(records)]
    for seed, own in enumerate(records):
        alone = local_update(model, *own, training, seed)
        np.testing.assert_allclose(alone, expected[seed], rtol=1e-4, atol=1e-6)
    longest = max(SIZES)
    padded = [torch.stack([_padded(own[part], longest) for own in records]) for part in (0, 1)]
    real, seeds = np.array(SIZES), np.arange(4, dtype=np.uint64)
    for seed in range(4):
        own = (part[seed] for part in padded)
        alone = local_update(model, *own, training, seed, real=SIZES[seed])
        np.testing.assert_allclose(alone, expected[seed], rtol=1e-4, atol=1e-6)
    updates = user_updates(model, *padded, training, as_keys(seeds), real=torch.from_numpy(real))
    together = torch.cat([each.flatten(1) for each in updates.values()], dim=1)
    np.testing.assert_allclose(together.numpy(), np.stack(expected), rtol=1e-4, atol=1e-6)
    flat = Together(*(torch.cat([own[part] for own in records]) for part in (0, 1)), real)
    computation = Computation("vmap", training)
    total = clipped_sum_of_updates(computation, model, flat, seeds, Clipping(0.5))
    clipped = sum(clip(update, 0.5) for update in expected)
    np.testing.assert_allclose(total.numpy(), clipped, rtol=1e-4, atol=1e-6)


def _padded(records, longest):
    return records[torch.arange(longest) % len(records)]


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_padding_alone_is_an_update_of_zero(training):
    records = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)
    assert not local_update(mlp((6,), 3).train(), *records, training, 7, real=0).any()


def leaves_one_out(parameters, gradients, start, state, learning_rate):
    parameters = dict(parameters)
    parameters.popitem()
    return parameters, state


REMEMBERED = []


def remembers(parameters, gradients, start, state, learning_rate):
    """Keeps something outside what it is given: another user's step."""
    before = REMEMBERED[-1] if REMEMBERED else gradients
    REMEMBERED.append({name: each.detach() for name, each in gradients.items()})
    return {n: p - learning_rate * before[n] for n, p in parameters.items()}, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["training.algorithm=fedavgg"], "must be one of fedsgd, fedavg, fedprox, or module:call"),
        (["training.algorithm=nowhere:step"], "training.algorithm nowhere:step could not be imp"),
        (["training.algorithm=test_algorithms:leaves_one_out"], "could not be trained on made-up"),
        (["training.algorithm=test_algorithms:remembers"], "a user another update in another proc"),
        (
            ["training.algorithm=fedprox", "training.algorithm_options.mu=0.1"],
            "training.algorithm_options are none of fedprox: got an unexpected keyword",
        ),
        (["training.algorithm_options.proximal=0.1"], "must be empty for fedsgd"),
        (
            ["training.algorithm=fedprox", "training.algorithm_options.proximal=much"],
            "model logistic-regression could not be trained on made-up records: ",
        ),
        (["training.optimiser_options.betas=3"], "training.optimiser_options are none of sgd"),
    ],
)  # fmt: skip
def test_an_algorithm_that_cannot_be_used_is_one_line(sets, message):
    with pytest.raises(ConfigError) as error:
        prepare(load("quickstart", sets))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_configuration_names_the_algorithm_and_its_options():
    sets = ["training.algorithm=fedprox", "training.algorithm_options.proximal=0.5"]
    assert local_training(load("quickstart", sets)).options == {"proximal": 0.5}
    own = local_training(load("quickstart", ["training.algorithm=test_algorithms:with_momentum"]))
    one, zero = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    parameters, state = own.step(zero, one, zero, {})
    assert parameters["w"].tolist() == pytest.approx([-0.1] * 2) and state["w"].tolist() == [1, 1]


def heavy_ball(parameters, gradients, start, state, learning_rate):
    """Its state is what it was given: the parameters before the last step."""
    old = state["old"] if state else parameters
    new = {n: p - learning_rate * gradients[n] + 0.9 * (p - old[n]) for n, p in parameters.items()}
    return new, {"old": parameters}


def test_a_state_that_is_what_the_step_was_given_is_kept_when_users_leave():
    torch.manual_seed(3)
    training = LocalTraining("x:y", 2, 0.3, 2, own=heavy_ball)
    sizes, model = np.array([9, 1, 4, 12, 2]), nn.Linear(6, 3).train()
    features, labels = torch.randn(sizes.sum(), 6), torch.randint(3, (sizes.sum(),))
    seeds = np.arange(5, dtype=np.uint64)
    records, computation = Together(features, labels, sizes), Computation("vmap", training)
    total = clipped_sum_of_updates(computation, model, records, seeds, Clipping(10.0))
    ends = sizes.cumsum()
    alone = [
        local_update(model, features[e - n : e], labels[e - n : e], training, seed)
        for seed, (n, e) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True))
    ]
    np.testing.assert_allclose(total, sum(alone), rtol=1e-4, atol=1e-5)
