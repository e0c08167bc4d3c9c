"""The names that a configuration may use, and where to find what they mean.

A mistake in a configuration is said before torch, Flower or Ray are imported: nothing here, nor in
`shufl.simulator.config`, needs them. What a name stands for is imported by
`shufl.simulator.section.find`.
"""

from typing import Literal

DATASETS = {
    "digits": "shufl.simulator.data.datasets:digits",
    "mnist": "shufl.simulator.data.datasets:mnist",
    "fashion-mnist": "shufl.simulator.data.datasets:fashion_mnist",
    "cifar10": "shufl.simulator.data.datasets:cifar10",
    "insteval": "shufl.simulator.data.natural:insteval",
    "movielens": "shufl.simulator.data.natural:movielens",
}
FIXED = set(DATASETS) - {"insteval", "movielens"}
"""Datasets that are the same everywhere; the files of the others are the reader's."""
FEATURES = {"scattering": "shufl.simulator.data.features:whitened_scattering"}
ALGORITHMS = ("fedsgd", "fedavg", "fedprox")
Optimisers = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
]  # fmt: skip
"""The server's: those of torch.optim that need nothing but gradients."""
TASKS = {
    "classification": "shufl.simulator.tasks:CLASSIFICATION",
    "regression": "shufl.simulator.tasks:REGRESSION",
    "next-token": "shufl.simulator.tasks:NEXT_TOKEN",
}
Scheme = Literal["natural", "iid", "by-label", "dirichlet", "repeated"]
"""How records come to users."""
