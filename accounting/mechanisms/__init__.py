"""What a report is made of: the randomiser and its randomness, for the device and the shuffler.

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

__all__ = [
    "GaussianMechanism",
    "Randomness",
    "SeededRandomness",
    "SystemRandomness",
    "clip",
    "make_randomness",
    "most_blankets",
    "seed_of_shuffler",
    "split_mix",
]
