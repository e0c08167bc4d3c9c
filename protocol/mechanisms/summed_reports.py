"""What a node sends where the shuffler hands over sums: whole numbers, noise, and a mask.

An update is clipped to C and rounded to whole numbers of a unit u = C / (10 √d). Its node adds the
rounded noise of all its users, and hides the result by the key stream of a seed, modulo 2^32.
docs/theory/blanket.md, section 10, says why rounded noises add up to what a real Gaussian would be.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from shufl.protocol.mechanisms.gaussian import clip, rounded
from shufl.protocol.text import rounded_up
from shufl.protocol.validation import ConfigError

SEED_BYTES = 32
_UNITS = 10.0  # of a coordinate of an update of length C whose entries are all alike
_LEAST_STEPS = 16.0  # of a node's noise, or the sum of rounded ones is no Gaussian
_MOST_STEPS = 2**40  # far beyond what is seen modulo 2^32
_BITS = 31  # of a sum without its sign
_MORE = 1.0 + 2.0**-50  # covers how far a product of floats and a root are off


def unit_of_sums(clip_norm: float, dimension: int) -> float:
    """Returns u, which one step of the whole numbers stands for."""
    return clip_norm / steps_of_sums(1.0, dimension)


def steps_of_sums(lengths: float, dimension: int) -> float:
    """Returns how many units a length of so many clip norms C has."""
    return lengths * _UNITS * math.sqrt(dimension)


def check_sums(
    longest: float, multiplier: float, central: float, of_node: int | None, dimension: int
) -> None:
    """Refuses sums that 32 bits do not hold, or noise that is too little to be rounded.

    Args:
        longest: how long a sum may be with its noise, in clip norms. If it has 31 bits, so has each
            coordinate of every sum that is accepted.
        multiplier, central: z and σ.
        of_node: the fewest users of a node; None: not known, and z is not checked.
        dimension: d, of the model.

    Raises:
        ConfigError: One line.
    """
    if (bits := math.log2(steps_of_sums(longest, dimension))) > _BITS:
        raise ConfigError(
            f"a sum of updates with {dimension} parameters must have at most {_BITS} bits with "
            f"mixing sum, got {rounded_up(bits)}: take fewer users or a smaller model"
        )
    asked = [("central_noise", central, 1)]
    if of_node is not None:
        asked.append(("noise_multiplier", multiplier, of_node))
    for name, given, users in asked:
        least = _LEAST_STEPS / steps_of_sums(math.sqrt(users), dimension)
        if 0 < given < least:
            raise ConfigError(
                f"{name} must be 0 or at least {rounded_up(least, 3)} with mixing sum, {dimension} "
                f"parameters{f' and nodes of {users} users' * (users > 1)}, got {given:g}"
            )


def whole_update(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Returns the update, clipped, in whole units: int64 of shape (d,), at most C long, exactly.

    Entries are rounded to the nearest whole number. If the vector is then too long, they are
    rounded towards zero instead, and moved a step towards zero as often as it takes. All updates
    take equally long, except where a quotient was rounded up to a whole number, which hardly ever
    happens.
    """
    most = int(_UNITS**2) * update.size  # (C/u)²
    scaled = clip(update, clip_norm) / unit_of_sums(clip_norm, update.size)
    nearest, shorter = np.rint(scaled).astype(np.int64), np.trunc(scaled).astype(np.int64)
    squares = int(nearest @ nearest), int(shorter @ shorter)
    whole = nearest if squares[0] <= most else shorter
    while min(squares) > most:
        whole -= np.sign(whole)
        squares = (int(whole @ whole),) * 2
    return whole


def whole_noise(
    draws: np.ndarray, multiplier: float, users: int, dimension: int | None = None
) -> np.ndarray:
    """Returns the summed noise of `users` users, each N(0, (zC)²), in whole units.

    Args:
        draws: Of a `Randomness`, shape (d,); the result is exactly that of real arithmetic.
        multiplier: z.
        users: How many.
        dimension: The model's number of parameters, where the draws are for some of them only.

    Returns:
        Int64 of shape (d,).
    """
    steps = steps_of_sums(multiplier * math.sqrt(users), dimension or draws.size) * _MORE
    zeros = np.broadcast_to(0.0, draws.size)
    return rounded(zeros, draws, Fraction(steps), 1.0, _MOST_STEPS).astype(np.int64)


def new_seed() -> bytes:
    """A mask's seed, from the operating system."""
    return os.urandom(SEED_BYTES)


def masked(whole: np.ndarray, seed: bytes) -> bytes:
    """A vector of whole numbers, int64 of shape (d,), modulo 2^32 and hidden: 4d bytes."""
    hidden: np.ndarray = whole.astype(np.uint32) + mask(seed, whole.size)
    return hidden.astype("<u4").tobytes()


def mask(seed: bytes, dimension: int) -> np.ndarray:
    """The key stream of a seed of 32 bytes, which is used once: uint32 of shape (d,)."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * dimension)), dtype="<u4")


def signed(total: np.ndarray) -> np.ndarray:
    """A sum modulo 2^32, uint32, as the whole number next to 0: int64."""
    return total.astype(np.uint32).view(np.int32).astype(np.int64)
