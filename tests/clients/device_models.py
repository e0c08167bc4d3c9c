"""Models and records for the child process of a deployed node, which imports them by name."""

import functools
import io
import os
import signal
import sys
import time

import torch
from torch import nn

from client_world import WIDTH, make_model, records

TROUBLES = (
    "raises", "exits", "interrupts", "recurses", "has no memory", "crashes", "is killed",
    "leaves something", "leaves what cannot be put back", "leaves gradients off",
    "leaves another device",
)  # fmt: skip
"""What `Troubled` does, by the number that the records of a user have more, in thousands.

It hangs by one number more than the last.
"""


class Troubled(nn.Module):
    """Does to a user what its records say, where its own bias is large; hangs where it is huge."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.rest = [0.0]
        self.file = io.BytesIO()

    def forward(self, features):
        number = round(features[0, 0].item() / 1000)
        if self.inner.bias[0] > 1 and number:
            self.meet((*TROUBLES, "hangs")[number - 1], features)
        if self.inner.bias[0] > 100:
            time.sleep(10_000)
        return self.inner(features + self.seen) + self.rest[-1] + len(self.file.getvalue())

    def meet(self, trouble, features):
        match trouble:
            case "raises":
                raise ZeroDivisionError(f"of this user, with {features[0, 0]}")
            case "exits":
                sys.exit(3)
            case "interrupts":
                raise KeyboardInterrupt
            case "recurses":
                self.meet(trouble, features)
            case "has no memory":
                torch.empty(2**60)
            case "crashes":
                os._exit(9)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leaves something":
                self.seen += features[0]
                self.rest.append(1.0)
                self.inner.bias.data += 1.0
                raise ArithmeticError
            case "leaves what cannot be put back":
                self.file.write(b"record")
            case "leaves gradients off":
                torch.set_grad_enabled(False)
                raise ArithmeticError
            case "leaves another device":
                torch.set_default_device("meta")
                raise ArithmeticError
            case "hangs":
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
                time.sleep(10_000)


def with_bias(round, more):
    """The parameters of a round's model, with a larger bias."""
    state = {name: value.clone() for name, value in round.model.to_torch_state_dict().items()}
    state["inner.bias"] += more
    return state


def _troubled(numbers, user):
    features, labels = records(user)
    return features + 1000.0 * numbers.get(user, 0), labels


def troubled_users(**numbers):
    """Users whose records say that the model does to them what is numbered so, by "u1" and so on.

    The bias of `Troubled` must be large for that.
    """
    return functools.partial(_troubled, {int(user[1:]): each for user, each in numbers.items()})


class AtOnce(Troubled):
    """Has the trouble from the start on."""

    def __init__(self):
        super().__init__()
        self.inner.bias.data += 10


class Slow(nn.Module):
    """Takes 20 ms at least for a forward."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, features):
        time.sleep(0.02)
        return self.inner(features)


class Fails(nn.Module):
    """Fails for records whose first number is negative."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, features):
        if (features < 0).any():
            raise LookupError(f"the record has {features[0, 0]}")
        return self.inner(features)


def negative_records(whose, user):
    """Records with which `Fails` fails, of these users."""
    features, labels = records(user)
    return features - (1234.5 if user in whose else 0.0), labels


def _of_user(sizes, user):
    generator = torch.Generator().manual_seed(user)
    size = sizes.get(user, sizes[None])
    features = torch.randn(size, WIDTH, generator=generator)
    return features, torch.arange(size) % 2


def of_sizes(sizes):
    """Users with random records: as many as `sizes` says of a user, or of None, all others."""
    return functools.partial(_of_user, sizes)
