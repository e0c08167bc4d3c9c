"""What a report is made of: mechanisms and randomness, for devices, shuffler and accountants.

It needs numpy, scipy and `cryptography` only: the shuffler process, which makes blankets, imports
this and nothing else of `accounting`.
"""

from accounting.mechanisms.gaussian import GaussianMechanism, clip
from accounting.mechanisms.randomness import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    make_randomness,
    most_blankets,
    seed_of_shuffler,
    split_mix,
)

Mechanism = GaussianMechanism
"""Any mechanism. Of several it is their union, which plans tell apart by `name`."""

MECHANISMS: dict[str, type[Mechanism]] = {"gaussian": GaussianMechanism}

__all__ = [
    "MECHANISMS",
    "GaussianMechanism",
    "Mechanism",
    "Randomness",
    "SeededRandomness",
    "SystemRandomness",
    "clip",
    "make_randomness",
    "most_blankets",
    "seed_of_shuffler",
    "split_mix",
]
