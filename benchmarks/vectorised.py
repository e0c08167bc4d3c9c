"""Reports a second of the vectorised engine, beside plain SGD and others that do the same work.

*Plain* is the limit: it runs forward and backward of the same model on the same users' records in
batches, without gradients of single users, clipping or noise. The engine lays convolutions out with
channels last, which is not torch's default; one plain row does so too. All paths have the same
users, model, batches and number of threads. Each has a process of its own, so that its peak memory
can be told (imports and dataset included). They take turns. A turn is one round that is not timed,
because caches are cold, and then one round or as many as fit into half a second; their median
counts.

- opacus: fetch, forward, backward, norms, clipped sum of each batch; no noise, no optimiser step.
- pfl: FederatedAveraging with one local step and GaussianMechanism for each user, one process for
  each thread; its own sampling of users, without the sum over processes.

With `--set simulation.device=cuda` all but pfl and Flower, which are left out, compute on the GPU,
and peak memory is what torch took there. `simulation.precision` is the engine's and plain SGD's.

    python benchmarks/vectorised.py mnist --rounds 5 --flower-rounds 2
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional

from shufl.learning.config import Config, load
from shufl.learning.model_trial import exact_float32
from shufl.protocol.console import Console
from shufl.protocol.mechanisms import SeededRandomness
from shufl.results.experiment import Experiment, prepare
from shufl.results.run import Run
from shufl.results.run_folder import read_rows
from shufl.simulator.engines import keep_freed_memory
from shufl.simulator.engines.vectorised import VectorisedEngine, VectorisedRounds

_PAUSE_SECONDS = 0.3  # OpenMP's threads spin for a while after their work
_TURN_SECONDS = 0.5
_ROUNDS_A_TURN = 10**6  # at most; so that each has its own number
_ENDS = contextlib.ExitStack()  # Ray, where a path's process has started it
_LIMITS = "plain, a batch a core", "plain, torch's threads"  # the faster is 1

Play = Callable[[int], int]
"""Plays a round and returns how many users it was for."""


def vectorised(config: Config, noise: str, method: str | None = None) -> Play:
    """A round of the engine, in this process or by Ray workers; its gradients by `method`."""
    simulation = config.simulation.model_copy(update={"noise": noise})
    engine = VectorisedEngine(prepare(config.model_copy(update={"simulation": simulation})))
    settings = engine.settings
    if method is not None:
        settings = replace(settings, computation=replace(settings.computation, method=method))
    model = settings.make_model()
    engine.settings = settings
    folder = Path(_ENDS.enter_context(tempfile.TemporaryDirectory(prefix="shufl-")))
    rounds = VectorisedRounds(
        settings, _ENDS.enter_context(engine._sum_reports(folder, threading.Event()))
    )
    return lambda round: rounds(round, model).aggregate.reports


def batch_by_batch(experiment: Experiment, batch: Callable[..., None], apart: bool = True) -> Play:
    """Calls `batch(features, labels)` for the records of the round's users.

    Args:
        experiment: the experiment.
        batch: takes r records, shapes (r, ...) and (r,).
        apart: each batch on one core, as the engine does it; else on torch's threads together.
    """
    simulation = experiment.config.simulation
    records = experiment.load_users().to(simulation.device)
    size = simulation.records_per_chunk

    def of(users: np.ndarray) -> None:
        features, labels, _ = records.together(users)
        batch(features, labels)

    pool = ThreadPoolExecutor(torch.get_num_threads(), "", torch.set_num_threads, (1,))

    def play(round: int) -> int:
        users = checked_in(experiment, round)
        list((pool.map if apart else map)(of, np.split(users, range(size, len(users), size))))
        return len(users)

    return play


def plain(config: Config, apart: bool, layout: torch.memory_format | None = None) -> Play:
    """Forward and backward, with the model in the given memory format if there is one."""
    experiment, device = prepare(config), config.simulation.device
    lower = config.simulation.precision == "bfloat16"
    model = experiment.make_model().train().to(device)
    model = model.to(memory_format=layout or torch.preserve_format)

    def batch(features: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=lower):
            loss = functional.cross_entropy(model(features), labels)
        torch.autograd.grad(loss, list(model.parameters()))

    return batch_by_batch(experiment, batch, apart)


def opacus(config: Config, ghost: bool) -> Play:
    """Opacus' clipped sum of each batch, by hooks or by ghost clipping; a model a thread."""
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    experiment, own = prepare(config), threading.local()
    clip_norm = experiment.plan.mechanism.clip_norm

    def make() -> None:
        model = experiment.make_model().train().to(config.simulation.device)
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        common = {"noise_multiplier": 0.0, "max_grad_norm": clip_norm, "expected_batch_size": 1}
        if ghost:
            own.model = GradSampleModuleFastGradientClipping(model, max_grad_norm=clip_norm)
            own.optimiser = DPOptimizerFastGradientClipping(optimiser, **common)
            loss = torch.nn.CrossEntropyLoss()
            own.loss = DPLossFastGradientClipping(own.model, own.optimiser, loss)
        else:
            own.model = GradSampleModule(model)
            own.optimiser = DPOptimizer(optimiser, **common)

    def batch(features: torch.Tensor, labels: torch.Tensor) -> None:
        if not hasattr(own, "model"):
            make()
        if ghost:
            own.loss(own.model(features), labels).backward()
        else:
            functional.cross_entropy(own.model(features), labels).backward()
            own.optimiser.clip_and_accumulate()
        own.optimiser.zero_grad()

    return batch_by_batch(experiment, batch)


