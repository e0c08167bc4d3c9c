"""Models by name, or your own: a `module:callable` that takes (input_shape, outputs, **options)."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

from shufl.learning import ModuleState, logits_of
from shufl.learning.code_digest import code_digest
from shufl.learning.config import TASKS
from shufl.learning.parameters import frozen_digest, sent, trained
from shufl.learning.tasks import Form, load_task, wrong_tensor
from shufl.learning.your_code import CODE_ERRORS, find, your_code
from shufl.protocol.validation import ConfigError
from shufl.shuffler import model_digest


def logistic_regression(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer, starting at zero."""
    linear = nn.Linear(math.prod(input_shape), outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(input_shape: tuple[int, ...], outputs: int, hidden: int = 64) -> nn.Module:
    """One hidden layer of `hidden` ReLU units."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def small_cnn(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
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
    return nn.Sequential(features, nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, outputs))


class Additive(nn.Module):
    """The sum of learnt numbers, one for each id of a record, and a constant; all start at zero."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, ids: int):
        """The ids of records, int64, lie in 0 to `ids` - 1."""
        super().__init__()
        self.numbers = nn.Embedding(ids, outputs)
        self.constant = nn.Parameter(torch.zeros(outputs))
        nn.init.zeros_(self.numbers.weight)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """The sum, for each record: shape (r, outputs)."""
        total: torch.Tensor = self.numbers(records).sum(1) + self.constant
        return total


class Histogram(nn.Module):
    """A model that gives every record the same k scores: its parameters, which start at zero.

    A user's gradient of the cross-entropy is then `1/k - p`, where p are the shares of its labels.
    After one step by the mean over all users, at a learning rate of 1, the parameters plus 1/k are
    the shares over all users.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The scores, for each record."""
        return self.scores.expand(len(features), -1)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic-regression": logistic_regression,
    "mlp": mlp,
    "small-cnn": small_cnn,
    "additive": Additive,
    "histogram": Histogram,
}


@dataclass(frozen=True)
class ModelMaker:
    """Builds the initial model, and refuses one that cannot be trained; picklable.

    Attributes:
        name: a key of MODELS, `module:callable`, or a model of yours (`Carried`).
        form: of its records.
        seed: of the initial parameters.
        options: keyword arguments of the model.
        code: the `code_digest` that the model must have. Default: any.
    """

    name: str
    form: Form
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def __call__(self) -> nn.Module:
        """The model.

        Raises:
            ConfigError: the line says why it cannot be built or trained.
        """
        name, form = self.name, self.form
        make = find("model", name, MODELS)
        if self.code and code_digest([name]) not in ("", self.code):
            raise ConfigError(f"model {name}: its code has changed since the run began")
        records = f"{form.input_type} of shape {form.input_shape}"
        failure = f"model {name} could not be built for records of {records}"
        with seeded(self.seed), your_code(failure):
            if isinstance(make, nn.Module):
                model = copy.deepcopy(make)
            else:
                model = make(form.input_shape, form.outputs, **self.options)
            for module in model.modules():
                if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    module.sparse = False  # a report is dense
                if _is_frozen_norm(module):  # as in Keras, it keeps its statistics and uses them
                    module.eval().train = functools.partial(_stays_in_eval, module)  # type: ignore[method-assign]
            with torch.no_grad():
                outputs = model.eval()(form.inputs(2))
        if is_dataclass(outputs) and type(outputs) not in SUPPORTED_NODES:
            _make_tree_of(type(outputs))
        _refuse_what_has_no_loss(name, outputs, form)
        _refuse_what_cannot_be_sent(name, model)
        _refuse_what_is_not_trained(name, model)
        with your_code(f"model {name} cannot be copied"):
            copy.deepcopy(model)
        _refuse_what_mixes_users(name, model, form)
        return model


def _make_tree_of(kind: type[Any]) -> None:
    """Lets torch's functions for trees of tensors look into objects of a dataclass."""
    names = [each.name for each in fields(kind)]
    register_pytree_node(
        kind,
        lambda given: ([getattr(given, name) for name in names], None),
        lambda values, _: kind(**dict(zip(names, values, strict=True))),
    )


