"""The scattering transform (Bruna and Mallat 2013, "Invariant scattering convolution networks").

An image is convolved with Morlet wavelets of two scales and eight angles. The first order of
coefficients is the absolute values of the results, averaged over some 4x4 pixels. For the second
order, the absolute values at the fine scale are convolved with the wavelets of the coarse scale,
and their absolute values are averaged. Nothing is learnt. Filters, sizes and order are those of
kymatio (Andreux et al. 2020) for J = 2 and L = 8.

The coefficients are then whitened. With clipped and noisy gradients, the variance of a linear
model's inputs along a direction sets the pace at which it learns there. The variances of scattering
features are up to 10^4 apart, so that a run would end before it has learnt along most directions;
whitening makes the variances alike. The covariance of users' images would reveal something about
them. So the covariance is that of dead leaves (Lee, Mumford and Huang 2001, "Occlusion models for
natural images"): ellipses of random place, size, direction and brightness, one over another.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch.nn import functional

from shufl.protocol.validation import ConfigError

COEFFICIENTS = 81
"""Coefficients of each channel of an image, at each position."""

_ANGLES = 8  # L
_STEP = 4  # 2^J: pixels from one position to the next
_LEAST_PIXELS = 5  # with fewer the margins are longer than what they mirror
_WIDTH, _FREQUENCY, _SLANT = 0.8, 0.75 * math.pi, 0.5  # of the fine wavelets


@torch.no_grad()
def scattering(images: torch.Tensor) -> torch.Tensor:
    """The scattering transform of each image, channel by channel.

    Args:
        images: float32 of shape (r, channels, height, width).

    Returns:
        float32 of shape (r, 81 channels, height // 4, width // 4). The 81 coefficients are the
        mean; 16 of the first order, the fine scale before the coarse one; and 64 of the second, by
        the angle of the fine wavelet and then by that of the coarse one.
    """
    if images.dim() != 4 or min(images.shape[2:]) < _LEAST_PIXELS:
        raise ConfigError(
            f"scattering needs images of at least {_LEAST_PIXELS}x{_LEAST_PIXELS} pixels, records "
            f"of shape (channels, height, width), got {tuple(images.shape[1:])}"
        )
    # With its mirrored margins the length of a side is a multiple of the step.
    height, width = ((pixels // _STEP + 2) * _STEP for pixels in images.shape[2:])
    fine, coarse = (_wavelets(height, width, scale) for scale in (0, 1))
    rows, columns = ([_average(pixels, scale) for scale in (0, 1)] for pixels in (height, width))

    def averaged(u: torch.Tensor, scale: int) -> torch.Tensor:
        return rows[scale] @ u @ columns[scale].mT

    above, left = (
        (padded - pixels) // 2
        for padded, pixels in zip((height, width), images.shape[2:], strict=True)
    )
    margins = (left, width - images.shape[3] - left, above, height - images.shape[2] - above)
    mirrored = functional.pad(images, margins, mode="reflect").unsqueeze(2)
    spectrum = torch.fft.fft2(mirrored)
    first = torch.fft.ifft2(spectrum * fine).abs()
    first_coarse = _at_half(spectrum * coarse).abs()
    second = _at_half(torch.fft.fft2(first).unsqueeze(3) * coarse).abs().flatten(2, 3)
    levels = (mirrored, 0), (first, 0), (first_coarse, 1), (second, 1)
    return torch.cat([averaged(u, scale) for u, scale in levels], dim=2).flatten(1, 2)


def _at_half(spectrum: torch.Tensor) -> torch.Tensor:
    """Every second pixel, in both directions, of the image with this spectrum."""
    for axis in (-2, -1):
        spectrum = torch.stack(spectrum.chunk(2, axis)).mean(0)
    return torch.fft.ifft2(spectrum)


@functools.cache
def _wavelets(height: int, width: int, scale: int) -> torch.Tensor:
    """Spectra of the wavelets of a scale, 0 (fine) or 1, one an angle: (8, height, width)."""
    angles = [(_ANGLES // 2 - 1 - number) * math.pi / _ANGLES for number in range(_ANGLES)]
    spectra = [np.fft.fft2(_morlet(height, width, scale, angle)).real for angle in angles]
    return torch.from_numpy(np.stack(spectra)).float()


def _morlet(height: int, width: int, scale: int, angle: float) -> np.ndarray:
    """A wave of this direction under a Gaussian, less a multiple of the Gaussian: its mean is 0."""
    sigma, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
    y, x = np.mgrid[-2 * height : 3 * height, -2 * width : 3 * width]
    along = y * math.cos(angle) + x * math.sin(angle)
    across = x * math.cos(angle) - y * math.sin(angle)
    envelope = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * sigma**2))
    envelope *= _SLANT / (2 * math.pi * sigma**2)
    wave, envelope = (
        plane.reshape(5, height, 5, width).sum((0, 2))  # as on a torus
        for plane in (envelope * np.exp(1j * frequency * along), envelope)
    )
    return wave - wave.sum() / envelope.sum() * envelope


@functools.cache
def _average(pixels: int, scale: int) -> torch.Tensor:
    """A matrix that takes Gaussian means along a side; at scale 1 the side has half the pixels.

    Shape (positions, pixels / 2^scale); positions within the margins are left out.
    """
    x, sigma = np.arange(-2 * pixels, 3 * pixels), _WIDTH * _STEP / 2
    gaussian = np.exp(-(x**2) / (2 * sigma**2)) / (math.sqrt(2 * math.pi) * sigma)
    spectrum = np.fft.fft(gaussian.reshape(5, pixels).sum(0)).real
    if scale == 1:
        spectrum = np.concatenate([spectrum[: pixels // 4], spectrum[-(pixels // 4) :]])
    kernel = np.fft.ifft(spectrum).real
    positions = np.arange(_STEP, pixels - _STEP, _STEP) // 2**scale
    distances = positions[:, None] - np.arange(len(kernel))
    return torch.from_numpy(kernel[distances]).float()


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
    """The map that makes channels uncorrelated, and of variance 1 where they vary enough.

    Args:
        features: shape (r, channels, height, width).

    Returns:
        The channels' means, of shape (channels,), to be subtracted; and the symmetric matrix, of
        shape (channels, channels), by which the rest is multiplied.
    """
    samples = features.double().movedim(1, -1).flatten(0, -2)
    variances, directions = torch.linalg.eigh(samples.T.cov(correction=0))
    scales = (variances + _RIDGE * variances.mean()).rsqrt()
    return samples.mean(0).float(), ((directions * scales) @ directions.T).float()


def whitened(features: torch.Tensor, mean: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Features of shape (r, channels, height, width), centred and multiplied, of the same shape."""
    return ((features.movedim(1, -1) - mean) @ matrix).movedim(-1, 1)


def whitened_scattering(images: torch.Tensor) -> torch.Tensor:
    """The scattering transform, normalised within each record and then whitened.

    Within a record every three of the 81 coefficients of an image's channel get mean 0 and variance
    1, so that the faint second order counts like the first. Then a matrix that makes the
    coefficients of dead leaves uncorrelated is applied.
    """
    planes = _normalised(scattering(images))
    return whitened(planes, *_of_dead_leaves()).reshape(len(images), -1, *planes.shape[2:])


def _normalised(coefficients: torch.Tensor) -> torch.Tensor:
    planes = coefficients.reshape(-1, COEFFICIENTS, *coefficients.shape[2:])
    return functional.group_norm(planes, COEFFICIENTS // 3)


@functools.cache
def _of_dead_leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return whitening(_normalised(scattering(dead_leaves())))
