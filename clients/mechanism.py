"""The local Gaussian mechanism: clip to C, add N(0, (zC)^2 I)."""

from __future__ import annotations

import numpy as np
from scipy import linalg


def clip(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Scales an update down to L2 norm at most `clip_norm`; shorter ones stay as they are.

    A zero vector stays zero. An update with a NaN or infinite entry has no direction to keep and
    becomes the zero vector, so that the sensitivity bound holds for every input.

    Args:
        update: shape (d,), any float type.
        clip_norm: C > 0.

    Returns:
        float64 of shape (d,).
    """
    wide = np.asarray(update, dtype=np.float64)
    if not np.isfinite(wide).all():
        return np.zeros_like(wide)
    norm = float(linalg.norm(wide, check_finite=False))  # BLAS nrm2: no overflow on the way
    return wide if norm <= clip_norm else wide * (clip_norm / norm)


def privatise(
    update: np.ndarray, clip_norm: float, noise_multiplier: float, standard_normal: np.ndarray
) -> np.ndarray:
    """One report: clip(update, C) + zC * standard_normal.

    The sum is formed in float64 and rounded once, after the noise: rounding is post-processing.

    Args:
        update: shape (d,).
        clip_norm: C > 0.
        noise_multiplier: z, the noise's standard deviation in units of C.
        standard_normal: independent N(0, 1) draws, shape (d,).

    Returns:
        float32 of shape (d,).
    """
    noisy = clip(update, clip_norm) + noise_multiplier * clip_norm * standard_normal
    return noisy.astype(np.float32)
