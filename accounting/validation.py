"""Checks of single values; each raises one line: name, what is allowed, what was given."""

import math
import numbers
from typing import Any


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value` as an int in [low, high].

    Raises:
        ValueError: Not an integer (a bool is none) or out of range.
    """
    allowed = f"at least {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def real(name: str, value: Any, interval: str) -> float:
    """Returns `value` as a finite float inside an interval written as `(0, 1]` or `[0, inf)`.

    Raises:
        ValueError: Not a finite real number (a bool is none) or outside the interval.
    """
    low_text, high_text = interval[1:-1].split(",")
    low, high = float(low_text), float(high_text)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")
    number = float(value)
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    if not (math.isfinite(number) and above and below):
        raise ValueError(f"{name} must lie in {interval}, got {number}")
    return number


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of the allowed words.

    Raises:
        ValueError: Anything else.
    """
    if not isinstance(value, str) or value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value
