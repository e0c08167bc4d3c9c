"""What every engine is, and the engines by name."""

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
    """Plays the rounds of a run; `ENGINES` has them by name.

    Making one from an experiment is the check before any work.

    Attributes:
        description: one line for the start of a run and for its summary.
        gradients: how users' gradients are computed.
        nodes: `simulated` or `real`; a run does not change from one to the other.
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
            ConfigError: this engine cannot run it, or not on this machine.
        """

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Refuses at once what this engine, or this machine, cannot run; making it does so too.

        `config` has its number of users. The model has so many parameters.

        Raises:
            ConfigError: before anything that takes time, such as a search for noise.
        """

    def run(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
    ) -> RunEnd:
        """Plays rounds until the budget, the plan's last round, or an interrupt.

        Args:
            training: the server's side, with the run's folder.
            observe: called after every round.
            stop: ends the run in order when it is set; the engine too may set it, as it fails.

        Raises:
            EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early.
        """


ENGINES: dict[str, str | type] = {
    "flower": "shufl.simulator.engines.flower:FlowerEngine",
    "vectorised": "shufl.simulator.engines.vectorised:VectorisedEngine",
}
"""Each engine's `Engine`, as `module:class` or the class itself, by its name in a configuration."""


def engine_of(name: str) -> Any:
    """The class of an engine, imported."""
    engine = ENGINES[name]
    return pkgutil.resolve_name(engine) if isinstance(engine, str) else engine
