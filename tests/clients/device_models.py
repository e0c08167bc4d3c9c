"""Models and records for the child process of a deployed node, which imports them by name."""

import functools
import os
import sys
import time

import torch
from torch import nn

from client_world import WIDTH, make_model, records

SHAPES = []
"""Of what forwards were given."""


class Noting(nn.Module):
    """Notes what shapes its forward is given; a module's state would be put back."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, features):
        SHAPES.append(tuple(features.shape))
        return self.inner(features)


class Troubled(nn.Module):
    """Fails as the first number of the records says, and hangs where its own bias is large."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, features):
        if self.inner.bias[0] > 100:
            time.sleep(10_000)
        match features[0, 0]:
            case 1001:
                raise ZeroDivisionError("of this user")
            case 1002:
                sys.exit(3)
            case 1003:
                os._exit(9)
        return self.inner(features)


def hanging(round):
    """The parameters of a model that hangs."""
    state = {name: value.clone() for name, value in round.model.to_torch_state_dict().items()}
    state["inner.bias"] += 1000
    return state


def troubled_records(user):
    features, labels = records(user)
    return features + (1000 if user in (1, 2, 3) else 0), labels


def troubled_users():
    return troubled_records


def _of_user(sizes, user):
    generator = torch.Generator().manual_seed(user)
    size = sizes.get(user, sizes[None])
    features = torch.randn(size, WIDTH, generator=generator)
    return features, torch.arange(size) % 2


def of_sizes(sizes):
    """Users with random records: as many as `sizes` says of a user, or of None, all others."""
    return functools.partial(_of_user, sizes)
