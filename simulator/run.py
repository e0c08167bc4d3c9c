"""One run from configuration to report, new or resumed: either engine, progress, run folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from accounting import Ledger, LedgerError
from accounting.mechanisms import seed_of_shuffler
from clients import ClientSettings, make_client_app
from server import (
    Checkpoint,
    CheckpointError,
    RoundRecord,
    RunResult,
    ServerSettings,
    Training,
    TrainingSettings,
    load_checkpoint,
    make_server_app,
)
from shuffler import ShufflerProcess
from simulator.config import Config, ConfigError, dumps, load
from simulator.engines.flower import interrupts, logs_to, run_on_flower
from simulator.engines.vectorised import ReportSum, SumReports, VectorisedRounds
from simulator.experiment import Experiment, prepare
from simulator.plain_json import to_json
from simulator.progress import RoundProgress
from simulator.records import RunRecorder
from simulator.report import plot_accuracy_epsilon, print_summary, summarise


def run(config: Config, runs: Path, console: Console) -> RunResult:
    """Runs a configuration to its end and reports.

    The run folder `<name>-<time>` gets config.toml, plan.json, metrics.jsonl, tensorboard/,
    ledger.jsonl, checkpoint.pt, model.pt, summary.json, accuracy_epsilon.png, and on Flower the
    logs.

    Args:
        config: validated configuration.
        runs: where the run folder is made.
        console: where progress and tables go.

    Returns:
        How the run ended.

    Raises:
        ConfigError, DatasetError: before any work.
        ShufflerError, RoundFailed, TimeoutError: the run ended early; its folder stays.
    """
    experiment = _prepare(config)
    folder = _make_folder(runs, experiment)
    _describe(console, experiment, folder)
    run_id = secrets.token_hex(8)
    with Ledger.create(folder / "ledger.jsonl", experiment.plan, run_id) as ledger:
        return _run_in(folder, experiment, ledger, None, console)


def resume_run(folder: Path, console: Console) -> RunResult:
    """Continues an interrupted run in its folder, with its configuration, to its end.

    It goes on from the checkpoint. `server.training` says what becomes of the rounds that were
    spent after it; the ledger keeps them all.

    Args:
        folder: the run folder.
        console: where progress and tables go.

    Returns:
        How the run ended.

    Raises:
        ConfigError, DatasetError: the folder's config.toml cannot be run.
        LedgerError: no ledger, a damaged one, that of another plan, or one in use.
        CheckpointError: no checkpoint although rounds are spent, or one that is damaged, of another
            run, or made by another configuration or other versions.
        MetricsError: the rows of the rounds so far cannot be read.
        ShufflerError, RoundFailed, TimeoutError: as for `run`.
    """
    folder = folder.absolute()
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"a run folder has a config.toml, {folder} has none")
    experiment = _prepare(load(str(folder / "config.toml")))
    with Ledger.open(folder / "ledger.jsonl", experiment.plan) as ledger:
        checkpoint = _checkpoint_of(folder, experiment, ledger)
        _describe(console, experiment, folder)
        done, spent = checkpoint.round if checkpoint else 0, ledger.last_round
        what = f"resumed after round {done}"
        if spent > done:
            fate = "played again at no further cost" if experiment.reproducible else "lost"
            what += f"; rounds {done + 1} to {spent} are spent and {fate}"
        console.print(f"[bold]{'resume':8}[/bold] {what}", highlight=False, soft_wrap=True)
        return _run_in(folder, experiment, ledger, checkpoint, console)


def _checkpoint_of(folder: Path, experiment: Experiment, ledger: Ledger) -> Checkpoint | None:
    """Where the run in `folder` goes on; None if it was interrupted before its first round.

    Raises:
        CheckpointError: see `resume_run`.
    """
    path = folder / "checkpoint.pt"
    if not ledger.entries and not path.exists():
        return None
    checkpoint = load_checkpoint(path)
    if checkpoint.run_id != ledger.run_id:
        raise CheckpointError(
            f"checkpoint {path} is of run {checkpoint.run_id}, the ledger of run {ledger.run_id}"
        )
    if checkpoint.round > ledger.last_round:
        raise CheckpointError(
            f"checkpoint {path} is of round {checkpoint.round}, but the ledger ends at round "
            f"{ledger.last_round}: it lacks rounds that were spent"
        )
    for name, here in _origin(experiment).items():
        if (before := checkpoint.origin.get(name)) != here:
            raise CheckpointError(
                f"checkpoint {path} was made with {name} {before}, it cannot go on with {here}"
            )
    try:
        experiment.make_model().load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit model {experiment.config.model.name}: its code has "
            "changed since the run began"
        ) from error
    return checkpoint


def _origin(experiment: Experiment) -> dict[str, str]:
    """What decides a run's numbers beside its plan and data."""
    configuration = hashlib.sha256(dumps(experiment.config).encode()).hexdigest()[:12]
    versions = {name: importlib.metadata.version(name) for name in ("shufl", "torch", "numpy")}
    return {"config.toml": configuration, **versions}


