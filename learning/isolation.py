"""A run and the global settings of Python, numpy and torch, which other code may have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_DEPTH = 1000  # Python's usual limit of recursion


@contextmanager
def usual_settings() -> Iterator[None]:
    """Has Python, numpy and torch as they start; what was set before is set again at the end.

    So a program that calls shufl, or a module of the reader's when it is imported, sets them for
    itself alone. What torch may do for speed or for determinism is left as it is.
    """
    import torch

    device = torch.get_default_device()
    with (
        np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
        torch.inference_mode(False),
        torch.enable_grad(),
        ExitStack() as stack,
    ):
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(_set_device, device)
        sys.setrecursionlimit(max(_DEPTH, sys.getrecursionlimit()))
        torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            torch.set_default_device(None)
            if torch.get_default_device().type != "cpu":  # one of a `with` block
                stack.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _set_device(device: torch.device) -> None:
    import torch

    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)
