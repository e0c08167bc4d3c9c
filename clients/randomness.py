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
_COIN, _NOISE, _TRAINING, _SUMMED_NOISE = 1, 2, 3, 5

_BLOCK = 2**18  # coins drawn at once: they stay in a core's cache


class Randomness(Protocol):
    """The draws a client makes."""

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """Whether each of `users` (int, shape (u,)) checks in, bool of shape (u,)."""
        ...

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """Which of the ids 0 to `users` - 1 check in, by the same coins: int64, increasing."""
        ...

    def standard_normal(self, round: int, users: np.ndarray, size: int) -> np.ndarray:
        """Independent N(0, 1) draws for the reports of `users` (int, shape (k,)).

        Shape (k, size): float64 of the system's entropy, float32 of a seed.
        """
        ...

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """One draw of N(0, reports I), the law of a sum of that many `standard_normal`.

        For simulation, where only the sum is wanted; no client could send it.
        """
        ...

    def training_seeds(self, round: int, users: np.ndarray) -> np.ndarray:
        """A seed for the local training of each of `users`: uint64 of shape (k,).

        Of the order of records, and of a model's own draws such as dropout; protects nothing.
        """
        ...


class SeededRandomness:
    """Reproducible draws for simulation: Philox keyed by (seed, purpose, round).

    Not for deployment: whoever knows the seed can subtract the noise.
    """

    def __init__(self, seed: int):
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {seed}")
        self._seed = seed

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """User u's coin is the u-th uniform of the round's stream, whoever else is asked.

        Only those between users are drawn too.
        """
        if len(users) == 0:
            return np.zeros(0, dtype=bool)
        block = int(users.min()) // 4  # Philox makes four at a time
        uniforms = self._stream(_COIN, round, block).random(int(users.max()) + 1 - 4 * block)
        return uniforms[users - 4 * block] < rate

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """By the coins of `check_ins`."""
        return _below(self._stream(_COIN, round).random, users, rate)

    def standard_normal(self, round: int, users: np.ndarray, size: int) -> np.ndarray:
        """From the stream of each of (seed, round, user), whoever else is asked; see `_normals`."""
        words = np.empty((len(users), -(-size // 2)), dtype=np.uint64)
        stream = self._stream(_NOISE, round).bit_generator
        start = stream.state  # setting it takes a fifth of the time of making another stream
        for row, user in zip(words, users.tolist(), strict=True):
            start["state"]["counter"][3] = user
            stream.state = start
            row[:] = stream.random_raw(len(row))
        return _normals(words)[:, :size]

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """From the stream (seed, round) of its own; not the sum of the users' streams."""
        return math.sqrt(reports) * self._stream(_SUMMED_NOISE, round).standard_normal(size)

    def training_seeds(self, round: int, users: np.ndarray) -> np.ndarray:
        """User u's is the u-th draw of a SplitMix64 that the round's stream seeds."""
        return split_mix(self._stream(_TRAINING, round).integers(2**64, dtype=np.uint64), users)

    def _stream(self, purpose: int, round: int, block: int = 0) -> np.random.Generator:
        key = np.array([self._seed, (purpose << 32) | round], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=block))


class SystemRandomness:
    """Draws from the operating system's cryptographic generator, for deployment."""

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """Independent coins with probability `rate` (to 2^-52)."""
        return _system_uniform(len(users)) < rate

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """By coins like those of `check_ins`."""
        return _below(_system_uniform, users, rate)

    def standard_normal(self, round: int, users: np.ndarray, size: int) -> np.ndarray:
        """N(0, 1) draws, each the sum of four halved normals.

        The holes of one double-precision normal can identify the value it was added to; against a
        sum of several that attack is infeasible (Holohan and Braghin, "Secure random sampling in
        differential privacy", 2021). Opacus' secure mode does the same.
        """
        normals = special.ndtri(_system_uniform(4 * len(users) * size))
        return normals.reshape(4, len(users), size).sum(axis=0) / 2

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """From one draw of `standard_normal`, scaled."""
        return math.sqrt(reports) * self.standard_normal(round, np.arange(1), size)[0]

    def training_seeds(self, round: int, users: np.ndarray) -> np.ndarray:
        """64 bits of system entropy each."""
        return np.frombuffer(os.urandom(8 * len(users)), dtype=np.uint64)


def make_randomness(seed: int | None) -> Randomness:
    """Seeded draws for a seed, the operating system's entropy for None."""
    return SystemRandomness() if seed is None else SeededRandomness(seed)


def split_mix(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The draws at `places` of the SplitMix64 generators with `seeds`, all different for one seed.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". Nothing secret
    may depend on it.

    Args:
        seeds: uint64, of any shape that broadcasts with that of places.
        places: int, from 0.

    Returns:
        uint64 of the broadcast shape.
    """
    mixed = seeds + (places.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


def _normals(words: np.ndarray) -> np.ndarray:
    """Two N(0, 1) draws of each random 64-bit word of (k, w): float32 of shape (k, 2w).

    By Box and Muller 1958, a third of the time of numpy's ziggurat. 32 bits decide the radius: no
    draw lies beyond 6.8, where 1e-11 of the law is.
    """
    rows, size = words.shape
    uniforms = words.view(np.uint32).reshape(rows, 2, size).astype(np.float32) * 2.0**-32
    radius = np.sqrt(-2 * np.log(uniforms[:, 0] + 2.0**-33))
    angle = 2 * np.pi * uniforms[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(rows, 2 * size)


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