def _prepare(config: Config) -> Experiment:
    """The experiment, its model tried and its Ray cluster, if it names one, found."""
    experiment = prepare(config)
    if config.simulation.engine == "vectorised" and config.simulation.workers > 1:
        from simulator.engines.ray_workers import check_cluster  # Ray takes its time

        check_cluster()
    return experiment


def _run_in(
    folder: Path,
    experiment: Experiment,
    ledger: Ledger,
    checkpoint: Checkpoint | None,
    console: Console,
) -> RunResult:
    """Trains and reports, in a folder whose ledger is held."""
    config = experiment.config
    settings = TrainingSettings(
        plan=experiment.plan,
        ledger=ledger,
        make_model=experiment.make_model,
        load_test=experiment.load_test,
        optimiser=experiment.optimiser,
        folder=folder,
        evaluate_every=config.training.evaluate_every,
        checkpoint_every=config.training.checkpoint_every,
        origin=_origin(experiment),
        reproducible=experiment.reproducible,
        checkpoint=checkpoint,
    )
    recorder = RunRecorder(folder, experiment.plan)
    try:
        result = _execute(experiment, settings, recorder, console)
    except BaseException:
        _tell_what_was_spent(console, folder)
        raise
    finally:
        recorder.close()
    summary = summarise(result, experiment, recorder.too_few_present(result.rounds))
    print_summary(console, summary, folder)
    (folder / "summary.json").write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
    plot_accuracy_epsilon(recorder.rows, experiment.plan, folder / "accuracy_epsilon.png")
    return result


def _tell_what_was_spent(console: Console, folder: Path) -> None:
    """After a run that ended early: what its ledger says, which is what counts."""
    try:
        ledger = Ledger.read(folder / "ledger.jsonl")
    except LedgerError:
        spent = "nothing was spent"
    else:
        accountant = ledger.plan.make_accountant()
        for event in ledger.events():
            accountant.compose(event)
        epsilon = accountant.get_epsilon(ledger.plan.delta)
        spent = f"{len(ledger.entries)} rounds spent, ε {epsilon:.4g} by {accountant.name}"
    console.print(
        f"ended early: {spent}; ledger, metrics and checkpoints stay in {folder}", soft_wrap=True
    )


def _execute(
    experiment: Experiment, settings: TrainingSettings, recorder: RunRecorder, console: Console
) -> RunResult:
    """Plays the rounds on the engine of the configuration, under interrupts and progress."""
    vectorised = experiment.config.simulation.engine == "vectorised"
    starting = "loading users' records" if vectorised else "starting Flower and Ray"
    target = experiment.plan.target_epsilon
    stop = threading.Event()
    with (
        interrupts(stop),
        RoundProgress(console, experiment.halting_round, target, starting) as progress,
    ):

        def observe(record: RoundRecord) -> None:
            recorder(record)
            blanket = recorder.rows[-1]["epsilons"]["blanket"]
            progress(record, None if experiment.plan.accountant == "blanket" else blanket)

        if vectorised:
            with _report_sum(experiment) as sum_reports, interrupts(stop):  # Ray has put its own
                rounds = VectorisedRounds(experiment, sum_reports)
                return Training(settings).run(rounds, observe, stop.is_set)
        return _on_flower(experiment, settings, observe, stop)


@contextmanager
def _report_sum(experiment: Experiment) -> Iterator[SumReports]:
    """Where the vectorised engine's reports are summed: in this process, or by Ray workers."""
    if experiment.config.simulation.workers == 1:
        yield ReportSum(experiment, experiment.load_users()).sum
    else:
        from simulator.engines.ray_workers import ray_workers

        with ray_workers(experiment) as sum_reports:
            yield sum_reports


