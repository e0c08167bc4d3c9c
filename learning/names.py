"""The names that a configuration may use, and where to find what they mean.

A mistake in a configuration is said before torch, Flower or Ray are imported: nothing here, nor in
`shufl.learning.config`, needs them. What a name stands for is imported by
`shufl.learning.section.find`.
"""

from typing import Literal

DATASETS = {
    "digits": "shufl.learning.data.datasets:digits",
    "mnist": "shufl.learning.data.datasets:mnist",
    "fashion-mnist": "shufl.learning.data.datasets:fashion_mnist",
    "cifar10": "shufl.learning.data.datasets:cifar10",
    "insteval": "shufl.learning.data.natural:insteval",
    "movielens": "shufl.learning.data.natural:movielens",
}
FIXED = set(DATASETS) - {"insteval", "movielens"}
"""Datasets that are the same everywhere; the files of the others are the reader's."""
FEATURES = {"scattering": "shufl.learning.data.features:whitened_scattering"}
MOVED = {
    f"shufl.simulator.data.held_out:{name}": f"shufl.learning.data.held_out:{name}"
    for name in ("mnist", "fashion_mnist")
}
"""Names in configurations of 0.1.0, which published results have, and what they mean now."""
ALGORITHMS = ("fedsgd", "fedavg", "fedprox")
Optimisers = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
]  # fmt: skip
"""The server's: those of torch.optim that need nothing but gradients."""
TASKS = {
    "classification": "shufl.learning.tasks:CLASSIFICATION",
    "regression": "shufl.learning.tasks:REGRESSION",
    "next-token": "shufl.learning.tasks:NEXT_TOKEN",
}
Scheme = Literal["natural", "iid", "by-label", "dirichlet", "repeated"]
"""How records come to users."""
