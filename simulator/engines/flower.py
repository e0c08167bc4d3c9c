"""Flower's simulation engine on Ray, quiet, interruptible, and leaving nothing running."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from shufl.clients import ClientSettings, make_client_app
from shufl.learning.configured import check_model_size
from shufl.learning.section import ConfigError, one_line
from shufl.protocol.logs import logs_to
from shufl.protocol.mechanisms import seed_of_shuffler
from shufl.results.engine import EngineFailed
from shufl.server import (
    NodeFailed,
    Observe,
    RoundFailed,
    RunEnd,
    ServerSettings,
    TrainingSettings,
    make_server_app,
)
from shufl.shuffler import ShufflerProcess
from shufl.simulator.engines.base import check_cpus, check_draws, running_ray
from shufl.simulator.engines.flower_worker import leased, simulated_device
from shufl.simulator.engines.memory import keep_freed_memory

if TYPE_CHECKING:
    from shufl.learning.config import Config
    from shufl.results.experiment import Experiment

_GRACE_SECONDS = 5.0  # for nodes still at work when the ServerApp has ended

_ADVICE = {
    "a Ray worker died": " (killed, or out of memory; a higher simulation.cpus_per_node has fewer "
    "nodes at work at once)",
    "no answer within": ", which is simulation.round_timeout",
}
"""What to say of why a node failed."""


class FlowerEngine:
    """Plays rounds by messages: Flower nodes, real shuffler processes, sealed reports.

    A batch is released with the reports of all nodes or not at all, so a round played again makes
    the same release.
    """

    gradients = "vmap, or user by user"
    nodes = "simulated"
    repeats_releases = True

    def __init__(self, experiment: Experiment):
        """Checks what `check` does, and with sums the noise of nodes."""
        simulation, plan = experiment.config.simulation, experiment.plan
        self.check(experiment.config, experiment.parameters)
        plan.check_dimension(experiment.parameters, plan.users // simulation.nodes)
        self.description = f"flower on {simulation.nodes} nodes, gradients by {self.gradients}"
        self._keys, self._shuffler = simulation, experiment.config.shuffler
        self._carried = experiment.carried
        self._make_aggregator = experiment.make_aggregator
        self._seed = experiment.seed
        self._client_settings = functools.partial(
            ClientSettings,
            plan=plan,
            make_model=experiment.make_model,
            load_users=experiment.load_users,
            training=experiment.local_training,
            seed=experiment.seed,
            together=experiment.together,
            last_round=experiment.halting_round,
        )

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
        check_draws(config)
        check_cpus("simulation.cpus_per_node", simulation.cpus_per_node)

    def run(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
    ) -> RunEnd:
        """Starts the shufflers, then Flower, and waits for the end."""
        keep_freed_memory()
        keys, folder = self._keys, training.folder
        results: list[RunEnd] = []
        with ExitStack() as stack:
            stack.enter_context(logs_to(folder / "server.log", "shufl.server"))
            # Gone with this run: one that is resumed plays rounds again, with the same coins.
            devices = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shufl-")))
            shufflers = [
                self._shuffler_process(folder, each) for each in range(self._shuffler.number)
            ]
            for each in shufflers:
                stack.push(each)
                each.start()
            stack.enter_context(running_ray(folder / "ray.log"))  # starts meanwhile
            check_cpus("simulation.cpus_per_node", keys.cpus_per_node)
            for carried in self._carried:  # Flower sends its app with every message
                carried.put_in_ray()
            for each in shufflers:
                each.wait()
            server_app = make_server_app(
                ServerSettings(
                    **vars(training),
                    nodes=keys.nodes,
                    shufflers=tuple((each.address, each.control) for each in shufflers),
                    round_timeout=keys.round_timeout,
                    sealing=self._shuffler.sealing,
                    make_aggregator=self._make_aggregator,
                    seed=self._seed,
                ),
                observe,
                results.append,
                stop.is_set,
                lambda: not all(shuffler.alive for shuffler in shufflers),
            )
            client_app = make_client_app(
                self._client_settings(
                    run_id=training.run_id,
                    ledger=functools.partial(simulated_device, devices),
                    shufflers=tuple((each.address, each.submit) for each in shufflers),
                )
            )
            os.environ["FLWR_HOME"] = str(folder / "flower")
            log_file = folder / "flower.log"
            try:
                run_on_flower(
                    server_app, client_app, keys.nodes, keys.cpus_per_node, stop, log_file
                )
            except NodeFailed as error:
                advice = next((each for why, each in _ADVICE.items() if why in str(error)), "")
                resume = f"shufl run --resume {folder} goes on"
                raise RoundFailed(f"{error}{advice}; {resume}") from error
        return results[0]

    def _shuffler_process(self, folder: Path, number: int) -> ShufflerProcess:
        """One shuffler, with an authority of its own: it serves its own users alone."""
        return ShufflerProcess(
            log_file=folder / ("shuffler.log" if number == 0 else f"shuffler-{number + 1}.log"),
            simulation_seed=seed_of_shuffler(self._seed, number),
        )


def run_on_flower(
    server_app: ServerApp,
    client_app: ClientApp,
    nodes: int,
    cpus_per_node: float,
    stop: threading.Event,
    log_file: Path,
) -> None:
    """Runs a ServerApp and `nodes` ClientApps on the Ray that was started.

    Flower deprecates `run_simulation` in favour of `flwr run`, which starts a SuperLink that
    outlives the command.

    The ServerApp polls `stop`, which an interrupt sets, and then ends the run in order. Nodes still
    at work when it has ended are killed after some seconds.

    Args:
        server_app, client_app: the apps.
        nodes: Flower nodes to simulate.
        cpus_per_node: CPUs an active node occupies; decides how many work at once.
        stop: set on an interrupt, and when the engine itself fails.
        log_file: where Flower's log goes.

    Raises:
        EngineFailed: Flower or Ray failed.
        Exception: whatever the ServerApp raised.
    """
    from flwr.simulation import run_simulation

    main = _Main(server_app)
    with logs_to(log_file, "flwr"), tempfile.TemporaryDirectory(prefix="shufl-") as lease:
        try:
            threading.Thread(target=main.end_lease_late, args=(lease,), daemon=True).start()
            run_simulation(
                main.app,
                leased(client_app, Path(lease), sys.path),
                num_supernodes=nodes,
                backend_config={"client_resources": {"num_cpus": cpus_per_node, "num_gpus": 0.0}},
            )
        except Exception as error:
            if not main.ended.is_set():
                main.error = EngineFailed(
                    f"Flower's simulation engine failed ({_root_cause(error)}); see {log_file}"
                )
        finally:
            stop.set()
            main.returned.set()
    if main.error is not None:
        raise main.error


class _Main:
    """A ServerApp that notes how it ended, which Flower's engine does not tell."""

    def __init__(self, server_app: ServerApp):
        self.app = ServerApp()
        self.error: BaseException | None = EngineFailed("Flower never started the ServerApp")
        self.ended = threading.Event()
        self.returned = threading.Event()

        @self.app.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                server_app(grid, context)
                self.error = None
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.ended.set()

    def end_lease_late(self, lease: str) -> None:
        """Flower's engine waits for every node at work, however long: give it some seconds."""
        self.ended.wait()
        if not self.returned.wait(_GRACE_SECONDS):
            shutil.rmtree(lease, ignore_errors=True)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)}"
