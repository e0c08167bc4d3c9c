"""Whitening of scattering features by the covariance of images that nobody has taken.

Where gradients are clipped and noisy, a linear model learns along each direction of its inputs at a
pace that their variance sets. The variances of scattering features are up to 10^4 apart, so that a
run ends before it has learnt along most of them; whitening makes them alike. A covariance of users'
images would tell of them. This one is of dead leaves (Lee, Mumford and Huang 2001, "Occlusion
models for natural images"): ellipses of random place, size, direction and brightness, one over
another.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_IMAGES, _PIXELS, _LEAVES = 500, 32, 12
_KEY = 2001  # of the random numbers: the images are always the same
_RIDGE = 0.3  # of the mean variance: directions that hardly vary are not blown up to noise


def dead_leaves() -> torch.Tensor:
    """Images of random ellipses, each of mean 0 and variance 1: float32 (500, 1, 32, 32)."""
    random = np.random.Generator(np.random.Philox(key=_KEY))
    y, x = np.mgrid[:_PIXELS, :_PIXELS] + 0.5
    images = np.zeros((_IMAGES, _PIXELS, _PIXELS))
    for _ in range(_LEAVES):
        lowest, highest = [0, 0, 0, 0.03, 0.03, 0], [math.pi, 1, 1, 0.43, 0.43, 1]
        drawn = random.uniform(lowest, highest, (_IMAGES, 6)).T[..., None, None]
        angle, (top, left, height, width), brightness = drawn[0], drawn[1:5] * _PIXELS, drawn[5]
        along = (y - top) * np.cos(angle) + (x - left) * np.sin(angle)
        across = (x - left) * np.cos(angle) - (y - top) * np.sin(angle)
        inside = (along / height) ** 2 + (across / width) ** 2 < 1
        images = np.where(inside, brightness, images)
    images -= images.mean((1, 2), keepdims=True)
    images /= images.std((1, 2), keepdims=True)
    return torch.from_numpy(images).float().unsqueeze(1)


def whitening(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes channels uncorrelated, and of variance 1 where they vary at all.

    The features have shape (r, channels, height, width). Returns the channels' means, of shape
    (channels,), and the symmetric matrix that multiplies what is left without them, of shape
    (channels, channels).
    """
    samples = features.double().movedim(1, -1).flatten(0, -2)
    variances, directions = torch.linalg.eigh(samples.T.cov(correction=0))
    scales = (variances + _RIDGE * variances.mean()).rsqrt()
    return samples.mean(0).float(), ((directions * scales) @ directions.T).float()


def whitened(features: torch.Tensor, mean: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Features of shape (r, channels, height, width), centred and multiplied, of the same shape."""
    return ((features.movedim(1, -1) - mean) @ matrix).movedim(-1, 1)
