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
"""Any mechanism; of several it is their union, told apart by `name`."""

__all__ = [
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
