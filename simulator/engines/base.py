"""What every engine is, and what engines on Ray share."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simulator.logs import log_handler

if TYPE_CHECKING:
    from server import RoundRecord, RunResult, TrainingSettings
    from simulator.experiment import Experiment


class EngineFailed(RuntimeError):
    """Flower's simulation engine or Ray failed, not what ran on it."""


class Engine(Protocol):
    """Plays the rounds of a run; `simulator.engines.ENGINES` has them by name.

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

    def run(
        self,
        training: TrainingSettings,
        observe: Callable[[RoundRecord], None],
        stop: threading.Event,
    ) -> RunResult:
        """Plays rounds until the budget, the plan's last round, or an interrupt.

        Args:
            training: the server's side, with the run's folder.
            observe: called after every round.
            stop: ends the run in order when it is set; the engine too may set it, as it fails.

        Raises:
            EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early.
        """


def start_ray() -> None:
    """Connects to the cluster at RAY_ADDRESS if that is set, else starts a Ray of our own.

    Ray's workers find our packages first, then whatever this process finds. Ray puts the working
    directory of `ray.init` at the head of its workers' path: there a user's folder named `server`
    would hide ours. So it is ours while Ray starts.

    Raises:
        EngineFailed: Ray does not start, as on a machine so busy that it takes half a minute.
    """
    import ray

    here, path = Path.cwd(), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    os.chdir(Path(__file__).resolve().parents[2])
    try:
        options = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray's own has no class of its own
        raise EngineFailed(f"Ray does not start: {' '.join(str(error).split())}") from error
    finally:
        os.chdir(here)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


@contextmanager
def interrupts(stop: threading.Event) -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into `stop`; then the old handlers are back.

    Ray puts handlers of its own in place when it starts, so this is entered again after that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


@contextmanager
def logs_to(path: Path, name: str) -> Iterator[None]:
    """Sends a logger to a file instead of the console."""
    logger = logging.getLogger(name)
    handlers, propagate = logger.handlers[:], logger.propagate
    file_handler = log_handler(path)
    logger.handlers, logger.propagate = [file_handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file_handler.close()
