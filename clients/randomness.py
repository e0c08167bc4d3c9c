"""Where check-in coins and Gaussian noise come from.

Simulation: a pure function of (seed, round, user), so that every engine and every number of workers
draws the same coins and the same noise. Deployment: the operating system's entropy, nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
from scipy import special

# separate Philox keys, so the streams never overlap
_COIN, _NOISE, _TRAINING, _BLANKET, _SUMMED_NOISE = 1, 2, 3, 4, 5

_BLOCK = 2**18  # coins drawn at once: they stay in a core's cache


class Randomness(Protocol):
    """The draws a client makes."""

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """Whether each of `users` (int, shape (u,)) checks in, bool of shape (u,)."""
        ...

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """Which of the ids 0 to `users` - 1 check in, by the same coins: int64, increasing."""
        ...

    def standard_normal(self, round: int, user: int, size: int) -> np.ndarray:
        """`size` independent N(0, 1) draws for one user's report, float64 of shape (size,)."""
        ...

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """One draw of N(0, reports I), the law of a sum of that many `standard_normal`.

        For simulation, where only the sum is wanted; no client could send it.
        """
        ...

    def blanket(self, round: int, user: int, probability: float) -> bool:
        """Whether a user who checked in sends a blanket: the noise without its update."""
        ...

    def training_seed(self, round: int, user: int) -> int:
        """A 63-bit seed for the order of records in local training (protects nothing)."""
        ...


class SeededRandomness:
    """Reproducible draws for simulation: Philox keyed by (seed, purpose, round), counter = user.

    Not for deployment: whoever knows the seed can subtract the noise.
    """

    def __init__(self, seed: int):
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {seed}")
        self._seed = seed

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """User u's coin is the u-th uniform of the round's stream, whoever else is asked."""
        if len(users) == 0:
            return np.zeros(0, dtype=bool)
        uniforms = self._stream(_COIN, round).random(int(np.max(users)) + 1)
        return uniforms[users] < rate

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """By the coins of `check_ins`."""
        return _below(self._stream(_COIN, round).random, users, rate)

    def standard_normal(self, round: int, user: int, size: int) -> np.ndarray:
        """N(0, 1) draws of the stream (seed, round, user)."""
        return self._stream(_NOISE, round, user).standard_normal(size)

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """From the stream (seed, round) of its own; not the sum of the users' streams."""
        return math.sqrt(reports) * self._stream(_SUMMED_NOISE, round).standard_normal(size)

    def blanket(self, round: int, user: int, probability: float) -> bool:
        """A coin of the stream (seed, round, user)."""
        return bool(self._stream(_BLANKET, round, user).random() < probability)

    def training_seed(self, round: int, user: int) -> int:
        """A seed from the stream (seed, round, user)."""
        return int(self._stream(_TRAINING, round, user).integers(2**63))

    def _stream(self, purpose: int, round: int, user: int = 0) -> np.random.Generator:
        key = np.array([self._seed, (purpose << 32) | round], dtype=np.uint64)
        counter = np.array([0, 0, 0, user], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


class SystemRandomness:
    """Draws from the operating system's cryptographic generator, for deployment."""

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """Independent coins with probability `rate` (to 2^-52)."""
        return _system_uniform(len(users)) < rate

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """By coins like those of `check_ins`."""
        return _below(_system_uniform, users, rate)

    def standard_normal(self, round: int, user: int, size: int) -> np.ndarray:
        """N(0, 1) draws, each the sum of four halved normals.

        The holes of one double-precision normal can identify the value it was added to; against a
        sum of several that attack is infeasible (Holohan and Braghin, "Secure random sampling in
        differential privacy", 2021). Opacus' secure mode does the same.
        """
        return special.ndtri(_system_uniform(4 * size)).reshape(4, size).sum(axis=0) / 2

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """From one draw of `standard_normal`, scaled."""
        return math.sqrt(reports) * self.standard_normal(round, 0, size)

    def blanket(self, round: int, user: int, probability: float) -> bool:
        """An independent coin with `probability` (to 2^-52)."""
        return bool(_system_uniform(1)[0] < probability)

    def training_seed(self, round: int, user: int) -> int:
        """63 bits of system entropy."""
        return int.from_bytes(os.urandom(8), "little") >> 1


def make_randomness(seed: int | None) -> Randomness:
    """Seeded draws for a seed, the operating system's entropy for None."""
    return SystemRandomness() if seed is None else SeededRandomness(seed)


def _below(uniforms: Callable[[int], np.ndarray], size: int, bound: float) -> np.ndarray:
    """Places among `size` uniforms of those below `bound`; memory grows only with their number."""
    starts = range(0, size, _BLOCK)
    blocks = [
        start + np.flatnonzero(uniforms(min(_BLOCK, size - start)) < bound) for start in starts
    ]
    return np.concatenate(blocks)


def _system_uniform(size: int) -> np.ndarray:
    """Uniforms on the open interval (0, 1), float64 of shape (size,).

    (b + 1/2) / 2^52 with b of 52 bits: exact in float64, symmetric, never 0 or 1.
    """
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(12)
    return (bits + 0.5) * 2.0**-52
