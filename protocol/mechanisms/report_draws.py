"""What a report draws: numbers of a seed, or random words that stand for as many digits as needed.

A draw of a seed is a float, N(0, 1) as it is. A draw of the operating system's entropy is a word,
uint64: the first 64 of infinitely many random bits. The others are drawn when a decision needs
them, so that every decision here has exactly the probability of real numbers, however small.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
from scipy import special

AT_ONCE = 2**15  # numbers made at once: they stay in a core's cache
_MORE = 64  # bits drawn at a time, and digits computed beyond the bits that are compared


class Uniform:
    """A uniform number U of (0, 1); bits after the `first` ones are drawn as they are needed."""

    def __init__(self, first: int, bits: int = 64) -> None:
        self._first, self._bits = first, bits

    def below(self, bound: Callable[[Any], Any]) -> bool:
        """Whether U is below a number.

        `bound` computes the number in the mpmath context that it is given, to its precision.
        """
        digits = self._digits
        while True:
            digits.prec = self._bits + _MORE
            at = int(digits.floor(digits.ldexp(bound(digits), self._bits)))
            if abs(at - self._first) > 1:  # 1: `at` may be rounded to the wrong side
                return self._first < at
            self._draw_more()

    @functools.cached_property
    def _digits(self) -> Any:
        return mpmath.MPContext()  # of its own: other threads may use mpmath too

    def times(self, parts: int) -> int:
        """The whole part of `parts` U: each of 0 to `parts` - 1 is equally likely."""
        while True:
            part = self._first * parts >> self._bits
            if (self._first + 1) * parts - 1 >> self._bits == part:
                return part
            self._draw_more()

    def _draw_more(self) -> None:
        self._first = self._first << _MORE | int.from_bytes(os.urandom(_MORE // 8), "big")
        self._bits += _MORE


class Normal:
    """A N(0, 1) draw that can be compared with any number.

    Its sign is the last bit of its word. The 63 others begin the bits of U in (0, 1/2), the
    probability of a draw of this sign that is farther from 0.
    """

    def __init__(self, word: int) -> None:
        self._positive = bool(word & 1)
        self._beyond = Uniform(word >> 1)

    def exceeds(self, bound: Fraction) -> bool:
        """Whether the draw is above `bound`."""
        if (bound > 0) != self._positive:
            return self._positive

        def beyond(digits: Any) -> Any:
            distance = digits.mpf(abs(bound.numerator)) / bound.denominator
            return digits.erfc(distance / digits.sqrt(2)) / 2

        return self._beyond.below(beyond) == self._positive


def to_normals(draws: np.ndarray) -> np.ndarray:
    """The draws as N(0, 1) floats: draws of a seed as they are, words as float64.

    Words of 2^37 or more give the draw to within 4e-12, and nearly all of them to within 1e-15.
    Smaller words stand for draws beyond 5.7 deviations, and give the middle of their interval.
    """
    if draws.dtype != np.uint64:
        return draws
    normals = np.empty(draws.shape)
    given, made = draws.ravel(), normals.ravel()
    for start in range(0, len(given), AT_ONCE):
        words, part = given[start : start + AT_ONCE], made[start : start + AT_ONCE]
        np.add(words >> np.uint64(1), 0.5, out=part)
        part *= 2.0**-64
        special.ndtri(part, out=part)
        part *= 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    return normals


def coins(draws: np.ndarray, chance: float | Fraction) -> np.ndarray:
    """Tosses a coin of exactly this probability with each draw: bool, of the draws' shape."""
    if draws.dtype != np.uint64:
        return np.asarray(draws.astype(np.float64) < special.ndtri(float(chance)))
    numerator, denominator = chance.as_integer_ratio()
    edge = np.uint64(min((numerator << 64) // denominator, 2**64 - 1))
    heads = draws < edge
    for place in np.flatnonzero(draws == edge).tolist():
        heads[place] = Uniform(int(draws[place])).below(lambda it: it.mpf(numerator) / denominator)
    return heads


def place_of(draw: np.number, places: int) -> int:
    """One of 0 to `places` - 1, all equally likely."""
    if draw.dtype == np.uint64:
        return Uniform(int(draw)).times(places)
    return min(int(special.ndtr(float(draw)) * places), places - 1)
