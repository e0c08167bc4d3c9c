"""Where check-in coins, Gaussian noise and the number of blankets come from.

Simulation: a pure function of (seed, round, user), so that every engine and every number of workers
draws the same coins and the same noise. Deployment: the operating system's entropy, nothing else;
the many words of coins and noise from a stream cipher that it keys afresh for every call.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterator

import mpmath
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import special

from shufl.protocol.mechanisms.report_draws import coins, to_normals

# separate Philox keys, so the streams never overlap
_COIN, _NOISE, _TRAINING, _SUMMED_NOISE, _BLANKETS, _BLANKET_NOISE = 1, 2, 3, 5, 6, 7

_BLOCK = 2**18  # numbers drawn at once: they stay in a core's cache
_ZEROS = bytes(8 * _BLOCK)
_NEVER = 2.0**-128  # of a round: docs/theory/gaussian.md, section 7, says what it adds to δ
_BITS = 256  # of the uniform that the number of blankets is the inverse of


class SeededRandomness:
    """Reproducible draws for simulation, as those of `SystemRandomness`.

    The streams are Philox, keyed by (seed, purpose, round).

    Not for deployment: whoever knows the seed can subtract the noise, and it has the laws to some
    ten digits only. Simulated users have no secrets.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """By the coins of `checked_in`, whoever else is asked."""
        return np.isin(users, self.checked_in(round, int(users.max(initial=0)) + 1, rate))

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """User u's coin is the u-th uniform of the round's stream."""
        uniforms = self._stream(_COIN, round).random
        return _places_of(lambda size: uniforms(size) < rate, users)

    def standard_normal(self, round: int, users: np.ndarray, size: int) -> np.ndarray:
        """Float32, from the stream of (seed, round, user), whoever else is asked."""
        return self._noise(_NOISE, round, users, size)

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """From the stream (seed, round) of its own; not the sum of the users' streams."""
        return math.sqrt(reports) * self._stream(_SUMMED_NOISE, round).standard_normal(size)

    def training_seeds(self, round: int, users: np.ndarray) -> np.ndarray:
        """User u's is the u-th draw of a SplitMix64 that the round's stream seeds."""
        start = self._stream(_TRAINING, round).integers(2**64, size=1, dtype=np.uint64)
        return split_mix(start, users)

    def number_of_blankets(self, round: int, expected: float) -> int:
        """From the stream (seed, round) of its own."""
        drawn = int(self._stream(_BLANKETS, round).poisson(expected))
        return min(drawn, most_blankets(expected))

    def blanket_noise(self, round: int, blankets: np.ndarray, size: int) -> np.ndarray:
        """From the stream of each of (seed, round, blanket), whichever others are asked."""
        return self._noise(_BLANKET_NOISE, round, blankets, size)

    def blanket_pieces(
        self, round: int, blanket: int, size: int
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """The draws of `blanket_noise`, all made before the first piece is given."""
        (noise,) = self.blanket_noise(round, np.array([blanket]), size)
        for places in _parts(size):
            yield places, noise[places]

    def _noise(self, purpose: int, round: int, numbers: np.ndarray, size: int) -> np.ndarray:
        normals = np.empty((len(numbers), size), dtype=np.float32)
        stream = self._stream(purpose, round).bit_generator
        start = stream.state  # setting it takes a fifth of the time of making another stream
        rows = max(1, _BLOCK // size)  # many: the fewer calls, the less threads wait for each other
        for first in range(0, len(numbers), rows):
            part = normals[first : first + rows]
            words = np.empty((len(part), -(-size // 2)), dtype=np.uint64)
            for row, number in zip(words, numbers[first : first + rows].tolist(), strict=True):
                start["state"]["counter"][3] = number
                stream.state = start
                row[:] = stream.random_raw(len(row))
            _make_normals(words, part)
        return normals

    def _stream(self, purpose: int, round: int) -> np.random.Generator:
        key = np.array([self._seed, (purpose << 32) | round], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


class SystemRandomness:
    """Draws from the operating system's cryptographic generator, for deployment."""

    def check_ins(self, round: int, users: np.ndarray, rate: float) -> np.ndarray:
        """Whether each of `users` (int, shape (u,)) checks in, bool of shape (u,).

        The coins are independent and have exactly the probability `rate`.
        """
        return coins(_secret_words(len(users)), rate)

    def checked_in(self, round: int, users: int, rate: float) -> np.ndarray:
        """Which of the ids 0 to `users` - 1 check in, by such coins: int64, increasing."""
        return _places_of(lambda size: coins(_secret_words(size), rate), users)

    def standard_normal(self, round: int, users: np.ndarray, size: int) -> np.ndarray:
        """Independent N(0, 1) draws for the reports of `users` (int, shape (k,)), (k, size).

        They are uint64, words that stand for draws of any precision; `to_normals` makes floats of
        them. A double-precision normal has holes that can identify the value it was added to
        (Mironov 2012, "On significance of the least significant bits for differential privacy"). So
        a report is decided by the word, with more bits where it needs them:
        docs/theory/gaussian.md.
        """
        return _secret_words(len(users) * size).reshape(len(users), size)

    def summed_noise(self, round: int, reports: int, size: int) -> np.ndarray:
        """One draw of N(0, reports I), the law of a sum of that many `standard_normal`.

        For simulation, where only the sum is wanted; no client could send it.
        """
        return math.sqrt(reports) * to_normals(self.standard_normal(round, np.arange(1), size)[0])

    def training_seeds(self, round: int, users: np.ndarray) -> np.ndarray:
        """A seed for the local training of each of `users`: uint64 of shape (k,).

        Of the order of records, and of a model's own draws such as dropout; protects nothing.
        """
        return np.frombuffer(os.urandom(8 * len(users)), dtype=np.uint64)

    def number_of_blankets(self, round: int, expected: float) -> int:
        """How many blankets a shuffler adds to a round: a draw of Poisson(`expected`).

        At most `most_blankets(expected)`, by inversion of one uniform of 256 bits.
        """
        if expected == 0:
            return 0
        first, steps = _poisson_steps(expected)
        return first + bisect.bisect_right(steps, secrets.randbits(_BITS))

    def blanket_noise(self, round: int, blankets: np.ndarray, size: int) -> np.ndarray:
        """Like `standard_normal`, for `blankets` of a round, numbered from 0 (int, shape (k,))."""
        return self.standard_normal(round, blankets, size)

    def blanket_pieces(
        self, round: int, blanket: int, size: int
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """The draws of one blanket piece by piece, so that a long one takes little memory.

        Yields:
            Which of its `size` draws, in order, and those: of shape (at most 2^18,).
        """
        for places in _parts(size):
            yield places, _secret_words(places.stop - places.start)


Randomness = SeededRandomness | SystemRandomness
"""The draws that a client makes, and those that a shuffler makes for its blankets."""


def make_randomness(seed: int | None) -> Randomness:
    """Seeded draws for a seed, the operating system's entropy for None."""
    return SystemRandomness() if seed is None else SeededRandomness(seed)


def most_blankets(expected: float) -> int:
    """A number that Poisson(`expected`) reaches with probability below 2^-128; 0 for 0.

    A shuffler makes this many blankets in every round, so that the time does not tell how many of
    them it keeps.
    """
    if expected == 0:
        return 0
    numbers = range(1, math.ceil(expected + 20 * math.sqrt(expected) + 60))
    reached = bisect.bisect_left(
        numbers, True, key=lambda it: special.pdtrc(it - 1, expected) < _NEVER
    )
    return numbers[reached]


def least_delta(rounds: int) -> float:
    """The least δ of a plan of this many rounds: `_NEVER` adds 1.2e-16 of it to δ."""
    return rounds / 1e22


@functools.lru_cache(maxsize=16)
def _poisson_steps(expected: float) -> tuple[int, list[int]]:
    """Where the distribution function of Poisson(`expected`) has its steps, in units of 2^-256.

    Returns:
        The largest number with less than 2^-128 of the law up to it, or 0, and the steps at it and
        at all others below `most_blankets`.
    """
    most = most_blankets(expected)
    likely = bisect.bisect_left(
        range(most), True, key=lambda it: special.pdtr(it, expected) >= _NEVER
    )
    first = max(likely - 1, 0)
    digits = mpmath.MPContext()
    digits.prec = 2 * _BITS
    mean = digits.mpf(expected)
    start = digits.exp(first * digits.log(mean) - mean - digits.loggamma(first + 1))
    masses = itertools.accumulate(
        range(first + 1, most), lambda mass, number: mass * mean / number, initial=start
    )
    return first, [int(digits.ldexp(step, _BITS)) for step in itertools.accumulate(masses)]


def seed_of_shuffler(seed: int | None, shuffler: int) -> int | None:
    """The seed of the blankets of one of a simulation's shufflers, numbered from 0.

    None, the operating system's entropy, stays None.
    """
    if seed is None:
        return None
    name = f"shuffler {shuffler} of {seed}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:7], "big")


def split_mix(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The draws at `places` of the SplitMix64 generators with `seeds`, all different for one seed.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". Nothing secret
    may depend on it.

    `seeds` are uint64, `places` int from 0. Returns uint64 of their broadcast shape.
    """
    mixed = seeds + (places.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = np.bitwise_xor(mixed, mixed >> np.uint64(shift)) * np.uint64(factor)
    return np.asarray(np.bitwise_xor(mixed, mixed >> np.uint64(31)))


def _make_normals(words: np.ndarray, normals: np.ndarray) -> None:
    """Makes N(0, 1) draws, two of each random 64-bit word: by Box and Muller 1958.

    That takes a quarter of the time of numpy's ziggurat. 32 bits decide the radius: no draw lies
    beyond 6.8, where 1e-11 of the law is.

    The words are uint64 of shape (k, w). The draws go into `normals`, float32 of shape (k, 2w) or
    (k, 2w - 1).
    """
    rows, size = words.shape
    halves = words.view(np.uint32).reshape(rows, 2, size)
    radius, angle = halves[:, 0].astype(np.float32), halves[:, 1].astype(np.float32)
    radius *= 2.0**-32
    radius += 2.0**-33
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle *= 2.0**-32
    angle *= 2 * np.pi
    first, second = normals[:, :size], normals[:, size:]
    np.cos(angle, out=first)
    first *= radius
    rest = second.shape[1]
    np.sin(angle[:, :rest], out=second)
    second *= radius[:, :rest]


def _secret_words(size: int) -> np.ndarray:
    """Random words, uint64 of shape (size,).

    ChaCha20's key stream under a key from the operating system that is used this once.
    """
    stream = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
    words = np.empty(size, dtype=np.uint64)
    for places in _parts(size):
        part = words[places]
        stream.update_into(_ZEROS[: part.nbytes], part.data.cast("B"))
    return words


def _parts(size: int) -> Iterator[slice]:
    """Slices of the places 0 to `size` - 1; the numbers of each are drawn at once."""
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))


def _places_of(coins_of: Callable[[int], np.ndarray], size: int) -> np.ndarray:
    """Places of the heads among `size` coins; memory grows only with their number."""
    return np.concatenate(
        [part.start + np.flatnonzero(coins_of(part.stop - part.start)) for part in _parts(size)]
    )
