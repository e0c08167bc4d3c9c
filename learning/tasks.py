"""What is learnt: the loss that users minimise, and the numbers that measure a model.

A dataset names its task (`Dataset.task`), and a configuration may name another (`data.task`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shufl.learning import Loss, cross_entropy
from shufl.learning.names import TASKS
from shufl.learning.section import ConfigError, find


@dataclass(frozen=True)
class Task:
    """A loss, and what a model is measured by on the test data.

    Attributes:
        loss: gives each of r records a term, from outputs and labels: float of shape (r,). A term
            depends on its own record alone, and a user's loss is the mean of its terms.
        metrics: numbers by name, of the outputs and labels of all test records.
        score: which of them stands for the run.
    """

    loss: Loss
    metrics: Callable[[Any, torch.Tensor], dict[str, float]]
    score: str

    def measure(self, outputs: Any, labels: torch.Tensor) -> dict[str, float]:
        """All metrics, and the mean loss as `loss`."""
        loss = float(self.loss(outputs, labels).double().mean())
        return {name: float(value) for name, value in self.metrics(outputs, labels).items()} | {
            "loss": loss
        }


@dataclass(frozen=True)
class Form:
    """What a record is made of, and what is learnt from it.

    Attributes:
        input_shape: of a record, as the model gets it.
        outputs: how many numbers the model gives: the classes, or as many as a label has.
        input_type, label_type: `float32` or `int64`.
        label_shape: of a record's label.
        task: its name.
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
    """The task of that name, a key of TASKS or `module:callable`.

    Raises:
        ConfigError: there is none, or it is no task.
    """
    task = find("data.task", name, TASKS)
    if callable(task):
        task = task()
    if not isinstance(task, Task):
        raise ConfigError(f"data.task {name} must be a shufl.Task or return one, got {task!r}")
    return task


def loss_of(name: str) -> Loss:
    """The task's loss; it can be pickled."""
    return load_task(name).loss if name in TASKS else functools.partial(_loss, name)


def _loss(name: str, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return load_task(name).loss(outputs, labels)


def _accuracy(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Share of records whose largest score is their label's; the mean F1 of the classes.

    Of classes that are in the labels or the predictions.
    """
    guesses, classes = scores.argmax(dim=1), scores.shape[1]
    right, guessed, there = (
        each.bincount(minlength=classes).double()
        for each in (labels[guesses == labels], guesses, labels)
    )
    either = guessed + there
    f1 = 2 * right[either > 0] / either[either > 0]
    return {"accuracy": float(right.sum() / len(labels)), "macro_f1": float(f1.mean())}


def _squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.reshape(len(labels), -1) - labels.reshape(len(labels), -1)).square().mean(1)


def _errors(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The root of the mean squared error, and the mean absolute one."""
    errors = (outputs.reshape(labels.shape) - labels).double()
    return {"rmse": float(errors.square().mean().sqrt()), "mae": float(errors.abs().mean())}


PADDING = -100
"""A label that no token has: such places of a record do not count."""


def _token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each record's tokens: scores (r, t, c), labels (r, t)."""
    losses = functional.cross_entropy(
        scores.transpose(1, 2), labels, ignore_index=PADDING, reduction="none"
    )
    return losses.sum(1) / (labels != PADDING).sum(1).clamp(min=1)


def _tokens_told(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Share of tokens that are predicted correctly, and the perplexity."""
    counted = labels != PADDING
    right = (scores.argmax(dim=2) == labels)[counted].double().mean()
    loss = functional.cross_entropy(scores[counted].double(), labels[counted])
    return {"accuracy": float(right), "perplexity": float(loss.exp())}


CLASSIFICATION = Task(cross_entropy, _accuracy, "accuracy")
REGRESSION = Task(_squared_error, _errors, "rmse")
NEXT_TOKEN = Task(_token_loss, _tokens_told, "accuracy")
