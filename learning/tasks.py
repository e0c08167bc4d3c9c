"""What is learnt: the loss that users minimise, and the numbers that measure a model.

A dataset names its task (`Dataset.task`), and a configuration may name another (`data.task`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from shufl.learning import Loss, cross_entropy, logits_of
from shufl.learning.config import TASKS
from shufl.learning.your_code import find
from shufl.protocol.validation import ConfigError


@dataclass(frozen=True)
class Task:
    """What is learnt: a loss for training, and numbers that a model is measured by.

    Examples:
        >>> from shufl import Task
        >>> def loss(outputs, labels):
        ...     return (outputs.squeeze(1) - labels).abs()
        >>> def metrics(outputs, labels):
        ...     return {"mae": loss(outputs, labels).mean()}
        >>> absolute = Task(loss, metrics, score="mae")

    Attributes:
        loss: takes all that a model gives for r records, and their labels, of shape (r, ...). Gives
            each record its loss: float of shape (r,). A record's loss must depend on this record
            alone. A user's loss is the mean over its records.
        metrics: takes a model's outputs for all test records and their labels, and gives numbers by
            name.
        score: the metric that stands for the run.
        constant: takes the labels of all test records, and gives the score of the best answer that
            is the same for all of them, for reports. Default: reports leave it out.
    """

    loss: Loss
    metrics: Callable[[Any, torch.Tensor], dict[str, float]]
    score: str
    constant: Callable[[torch.Tensor], float] | None = None

    def measure(self, outputs: Any, labels: torch.Tensor) -> dict[str, float]:
        """Measures a model.

        Args:
            outputs: of the model, for r records.
            labels: of these records, shape (r, ...).

        Returns:
            All metrics by name, and the mean loss as `loss`.
        """
        loss = float(self.loss(outputs, labels).double().mean())
        return {name: float(value) for name, value in self.metrics(outputs, labels).items()} | {
            "loss": loss
        }


@dataclass(frozen=True)
class Form:
    """What a record is made of, and what is learnt from it.

    Attributes:
        input_shape: the shape of a record, as the model gets it.
        outputs: how many numbers the model gives: one for each class, or for each number of a
            label.
        input_type, label_type: `float32` or `int64`.
        label_shape: the shape of a record's label.
        task: the name of what is learnt.
    """

    input_shape: tuple[int, ...]
    outputs: int
    input_type: str = "float32"
    label_shape: tuple[int, ...] = ()
    label_type: str = "int64"
    task: str = "classification"

    def inputs(self, records: int, value: float = 0.0) -> torch.Tensor:
        """Records of one value: shape (r, ...)."""
        return torch.full((records, *self.input_shape), value, dtype=TYPES[self.input_type])

    def labels(self, records: int) -> torch.Tensor:
        """Labels of zeros: shape (r, ...)."""
        return torch.zeros(records, *self.label_shape, dtype=TYPES[self.label_type])


TYPES = {"float32": torch.float32, "int64": torch.int64}


def load_task(name: str) -> Task:
    """The task of that name: a key of TASKS, or `module:callable`.

    Raises:
        ConfigError: there is no such task, or the callable gives something else.
    """
    task = find("data.task", name, TASKS)
    if callable(task):
        task = task()
    if not isinstance(task, Task):
        raise ConfigError(f"data.task {name} must be a shufl.Task or return one, got {task!r}")
    return task


def loss_of(name: str) -> Loss:
    """The loss of the task of that name; picklable."""
    return load_task(name).loss if name in TASKS else functools.partial(_own_loss, name)


def _own_loss(name: str, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a task of yours, which every process imports at the first call."""
    return load_task(name).loss(outputs, labels)


def _accuracy(outputs: Any, labels: torch.Tensor) -> dict[str, float]:
    """The share of records whose largest score is their label's, and the mean F1 over classes.

    A class counts if it is among the labels or the predictions.
    """
    scores = logits_of(outputs)
    guesses, classes = scores.argmax(dim=1), scores.shape[1]
    right, guessed, there = (
        each.bincount(minlength=classes).double()
        for each in (labels[guesses == labels], guesses, labels)
    )
    either = guessed + there
    f1 = 2 * right[either > 0] / either[either > 0]
    return {"accuracy": float(right.sum() / len(labels)), "macro_f1": float(f1.mean())}


