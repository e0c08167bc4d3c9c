"""The server's optimiser, from torch.optim; the noisy mean stands where the gradient would."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shufl.learning.config import Training as TrainingKeys
from shufl.learning.parameters import trained


@dataclass(frozen=True)
class Optimiser:
    """What steps, how far, and which model is kept.

    Attributes:
        keys: the configuration's section `[training]`. `optimiser` names a class of torch.optim, in
            lower case. `learning_rate` is the step size in the first round; until `rounds` it is
            constant, or falls to 0 along a line or half a cosine (`schedule`). `averaging` is the
            decay of the models' exponential moving average, which is then what is evaluated and
            saved; 0: the last model is.
        rounds: of the whole run.
    """

    keys: TrainingKeys
    rounds: int

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser over the parameters that are trained."""
        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
        make, keys = _never_compiled(kinds[self.keys.optimiser]), self.keys
        return make(trained(model).values(), lr=keys.learning_rate, **keys.optimiser_options)

    def learning_rate_at(self, round: int) -> float:
        """The step size of a round, from 1."""
        done = (round - 1) / self.rounds
        shares = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.keys.learning_rate * shares[self.keys.schedule]

    def step(
        self, stepper: torch.optim.Optimizer, model: nn.Module, estimate: np.ndarray, round: int
    ) -> None:
        """Takes the step of a round by what `build` gave, with an estimate of shape (d,)."""
        for group in stepper.param_groups:
            group["lr"] = self.learning_rate_at(round)
        gradient, offset = torch.from_numpy(estimate), 0
        for parameter in trained(model).values():
            part = gradient[offset : offset + parameter.numel()]
            parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
            offset += parameter.numel()
        stepper.step()

    def average_of(self, model: nn.Module) -> AveragedModel | None:
        """The moving average that begins with this model; None: the run has no average."""
        if self.keys.averaging == 0.0:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.keys.averaging))


def _never_compiled(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimiser, without what torch wraps around its methods for `torch.compile`.

    The wrappers import all of `torch._dynamo`, which takes as long as to import torch.
    """
    names = "add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)