def _on_flower(
    experiment: Experiment,
    settings: TrainingSettings,
    observe: Callable[[RoundRecord], None],
    stop: threading.Event,
) -> RunResult:
    """Starts the shufflers, then Flower, and waits for the end."""
    config, folder = experiment.config, settings.folder
    results: list[RunResult] = []
    with ExitStack() as stack:
        stack.enter_context(logs_to(folder / "server.log", "server"))
        shufflers = [
            stack.enter_context(_shuffler(experiment, folder, number))
            for number in range(config.shuffler.number)
        ]
        server_app = make_server_app(
            ServerSettings(
                **vars(settings),
                nodes=config.simulation.nodes,
                shufflers=tuple((each.address, each.control) for each in shufflers),
                round_timeout=config.simulation.round_timeout,
                sealing=config.shuffler.sealing,
            ),
            observe,
            results.append,
            stop.is_set,
        )
        client_app = make_client_app(
            ClientSettings(
                run_id=settings.run_id,
                plan=experiment.plan,
                make_model=experiment.make_model,
                load_users=experiment.load_users,
                training=experiment.local_training,
                shufflers=tuple((each.address, each.submit) for each in shufflers),
                seed=experiment.seed,
                reply_after=config.simulation.reply_after,
            )
        )
        os.environ["FLWR_HOME"] = str(folder / "flower")
        run_on_flower(
            server_app,
            client_app,
            config.simulation.nodes,
            config.simulation.cpus_per_node,
            stop,
            folder / "flower.log",
        )
    return results[0]


def _shuffler(experiment: Experiment, folder: Path, number: int) -> ShufflerProcess:
    """One of the run's shufflers, each with an authority of its own: it serves its users alone."""
    return ShufflerProcess(
        log_file=folder / ("shuffler.log" if number == 0 else f"shuffler-{number + 1}.log"),
        simulation_seed=seed_of_shuffler(experiment.seed, number),
    )


def _make_folder(runs: Path, experiment: Experiment) -> Path:
    """A new folder `<name>-<time>` with the resolved configuration and the plan."""
    stem = f"{experiment.config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs.mkdir(parents=True, exist_ok=True)
    folder = (runs / stem).absolute()
    for number in itertools.count(2):
        try:
            folder.mkdir()
            break
        except FileExistsError:
            folder = folder.with_name(f"{stem}-{number}")
    (folder / "config.toml").write_text(dumps(experiment.config), encoding="utf-8")
    (folder / "plan.json").write_text(experiment.plan.to_json(), encoding="utf-8")
    return folder


def _describe(console: Console, experiment: Experiment, folder: Path) -> None:
    """What is about to run, in three lines."""
    plan, config = experiment.plan, experiment.config
    randomness = "the operating system's entropy" if experiment.seed is None else "the seed"
    simulation = config.simulation
    where = f"vectorised on {simulation.device} in {simulation.precision}"
    if simulation.engine == "flower":
        where = f"on {simulation.nodes} nodes"
    elif simulation.workers > 1:
        where += f" by {simulation.workers} Ray workers"
    facts: dict[str, Any] = {
        "data": f"{config.data.dataset}, {plan.users} users {where}; "
        f"{config.model.name}, {experiment.parameters} parameters",
        "privacy": f"γ = {plan.check_in_rate:g}, C = {plan.clip_norm:g}, "
        f"z = {plan.noise_multiplier:g}, {plan.adjacency} (σ = {plan.sigma:g}), "
        f"δ = {plan.delta:.3g}, minimum batch {plan.minimum_batch}, "
        f"{plan.shuffler_blankets:g} blankets a round expected; "
        f"coins and noise from {randomness}",
        "budget": f"ε ≤ {plan.target_epsilon:g} by {plan.accountant}, which allows "
        f"{experiment.halting_round} rounds of at most {plan.rounds}",
    }
    for name, text in facts.items():
        console.print(f"[bold]{name:8}[/bold] {text}", highlight=False, soft_wrap=True)
    console.print(f"[bold]{'folder':8}[/bold] {folder}", highlight=False, soft_wrap=True)