def _refuse_what_has_no_loss(name: str, outputs: Any, form: Form) -> None:
    """Refuses outputs from which the task does not get a loss for each of two records."""
    expected: dict[str, tuple[int, ...]] = {
        "classification": (2, form.outputs),
        "next-token": (2, *form.label_shape, form.outputs),
    }
    if form.task in TASKS:
        kind, outputs = type(outputs).__name__, logits_of(outputs)
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"model {name} must give a tensor, or a dictionary or dataclass with a tensor "
                f"named logits, for data.task {form.task}, got {kind}"
            )
    shape = tuple(getattr(outputs, "shape", ()))
    if shape != expected.get(form.task, shape):
        each = "record" if form.task == "classification" else "token"
        raise ConfigError(
            f"model {name} must give {form.outputs} scores a {each}, got shape {shape[1:]}"
        )
    numbers = 2 * max(form.outputs, 1)
    if form.task == "regression" and getattr(outputs, "numel", lambda: numbers)() != numbers:
        raise ConfigError(
            f"model {name} must give {form.outputs} numbers a record, got shape {shape[1:]}"
        )
    with your_code(f"data.task {form.task} takes no outputs of model {name}"), torch.no_grad():
        losses = load_task(form.task).loss(outputs, form.labels(2))
    if not isinstance(losses, torch.Tensor) or losses.shape != (2,):
        given = tuple(losses.shape) if isinstance(losses, torch.Tensor) else losses
        raise ConfigError(
            f"data.task {form.task} must give a loss for each record, a tensor of shape (2,) of "
            f"two records, got {given}"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python, and puts them back at the end."""
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
    """Refuses a model without a parameter to train, or with one that is not finite."""
    if not trained(model):
        raise ConfigError(f"model {name} has no parameters to train")
    for path, parameter in model.named_parameters():
        with _as_plain(name, path, parameter):
            frozen_digest(nn.ParameterList([parameter]))
            found = parameter.float() if parameter.dtype.itemsize == 1 else parameter  # as float8
            finite = bool(found.isfinite().all())
        if not finite:
            raise ConfigError(f"model {name} must start with finite numbers, got others in {path}")


def _is_frozen_norm(module: nn.Module) -> bool:
    """Whether it is batch norm with statistics whose parameters, at least one, are all frozen."""
    own = [each.requires_grad for each in module.parameters()]
    is_norm = isinstance(module, _BatchNorm) and module.running_mean is not None
    return is_norm and bool(own) and not any(own)


def _stays_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in place of `train` of a module that stays in eval mode."""
    return module


def _refuse_what_mixes_users(name: str, model: nn.Module, form: Form) -> None:
    """Refuses a model that mixes users' records in an update: clipping would bound nothing."""
    for path, module in model.train().named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ConfigError(
                f"model {name} has batch norm ({path}): its running statistics mix users' records "
                "and no noise protects them; freeze its parameters (requires_grad_(False)), so "
                "that it keeps its statistics, or use group norm or layer norm"
            )
    with your_code(f"model {name} could not be tried on two records"), torch.no_grad():
        state = ModuleState(model)
        model(form.inputs(2, 1.0))
        changed = state.restore()
    for path, _ in model.named_buffers():
        if path in changed:
            raise ConfigError(
                f"model {name} changes its buffer {path} in training: every user, and evaluation, "
                "would see its first value, for no report carries it"
            )


def _refuse_what_cannot_be_sent(name: str, model: nn.Module) -> None:
    """Refuses a model with trained parameters that are not float32, or a state that is not plain.

    The server steps in float32, broadcasts all that is not frozen, and compares its digests.
    """
    for path, parameter in trained(model).items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"model {name} keeps {path} as {parameter.dtype}: keep it as torch.float32, and "
                "compute in what you like"
            )
    with your_code(f"model {name} has no state that can be sent"):
        state = sent(model)
    for path, value in state.items():
        with _as_plain(name, path, value):
            model_digest({path: value})
            model.load_state_dict({path: value.clone()}, strict=False)


@contextmanager
def _as_plain(name: str, path: str, value: Any) -> Iterator[None]:
    """Refuses this value of the model's state if the `with` block fails."""
    try:
        yield
    except CODE_ERRORS as error:
        raise ConfigError(
            f"model {name} must keep {path} as a tensor that is dense, on the CPU, of a type that "
            "numpy has, and has memory of its own (as clone() makes), got "
            f"{wrong_tensor(value).rpartition(' got ')[2]}"
        ) from error
