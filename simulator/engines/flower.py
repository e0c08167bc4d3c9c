"""Flower's simulation engine on Ray, quiet, interruptible, and leaving nothing running."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from shufl import clients, server
from shufl.clients import ClientSettings, make_client_app
from shufl.learning.config import Config
from shufl.learning.from_config import check_model_size
from shufl.learning.your_code import one_line
from shufl.protocol.mechanisms import seed_of_shuffler
from shufl.protocol.text import logs_to
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed
from shufl.results.experiment import Experiment
from shufl.server import (
    NodeFailed,
    Observe,
    RoundFailed,
    RoundLoop,
    RunEnd,
    ServerSettings,
    TrainingSettings,
)
from shufl.shuffler import ShufflerProcess
from shufl.simulator.engines import keep_freed_memory
from shufl.simulator.engines.flower_worker import leased, simulated_device
from shufl.simulator.engines.ray_cluster import check_cpus, running_ray
from shufl.vendor_internals import run_simulation

_START_SECONDS = 600.0  # for nodes to start and load their data, at least
_GRACE_SECONDS = 5.0  # for nodes still at work when the ServerApp has ended


class FlowerEngine:
    """Plays rounds by messages: Flower nodes, real shuffler processes, sealed reports.

    A batch is released with the reports of all nodes or not at all, so a round played again makes
    the same release.
    """

    gradients = "vmap, or user by user"
    nodes = "simulated"
    repeats_releases = True

    def __init__(self, experiment: Experiment):
        """Checks the noise of nodes, with sums."""
        nodes = experiment.config.simulation.nodes
        experiment.plan.check_dimension(experiment.parameters, experiment.plan.users // nodes)
        self.description = f"flower on {nodes} nodes, gradients by {self.gradients}"
        self._experiment = experiment

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Checks the number of nodes, their CPUs, and the model's size."""
        simulation, users = config.simulation, config.data.users
        if users is not None and simulation.nodes > users:
            raise ConfigError(
                f"simulation.nodes must be at most the number of users, {users}, "
                f"got {simulation.nodes}"
            )
        check_model_size(config, parameters)
        check_cpus("simulation.cpus_per_node", simulation.cpus_per_node)

    def run(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
    ) -> RunEnd:
        """Starts the shufflers, then Flower, and waits for the end."""
        keep_freed_memory()
        folder, number = training.folder, self._experiment.config.shuffler.number
        with ExitStack() as stack:
            stack.enter_context(logs_to(folder / "server.log", "shufl.server"))
            # Gone with this run: one that is resumed plays rounds again, with the same coins.
            ledgers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shufl-")))
            shufflers = [self._shuffler(folder, each) for each in range(number)]
            for each in shufflers:
                stack.push(each)
                each.start()
            stack.enter_context(running_ray(folder / "ray.log"))  # starts meanwhile
            for each in shufflers:
                each.wait()
            os.environ["FLWR_HOME"] = str(folder / "flower")
            try:
                return self._play(training, observe, stop, shufflers, ledgers)
            except NodeFailed as error:
                raise RoundFailed(f"{error}; shufl run --resume {folder} goes on") from error

    def _shuffler(self, folder: Path, number: int) -> ShufflerProcess:
        """One shuffler, with an authority of its own: it serves its own users alone."""
        return ShufflerProcess(
            log_file=folder / ("shuffler.log" if number == 0 else f"shuffler-{number + 1}.log"),
            simulation_seed=seed_of_shuffler(self._experiment.seed, number),
        )

    def _play(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
        shufflers: list[ShufflerProcess],
        ledgers: Path,
    ) -> RunEnd:
        """Plays the rounds, once Ray and the shufflers are there.

        `ledgers` is the folder of the simulated devices' ledgers.
        """
        experiment, simulation = self._experiment, self._experiment.config.simulation
        for carried in experiment.carried:  # Flower sends its app with every message
            carried.put_in_ray()
        settings = ServerSettings(
            **vars(training),
            policy=server.Simulated(
                nodes=simulation.nodes,
                patience=max(_START_SECONDS, simulation.round_timeout),
                round_timeout=simulation.round_timeout,
                seed=experiment.seed,
                shufflers_gone=lambda: not all(each.alive for each in shufflers),
            ),
            shufflers=tuple((each.address, each.control) for each in shufflers),
            sealing=experiment.config.shuffler.sealing,
            make_aggregator=experiment.make_aggregator,
        )
        results: list[RunEnd] = []
        run_on_flower(
            lambda grid: results.append(RoundLoop(settings, grid, observe, stop.is_set).run()),
            make_client_app(self._client_settings(training.run_id, shufflers, ledgers)),
            nodes=simulation.nodes,
            cpus_per_node=simulation.cpus_per_node,
            stop=stop,
            log_file=training.folder / "flower.log",
        )
        return results[0]

    def _client_settings(
        self, run_id: str, shufflers: list[ShufflerProcess], ledgers: Path
    ) -> ClientSettings:
        """What Flower pickles for every message, in the ClientApp."""
        experiment = self._experiment
        return ClientSettings(
            plan=experiment.plan,
            make_model=experiment.make_model,
            load_users=experiment.load_users,
            training=experiment.local_training,
            policy=clients.Simulated(
                run_id=run_id,
                seed=experiment.seed,
                ledger=functools.partial(simulated_device, ledgers),
                halting_round=experiment.halting_round,
                together=experiment.together,
            ),
            shufflers=tuple((each.address, each.submit) for each in shufflers),
            sealing=experiment.config.shuffler.sealing,
        )


def run_on_flower(
    play: Callable[[Grid], None],
    client_app: ClientApp,
    nodes: int,
    cpus_per_node: float,
    stop: threading.Event,
    log_file: Path,
) -> None:
    """Plays a run, as a ServerApp does, with `nodes` ClientApps on the Ray that was started.

    `play` polls `stop`, which an interrupt sets, and then ends the run in order. Nodes still at
    work when it has returned are killed after some seconds.

    Args:
        play: what the ServerApp does.
        client_app: of every node.
        nodes: Flower nodes to simulate.
        cpus_per_node: CPUs an active node occupies; decides how many work at once.
        stop: set on an interrupt, and when the engine itself fails.
        log_file: where Flower's log goes.

    Raises:
        EngineFailed: Flower or Ray failed.
        Exception: whatever `play` raised.
    """
    app, ended = ServerApp(), list[BaseException | None]()
    with logs_to(log_file, "flwr"), tempfile.TemporaryDirectory(prefix="shufl-") as lease:
        # Flower's engine waits for every node at work, however long.
        kill = threading.Timer(_GRACE_SECONDS, shutil.rmtree, [lease], {"ignore_errors": True})

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                play(grid)
                ended.append(None)
            except BaseException as error:  # which Flower's engine does not hand on
                ended.append(error)
                raise
            finally:
                kill.start()

        try:
            in_workers = leased(client_app, Path(lease), sys.path)
            run_simulation(app, in_workers, nodes, cpus_per_node)
        except Exception as error:
            why = f"Flower's simulation engine failed ({_root_cause(error)}); see {log_file}"
            ended.append(EngineFailed(why))
        finally:
            stop.set()
            kill.cancel()
    if not ended:
        raise EngineFailed("Flower never started the ServerApp")
    if ended[0] is not None:
        raise ended[0]


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)}"
