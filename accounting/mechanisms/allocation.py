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


def new_allocation_key() -> bytes:
    """Returns a secret key from the operating system, from which all draws of a device follow."""
    return os.urandom(32)


def simulated_allocation_key(seed: int) -> bytes:
    """Returns the key of a simulation, whose users have no secrets."""
    return hashlib.sha256(f"allocation of {seed}".encode()).digest()


def allocated(key: bytes, round: int, users: np.ndarray, every: int) -> np.ndarray:
    """Tells which users report in a round, which is the same whenever it is asked.

    The draws are ChaCha20's key stream under `key`, which a device keeps on disk: so a restart does
    not draw again. Each of the b rounds of a block is as likely as 1/b, to within 2^-128.

    Args:
        round: Counts from 1.
        users: Their ids, int of shape (u,).
        every: b, from 1 to 10^9.

    Returns:
        Bool of shape (u,).
    """
    if len(users) == 0:
        return np.zeros(0, dtype=bool)
    block, place = divmod(round - 1, every)
    nonce = bytes(8) + block.to_bytes(8, "little")
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    words = stream.update(bytes(4 * _LIMBS * (int(users.max()) + 1)))
    limbs = np.frombuffer(words, dtype="<u4").reshape(-1, _LIMBS)[users].astype(np.uint64)
    drawn = np.zeros(len(users), dtype=np.uint64)
    for limb in limbs.T:  # the whole part of b times a number of [0, 1), the lowest limb first
        drawn = (limb * np.uint64(every) + drawn) >> np.uint64(32)
    chosen: np.ndarray = drawn == place
    return chosen
