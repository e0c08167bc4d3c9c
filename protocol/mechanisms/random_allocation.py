"""Random allocation: a device reports in one of every b rounds, and draws itself in which.

Feldman and Shenfeld 2025, "Privacy amplification by random allocation". Rounds 1 to b are the first
block, the next b the second, and so on; the draws of different blocks and users are independent.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

_LIMBS = 4  # of 32 bits, in the random number that decides a draw
_AT_ONCE = 2**16  # users whose draws are made at once


def new_allocation_key() -> bytes:
    """Returns a secret key from the operating system, from which all draws of a device follow."""
    return os.urandom(32)


def simulated_allocation_key(seed: int) -> bytes:
    """Returns the key of a simulation, whose users have no secrets."""
    return hashlib.sha256(f"allocation of {seed}".encode()).digest()


def allocated(key: bytes, round: int, users: np.ndarray, every: int) -> np.ndarray:
    """Tells which users report in a round; the answer never changes.

    The draws are ChaCha20's key stream under `key`, which a device keeps on disk: so a restart does
    not draw again. Each of the b rounds of a block has probability 1/b, to within 2^-128.

    Args:
        key: 32 bytes.
        round: Counts from 1.
        users: Their ids, int of shape (u,).
        every: b, from 1 to 10^9.

    Returns:
        Bool of shape (u,).
    """
    return np.isin(users, all_allocated(key, round, int(users.max(initial=-1)) + 1, every))


def all_allocated(key: bytes, round: int, users: int, every: int) -> np.ndarray:
    """Returns which of the ids 0 to `users` - 1 report in a round: int64, increasing.

    Memory grows only with the number of those that do.
    """
    block, place = divmod(round - 1, every)
    found = [np.zeros(0, dtype=np.int64)]
    for start in range(0, users, _AT_ONCE):
        drawn = _drawn(key, block, start, min(_AT_ONCE, users - start), every)
        found.append(start + np.flatnonzero(drawn == place))
    return np.concatenate(found)


def _drawn(key: bytes, block: int, start: int, users: int, every: int) -> np.ndarray:
    """What the users from `start` on have drawn for a block: uint64, from 0 to b - 1.

    ChaCha20 makes the 128 bits of four users at a time; its counter is the first half of the nonce.
    """
    nonce = (start // 4).to_bytes(8, "little") + block.to_bytes(8, "little")
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    words = stream.update(bytes(4 * _LIMBS * users))
    drawn = np.zeros(users, dtype=np.uint64)
    for limb in np.frombuffer(words, dtype="<u4").reshape(users, _LIMBS).T:
        # The whole part of b times a number of [0, 1), the lowest limb first.
        drawn = (limb.astype(np.uint64) * np.uint64(every) + drawn) >> np.uint64(32)
    return drawn
