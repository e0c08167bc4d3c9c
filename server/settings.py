"""What the server needs before its first round, and what it hands out after each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shufl.accounting import Ledger, PrivacyPlan
from shufl.learning.config import Training as TrainingKeys
from shufl.learning.parameters import trained
from shufl.learning.tasks import Task
from shufl.protocol.outcomes import StoppedBy
from shufl.server.aggregate import MakeAggregator
from shufl.server.checkpoint import Checkpoint
from shufl.server.policy import Deployed, Simulated
from shufl.shuffler import AnyCredentials, Sealing


class RoundFailed(RuntimeError):
    """Rounds cannot go on: nodes are missing, or the model fails; carries the first reason."""


class NodeFailed(RoundFailed):
    """A simulated node failed or did not answer: none of them is honestly silent."""


MOST_IN_VAIN = 3
"""Rounds in a row that are spent for nothing, after which a run ends."""


@dataclass(frozen=True)
class Optimiser:
    """The server's optimiser, from torch.optim; the noisy mean stands where the gradient would.

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


@dataclass(frozen=True)
class TrainingSettings:
    """What training needs, whichever engine plays the rounds.

    Attributes:
        ledger: open, of this plan; its run id is that of the run.
        make_model: builds the initial model.
        load_test: gives public test data, features and labels of shape (r, ...).
        task: what is learnt: it measures a model.
        optimiser: the server's step.
        folder: an existing folder for checkpoints and the final model.
        evaluate_every, checkpoint_every: in rounds; the end of the run always does both.
        origin: as in `Checkpoint`.
        reproducible: whether a round played again from the same model makes the same release:
            coins and noise are functions of a seed, and sums of their terms.
        checkpoint: where an interrupted run goes on, None for a new one.
    """

    plan: PrivacyPlan
    ledger: Ledger
    make_model: Callable[[], nn.Module]
    load_test: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    task: Task
    optimiser: Optimiser
    folder: Path
    evaluate_every: int
    checkpoint_every: int
    origin: dict[str, str]
    reproducible: bool
    checkpoint: Checkpoint | None

    @property
    def run_id(self) -> str:
        """The run's name in its ledger, checkpoints and messages."""
        return self.ledger.run_id


@dataclass(frozen=True)
class ServerSettings(TrainingSettings):
    """The server's side of a run on Flower.

    Attributes:
        policy: whether nodes and shufflers are simulated or real.
        shufflers: host:port of each shuffler, and a server's credentials there.
        sealing: the suite that reports are sealed with.
        make_aggregator: begins what estimates the mean update of a shuffler's batch.
    """

    policy: Simulated | Deployed
    shufflers: tuple[tuple[str, AnyCredentials], ...]
    sealing: Sealing
    make_aggregator: MakeAggregator


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        rounds: rounds spent.
        stopped_by: `budget`, `rounds` (the plan's last), `on_round` or `interrupt`.
        metrics: numbers of the final model on the test data, by name.
    """

    rounds: int
    stopped_by: StoppedBy
    metrics: dict[str, float]
