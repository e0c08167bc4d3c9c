"""Models by name, or any `module:callable` that takes (input_shape, classes, **options)."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shufl.clients import ModuleState
from shufl.simulator.section import ConfigError, find, one_line, readers_code


def logistic_regression(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer, starting at zero."""
    linear = nn.Linear(math.prod(input_shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(input_shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer of `hidden` ReLU units."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def small_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The two-convolution network of the MNIST experiments: 26 010 parameters at 1x28x28."""
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, kernel_size=8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
    )
    with torch.no_grad():
        width = features(torch.zeros(1, *input_shape)).shape[1]
    return nn.Sequential(features, nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, classes))


class Histogram(nn.Module):
    """The same scores for every record, starting at zero: k parameters.

    One gradient step of the cross-entropy asks for `1/k - p`, p the shares of a user's labels; so
    after one step by the mean of all users, at a learning rate of 1, 1/k and the parameters are the
    shares of all.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(classes))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The scores, for each record."""
        return self.scores.expand(len(features), -1)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic-regression": logistic_regression,
    "mlp": mlp,
    "small-cnn": small_cnn,
    "histogram": Histogram,
}


def build_model(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """The model of that name, a key of MODELS or `module:callable`, initialised from `seed`."""
    make = find("model", name, MODELS)
    failure = f"model {name} could not be built for records of shape {input_shape}"
    with seeded(seed), readers_code(failure):
        if isinstance(make, nn.Module):
            model = copy.deepcopy(make)
        else:
            model = make(input_shape, classes, **(options or {}))
        with torch.no_grad():
            shape = tuple(model.eval()(torch.zeros(2, *input_shape)).shape)
    if shape != (2, classes):
        raise ConfigError(
            f"model {name} must give {classes} scores a record, got shape {shape[1:]}"
        )
    _refuse_what_cannot_be_sent(name, model)
    _refuse_what_is_not_trained(name, model)
    _refuse_what_mixes_users(name, model, input_shape)
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators that torch, numpy and Python share, and puts them back at the end."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _refuse_what_is_not_trained(name: str, model: nn.Module) -> None:
    """Every parameter is in every report, with noise on it."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(f"model {name} has no parameters to train")
    for path, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise ConfigError(f"model {name} must start with finite numbers, got others in {path}")
        if not parameter.requires_grad:
            raise ConfigError(
                f"model {name} freezes {path}: noise would be added to it all the same; make what "
                "is not trained a buffer"
            )


def _refuse_what_mixes_users(name: str, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """An update must depend on its own user's records only, or clipping bounds nothing."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"model {name} has batch norm ({path}): its running statistics mix users' records "
                "and no noise protects them; use group norm or layer norm"
            )
    with readers_code(f"model {name} could not be tried on two records"), torch.no_grad():
        state = ModuleState(model.train())
        model(torch.ones(2, *input_shape))
        changed = state.restore()
    for path, _ in model.named_buffers():
        if path in changed:
            raise ConfigError(
                f"model {name} changes its buffer {path} in training: every user, and evaluation, "
                "would see its first value, for no report carries it"
            )


def _refuse_what_cannot_be_sent(name: str, model: nn.Module) -> None:
    """The server steps by float32, broadcasts all of a model's state and compares digests of it."""
    for path, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"model {name} keeps {path} as {parameter.dtype}: keep it as torch.float32, and "
                "compute in what you like"
            )
    for path, value in model.state_dict().items():
        try:
            value.numpy(force=True)
        except (TypeError, RuntimeError, AttributeError) as error:
            kind = getattr(value, "dtype", type(value).__name__)
            raise ConfigError(
                f"model {name} must keep {path} as a dense tensor of a type that numpy has, got "
                f"{kind}: {one_line(error)}"
            ) from error