def pfl(config: Config) -> Play:
    """The users shared among as many processes as there are threads."""
    threads = torch.get_num_threads()
    processes = multiprocessing.get_context("spawn").Pool(threads)

    def play(round: int) -> int:
        users = len(checked_in(prepare(config), round))
        return sum(processes.starmap(pfl_round, [(config, users // threads)] * threads))

    return play


def pfl_round(config: Config, users: int) -> int:
    """One central iteration of pfl in this process."""
    backend, model, algorithm, context = pfl_simulator(config.model_dump_json())
    found = backend.gather_results(model, algorithm, central_context=context(cohort_size=users))
    statistics, _ = found
    assert statistics is not None
    return users


@functools.lru_cache(maxsize=1)
def pfl_simulator(config: str) -> tuple:
    """Backend, model, algorithm and context of pfl; kept for the process."""
    multiprocessing.current_process().name = "MainProcess"  # pfl looks at this; else no backend
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.common_types import Population
    from pfl.context import CentralContext
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    experiment = prepare(Config.model_validate_json(config))
    plan, records = experiment.plan, experiment.load_users()
    network = experiment.make_model().train()
    network.loss = lambda features, labels: functional.cross_entropy(network(features), labels)
    network.metrics = lambda features, labels: {}
    optimiser = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, torch.optim.SGD, optimiser)
    sampler = get_user_sampler("random", list(range(plan.users)))
    data = FederatedDataset(lambda user: Dataset(raw_data=records(user), user_id=user), sampler)
    mechanism = GaussianMechanism(plan.mechanism.clip_norm, plan.mechanism.noise_multiplier)
    training = experiment.config.training
    local: dict = {"local_num_epochs": 1, "local_learning_rate": 1.0, "local_batch_size": None}
    if training.algorithm == "fedavg":
        local = {key: getattr(training, key.replace("num_", "")) for key in local}
    context = functools.partial(
        CentralContext,
        current_central_iteration=0,
        do_evaluation=False,
        population=Population.TRAIN,
        algorithm_params=NNAlgorithmParams(1, 0, 1, None),
        model_train_params=NNTrainHyperParams(**local),
        model_eval_params=None,
    )
    return SimulatedBackend(data, data, [mechanism]), model, FederatedAveraging(), context


PATHS: dict[str, Callable[[Config], Play]] = {
    "plain, torch's threads": functools.partial(plain, apart=False),
    "plain, a batch a core": functools.partial(plain, apart=True),
    "plain, channels last": functools.partial(plain, apart=True, layout=torch.channels_last),
    "vectorised, aggregate noise": functools.partial(vectorised, noise="aggregate"),
    "vectorised, report noise": functools.partial(vectorised, noise="report"),
    "vmap, aggregate noise": functools.partial(vectorised, noise="aggregate", method="vmap"),
    "opacus, hooks": functools.partial(opacus, ghost=False),
    "opacus, ghost clipping": functools.partial(opacus, ghost=True),
    "pfl, local noise": pfl,
}


def serve(path: str, config: Config, connection: Connection) -> None:
    """Plays the turns that it is asked for in this process, until asked for None."""
    warnings.simplefilter("ignore")
    exact_float32()  # as the engine
    keep_freed_memory()  # likewise
    play, on_gpu = PATHS[path](config), config.simulation.device == "cuda"
    while (turn := connection.recv()) is not None:
        speeds, ends = [], math.inf
        while time.perf_counter() < ends:
            started = time.perf_counter()
            users = play(len(speeds) + turn * _ROUNDS_A_TURN)
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            speeds.append(users / (now - started))
            ends = now + _TURN_SECONDS if len(speeds) == 1 else ends
        connection.send((float(np.median(speeds[1:])), peak_megabytes(on_gpu)))
    _ENDS.close()


def peak_megabytes(on_gpu: bool) -> float:
    """Resident, of this process and all below it together; or torch's on the GPU."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**20
    total = 0
    for process in tree():
        with contextlib.suppress(OSError, IndexError):  # it has ended
            status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
            total += int(status.partition("VmHWM:")[2].split()[0])
    return total / 1024


def checked_in(experiment: Experiment, round: int) -> np.ndarray:
    """Who checks in."""
    plan = experiment.plan
    coins = SeededRandomness(experiment.seed).check_ins(
        round, np.arange(plan.users), plan.check_in_rate
    )
    return np.flatnonzero(coins)


def measure(
    cases: dict[str, tuple[str, Config]], turns: int
) -> dict[str, list[tuple[float, float]]]:
    """Speed and peak memory of each case's turns, but for a first that warms up.

    A case is a path with its configuration.
    """
    spawn = multiprocessing.get_context("spawn")
    ends, processes = {}, []
    for case, (path, config) in cases.items():
        ends[case], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(path, config, theirs)))
        processes[-1].start()
        theirs.close()
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    try:
        for turn in range(1, turns + 2):
            for case, end in ends.items():
                time.sleep(_PAUSE_SECONDS)
                end.send(turn)
                found[case].append(end.recv())
    except EOFError:
        raise SystemExit(f"{case} failed; its error is above") from None
    finally:
        for end in ends.values():
            with contextlib.suppress(BrokenPipeError):
                end.send(None)
        for process in processes:
            process.join()
    return {case: each[1:] for case, each in found.items()}


def on_flower(config: Config, rounds: int) -> list[tuple[float, float]]:
    """Reports a second of each round of the Flower engine, on the CPU, and its peak memory."""
    privacy = config.privacy.model_copy(update={"rounds": rounds})
    training = config.training.model_copy(update={"evaluate_every": rounds + 1})
    simulation = config.simulation.model_copy(update={"engine": "flower", "precision": "float32"})
    changed = {"privacy": privacy, "training": training, "simulation": simulation}
    config = config.model_copy(update=changed)
    samples, ended = [tree_megabytes()], threading.Event()

    def sample() -> None:
        while not ended.wait(1.0):
            samples.append(tree_megabytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    with tempfile.TemporaryDirectory() as folder:
        Run.new(config, Path(folder), Console(quiet=True)).train()
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        rows = read_rows(metrics)
    ended.set()
    sampler.join()
    return [(row["reports"] / row["seconds"], max(samples)) for row in rows]


def tree_megabytes() -> float:
    """Memory now of this process and all below it, what they share counted once (PSS)."""
    total = 0
    for process in tree():
        with contextlib.suppress(OSError, IndexError):  # it has ended, or is not ours
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0])
    return total / 1024


def tree() -> set[int]:
    """This process and all below it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text(errors="replace")
            after_name = stat.rpartition(")")[2].split()
            parents[int(folder.name)] = int(after_name[1])
    found = {os.getpid()}
    while new := {process for process, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each path")
    parser.add_argument("--flower-rounds", type=int, default=2, help="0 leaves Flower out")
    parser.add_argument(
        "--only", action="append", help="beside plain, the paths that start so; several times"
    )
    arguments = parser.parse_args()
    usual = "training.algorithm=fedsgd", "simulation.engine=vectorised"
    settings = [*usual, "simulation.records_per_chunk=256", *arguments.set]
    config = load(arguments.config, settings)
    experiment, console, simulation = prepare(config), Console(), config.simulation
    on_gpu = simulation.device == "cuda"
    paths = []
    for path in PATHS:
        package = path.partition(",")[0]
        if not path.startswith((*_LIMITS, *(arguments.only or [""]))):
            continue
        if package in ("opacus", "pfl") and importlib.util.find_spec(package) is None:
            console.print(f"{package} is not installed: left out")
        elif package == "pfl" and on_gpu:
            console.print("pfl is timed on CPUs only: left out")
        else:
            paths.append(path)
    found = measure({path: (path, config) for path in paths}, arguments.rounds)
    if arguments.flower_rounds and not on_gpu:
        found["Flower engine"] = on_flower(config, arguments.flower_rounds)
    table = Table(
        title=f"users a second, {config.name}: {config.model.name}, {experiment.parameters} "
        f"parameters\n{simulation.precision} on {simulation.device}, {torch.get_num_threads()} "
        f"threads, {simulation.records_per_chunk} records a batch, load {os.getloadavg()[0]:.1f}"
    )
    for column in ("path", "turns", "median/s", "lowest", "highest", "of plain", "peak MB"):
        table.add_column(column, justify="left" if column == "path" else "right")
    medians = {path: float(np.median([speed for speed, _ in each])) for path, each in found.items()}
    limit = max(medians[path] for path in _LIMITS)
    for path, each in found.items():
        speeds = [speed for speed, _ in each]
        table.add_row(
            path, str(len(each)), f"{medians[path]:.0f}", f"{min(speeds):.0f}",
            f"{max(speeds):.0f}", f"{medians[path] / limit:.2f}", f"{each[-1][1]:.0f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