def _squared_error(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    guesses = logits_of(outputs).reshape(len(labels), -1)
    return (guesses - labels.reshape(len(labels), -1)).square().mean(1)


def _errors(outputs: Any, labels: torch.Tensor) -> dict[str, float]:
    """The root of the mean squared error, and the mean absolute one."""
    errors = (logits_of(outputs).reshape(labels.shape) - labels).double()
    return {"rmse": float(errors.square().mean().sqrt()), "mae": float(errors.abs().mean())}


PADDING = -100
"""The label of a place that holds no token; it counts neither in the loss nor in a metric."""


def _token_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each record's tokens: scores (r, t, c), labels (r, t)."""
    losses = functional.cross_entropy(
        logits_of(outputs).transpose(1, 2), labels, ignore_index=PADDING, reduction="none"
    )
    return losses.sum(1) / (labels != PADDING).sum(1).clamp(min=1)


def _tokens_told(outputs: Any, labels: torch.Tensor) -> dict[str, float]:
    """Share of tokens that are predicted correctly, and the perplexity."""
    scores, counted = logits_of(outputs), labels != PADDING
    right = (scores.argmax(dim=2) == labels)[counted].double().mean()
    loss = functional.cross_entropy(scores[counted].double(), labels[counted])
    return {"accuracy": float(right), "perplexity": float(loss.exp())}


def _share_of_the_most_frequent(labels: torch.Tensor) -> float:
    """The accuracy of always answering with the class or token that most places have."""
    counted = labels[labels != PADDING]
    return float(counted.bincount(minlength=1).max() / max(1, len(counted)))


def _error_of_the_mean(labels: torch.Tensor) -> float:
    return _errors(labels.double().mean(0).expand(labels.shape), labels)["rmse"]


CLASSIFICATION = Task(cross_entropy, _accuracy, "accuracy", _share_of_the_most_frequent)
REGRESSION = Task(_squared_error, _errors, "rmse", _error_of_the_mean)
NEXT_TOKEN = Task(_token_loss, _tokens_told, "accuracy", _share_of_the_most_frequent)


Measure = Callable[[Any, torch.Tensor], dict[str, float]]
"""Numbers by name, of a model's outputs and the labels of all test records; `loss` is one."""

_BATCH = 1000


@torch.no_grad()
def evaluate(
    model: nn.Module, features: torch.Tensor, labels: torch.Tensor, measure: Measure
) -> dict[str, float]:
    """Measures a model on test records, in batches, on the device of the records.

    Args:
        model: stays as it is: a copy in eval mode is measured.
        features, labels: of r records, shape (r, ...).
        measure: takes all outputs and the labels.
    """
    model = copy.deepcopy(model).to(features.device).eval()
    # A forward may change what it gets in place, so it gets a copy.
    parts = [model(batch.clone()) for batch in features.split(_BATCH)]
    outputs = parts[0]
    if len(parts) > 1:
        outputs = tree_map(
            lambda *each: torch.cat(each) if torch.is_tensor(each[0]) else each[0], *parts
        )
    return measure(outputs, labels)


def outside(labels: torch.Tensor, classes: int, task: str) -> torch.Tensor:
    """Which labels stand for no class or token: bool of the same shape."""
    counted = labels != PADDING if task == "next-token" else torch.tensor(True)
    return counted & ((labels < 0) | (labels >= classes))


def wrong_tensor(thing: Any, *dtypes: torch.dtype) -> str:
    """Says that a tensor of one of these types is needed, and what was given; "" for such a one."""
    is_tensor, kind = isinstance(thing, torch.Tensor), type(thing).__name__
    if is_tensor:
        layout = "nested" if thing.is_nested else thing.layout
        dense = thing.device.type == "cpu" and layout == torch.strided
        if dense and thing.dtype in dtypes and not thing.requires_grad:
            return ""
        kind = f"{thing.dtype}" if dense else f"{thing.dtype}, {layout}, on {thing.device}"
        kind += " with gradients" if thing.requires_grad else ""
    allowed = " or ".join(map(str, dtypes))
    needed = f"a dense tensor of {allowed} on the CPU, without gradients, got {kind}"
    return needed.replace("torch.", "")
