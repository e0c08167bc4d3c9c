"""The scattering transform (Bruna and Mallat 2013, "Invariant scattering convolution networks").

An image is convolved with Morlet wavelets of two scales and eight angles. Of the results only the
absolute values are kept, averaged over some 4x4 pixels: the first order. The second order does the
same to the absolute values of the fine scale, with the wavelets of the coarse one. Nothing in it is
learnt. Filters, sizes and order are those of kymatio (Andreux et al. 2020) for J = 2 and L = 8.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch.nn import functional

from shufl.learning.section import ConfigError

COEFFICIENTS = 81
"""Coefficients of each channel of an image, at each position."""

_ANGLES = 8  # L
_STEP = 4  # 2^J: pixels from one position to the next
_LEAST_PIXELS = 5  # with fewer the margins are longer than what they mirror
_WIDTH, _FREQUENCY, _SLANT = 0.8, 0.75 * math.pi, 0.5  # of the fine wavelets


@torch.no_grad()
def scattering(images: torch.Tensor) -> torch.Tensor:
    """The scattering transform of each image, channel by channel.

    The images are float32 of shape (r, channels, height, width).

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
    height, width = (_with_margins(pixels) for pixels in images.shape[2:])
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


def _with_margins(pixels: int) -> int:
    """The length of a side with its mirrored margins: a multiple of the step."""
    return (pixels // _STEP + 2) * _STEP


def _at_half(spectrum: torch.Tensor) -> torch.Tensor:
    """Every second pixel in both directions of what has this spectrum."""
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
    """What takes Gaussian means along a side, of which scale 1 has every second pixel only.

    Shape (positions, pixels / 2^scale); the outermost positions, within the margins, are left out.
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
