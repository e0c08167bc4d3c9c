"""Datasets of users of unequal size, and models, for each task."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import shufl

USERS, SEED = 12, 5
SIZES = 1 + np.arange(USERS) ** 2 % 9  # from 1 to 8 records


def of_users(**values):
    """A dataset of so many records of users with `SIZES`."""
    owners = np.repeat(np.arange(USERS), SIZES)
    return shufl.Dataset(**{"users": np.random.default_rng(1).permutation(owners)} | values)


RECORDS = int(SIZES.sum())


def houses():
    random = np.random.default_rng(0)
    features = random.standard_normal((RECORDS + 40, 3)).astype("float32")
    labels = (features @ np.float32([[1.0, 0.5], [-1.0, 0.2], [0.3, 0.1]])).astype("float32")
    parts = features[:RECORDS], labels[:RECORDS], features[RECORDS:], labels[RECORDS:]
    return of_users(**dict(zip(PARTS, parts, strict=True)), task="regression")


def owned():
    """The same to classify."""
    parts = (getattr(houses(), part) for part in PARTS)
    kinds = (part if part.shape[1] == 3 else (part[:, 0] > 0).long() for part in parts)
    return of_users(**dict(zip(PARTS, kinds, strict=True)), classes=2)


PARTS = "train_features", "train_labels", "test_features", "test_labels"


def sentences():
    """Each token is one more than the one before, modulo 7; some records are shorter than 6."""
    random = np.random.default_rng(0)
    tokens = (random.integers(7, size=(RECORDS + 40, 1)) + np.arange(7)) % 7
    labels = np.where(
        np.arange(6) < random.integers(1, 7, size=(len(tokens), 1)), tokens[:, 1:], -100
    )
    features = tokens[:, :-1]
    parts = features[:RECORDS], labels[:RECORDS], features[RECORDS:], labels[RECORDS:]
    return of_users(**dict(zip(PARTS, parts, strict=True)), classes=7, task="next-token")


class Bigrams(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        self.vectors, self.scores = nn.Embedding(outputs, 5), nn.Linear(5, outputs)

    def forward(self, tokens):
        assert tokens.dtype == torch.int64
        return self.scores(self.vectors(tokens))


@dataclass
class Scored:
    """What a model of Hugging Face returns: its scores, and perhaps more."""

    logits: torch.Tensor
    hidden_states: None = None


class BigramsWithLogits(Bigrams):
    def forward(self, tokens):
        return Scored(super().forward(tokens))


class Normed(nn.Module):
    """Has batch norm of frozen parameters, with statistics of data that are public."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        norm = nn.BatchNorm1d(4).requires_grad_(False)
        norm.running_mean.uniform_(-2, 2)
        norm.running_var.uniform_(1, 9)
        self.layers = nn.Sequential(nn.Linear(*input_shape, 4), norm, nn.Linear(4, outputs))

    def forward(self, records):
        return {"logits": self.layers(records), "loss": None}


class MeanOfTokens(Bigrams):
    def forward(self, tokens):
        return super().forward(tokens).mean(1)


def pinball(outputs, labels):
    """The loss whose minimum is the 0.9 quantile, of a dictionary."""
    over = labels - outputs["quantile"]
    return torch.maximum(0.9 * over, -0.1 * over).sum(1)


def quantile():
    def covered(outputs, labels):
        return {"coverage": (labels <= outputs["quantile"]).float().mean(), "worst": 3}

    return shufl.Task(pinball, covered, score="coverage")


class Quantile(nn.Linear):
    def __init__(self, input_shape, outputs):
        super().__init__(input_shape[0], outputs)

    def forward(self, records):
        return {"quantile": super().forward(records)}


TASKS = {
    "logits": ("task_world:sentences", "task_world:BigramsWithLogits", "accuracy", []),
    "frozen-norm": ("task_world:owned", "task_world:Normed", "accuracy", []),
    "regression": ("task_world:houses", "logistic-regression", "rmse", []),
    "next-token": ("task_world:sentences", "task_world:Bigrams", "accuracy", []),
    "own": (
        "task_world:houses",
        "task_world:Quantile",
        "coverage",
        ["data.task=task_world:quantile"],
    ),
}
SETTINGS = (
    "privacy.rounds=3", "privacy.minimum_batch=1", "privacy.check_in_rate=0.9", f"seed={SEED}",
    "privacy.noise_multiplier=0.5", "privacy.target_epsilon=1000", "privacy.shuffler_blankets=5",
    "simulation.nodes=2", "training.learning_rate=0.3",
)  # fmt: skip
