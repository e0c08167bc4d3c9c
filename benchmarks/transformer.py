"""`transformer:vision`, a transformer for images, made of layers that Opacus knows too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to shape (r, positions, width)."""
        parts = self.project(self.before(x)).unflatten(2, (3, self.heads, -1))
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class _Vision(nn.Module):
    def __init__(self, patches: nn.Module, positions: int, width: int, depth: int, classes: int):
        super().__init__()
        self.patches, self.positions = patches, nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(_Block(width, heads=width // 32) for _ in range(depth)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """From images to scores."""
        x = self.patches(images).flatten(2).mT
        places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.last(self.norm(self.blocks(x + self.positions(places))).mean(1))


def vision(
    input_shape: tuple[int, ...], classes: int, width: int = 192, depth: int = 6, patch: int = 4
) -> nn.Module:
    """2.7 million parameters for 28x28 and the usual width and depth: 49 patches an image."""
    channels, height, breadth = input_shape
    patches = nn.Conv2d(channels, width, patch, stride=patch)
    positions = (height // patch) * (breadth // patch)
    return _Vision(patches, positions, width, depth, classes)
