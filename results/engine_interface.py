"""The interface of engines, and the engines by name."""

from __future__ import annotations

import pkgutil
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shufl.learning.config import Config
    from shufl.results.experiment import Experiment
    from shufl.server import Observe, RunEnd, TrainingSettings


class EngineFailed(RuntimeError):
    """Flower's simulation engine or Ray failed, not what ran on it."""


class Engine(Protocol):
    """Plays the rounds of a run; `ENGINES` has the engines by name.

    An engine is made from an experiment that its `check` has let pass.

    Attributes:
        description: one line for the start of a run and for its summary.
        gradients: how users' gradients are computed.
        nodes: `simulated` or `real`; a run that is resumed must have the same.
        repeats_releases: whether a round played again with the same seed, from the same model,
            makes the same release to the bit.
    """

    description: str
    gradients: str
    nodes: str
    repeats_releases: bool

    def __init__(self, experiment: Experiment):
        """Gets ready to run an experiment.

        Raises:
            ConfigError: this engine cannot run it, which only a trial of the model shows.
        """

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Refuses what this engine, or this machine, cannot run.

        Args:
            config: with the number of users decided.
            parameters: d, the number of the model's trained parameters.

        Raises:
            ConfigError: the run is refused, before anything that takes time.
        """

    def run(self, training: TrainingSettings, observe: Observe, stop: threading.Event) -> RunEnd:
        """Plays rounds until the budget, the plan's last round, or an interrupt.

        Args:
            training: the server's side, with the run's folder.
            observe: called after every round.
            stop: when it is set, the run ends in order. The engine may set it too, as it fails.

        Raises:
            EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early.
        """


ENGINES: dict[str, str | type] = {
    "flower": "shufl.simulator.engines.flower:FlowerEngine",
    "vectorised": "shufl.simulator.engines.vectorised:VectorisedEngine",
}
"""Each engine by its name in a configuration: `module:class`, or the class itself."""


def engine_of(name: str) -> Any:
    """The class of an engine, imported."""
    engine = ENGINES[name]
    return pkgutil.resolve_name(engine) if isinstance(engine, str) else engine
