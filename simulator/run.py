"""One run from configuration to report: either engine, progress, run folder."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from accounting import Ledger, LedgerError
from clients import ClientSettings, make_client_app
from server import (
    RoundRecord,
    RunResult,
    ServerSettings,
    Training,
    TrainingSettings,
    make_server_app,
)
from shuffler import ShufflerProcess
from simulator.config import Config, dumps
from simulator.engine import interrupts, logs_to, run_on_flower
from simulator.experiment import Experiment, prepare
from simulator.plain_json import to_json
from simulator.progress import RoundProgress
from simulator.records import RunRecorder
from simulator.report import plot_accuracy_epsilon, print_summary, summarise
from simulator.vectorised import VectorisedRounds, check_model


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
    experiment = prepare(config)
    vectorised = config.simulation.engine == "vectorised"
    gradients = check_model(experiment) if vectorised else "user by user"
    folder = _make_folder(runs, experiment)
    _describe(console, experiment, folder)
    recorder = RunRecorder(folder, experiment.plan)
    try:
        result = _execute(experiment, folder, recorder, console)
    except BaseException:
        _tell_what_was_spent(console, folder)
        raise
    finally:
        recorder.close()
    summary = summarise(result, experiment.plan, experiment.config.simulation, gradients)
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
    experiment: Experiment, folder: Path, recorder: RunRecorder, console: Console
) -> RunResult:
    """Plays the rounds on the engine of the configuration, under interrupts and progress."""
    config, plan = experiment.config, experiment.plan
    settings = TrainingSettings(
        run_id=secrets.token_hex(8),
        plan=plan,
        make_model=experiment.make_model,
        load_test=experiment.load_test,
        optimiser=experiment.optimiser,
        folder=folder,
        evaluate_every=config.training.evaluate_every,
        checkpoint_every=config.training.checkpoint_every,
    )
    vectorised = config.simulation.engine == "vectorised"
    starting = "loading users' records" if vectorised else "starting Flower and Ray"
    stop = threading.Event()
    with (
        interrupts(stop),
        RoundProgress(console, experiment.halting_round, plan.target_epsilon, starting) as progress,
    ):

        def observe(record: RoundRecord) -> None:
            recorder(record)
            progress(record)

        if vectorised:
            return Training(settings).run(VectorisedRounds(experiment), observe, stop.is_set)
        return _on_flower(experiment, settings, observe, stop)


def _on_flower(
    experiment: Experiment,
    settings: TrainingSettings,
    observe: Callable[[RoundRecord], None],
    stop: threading.Event,
) -> RunResult:
    """Starts the shuffler, then Flower, and waits for the end."""
    config, folder = experiment.config, settings.folder
    results: list[RunResult] = []
    with (
        ShufflerProcess(log_file=folder / "shuffler.log") as shuffler,
        logs_to(folder / "server.log", "server"),
    ):
        server_app = make_server_app(
            ServerSettings(
                **vars(settings),
                nodes=config.simulation.nodes,
                shuffler_address=shuffler.address,
                shuffler_credentials=shuffler.control,
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
                shuffler_address=shuffler.address,
                shuffler_credentials=shuffler.submit,
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
    blankets = f"β = {plan.blanket_probability:g} blankets, " if plan.blanket_probability else ""
    randomness = "the operating system's entropy" if experiment.seed is None else "the seed"
    on_flower = config.simulation.engine == "flower"
    where = f"on {config.simulation.nodes} nodes" if on_flower else "vectorised"
    facts: dict[str, Any] = {
        "data": f"{config.data.dataset}, {plan.users} users {where}; "
        f"{config.model.name}, {experiment.parameters} parameters",
        "privacy": f"γ = {plan.check_in_rate:g}, C = {plan.clip_norm:g}, "
        f"z = {plan.noise_multiplier:g}, {blankets}{plan.adjacency} (σ = {plan.sigma:g}), "
        f"δ = {plan.delta:.3g}, minimum batch {plan.minimum_batch}; "
        f"coins and noise from {randomness}",
        "budget": f"ε ≤ {plan.target_epsilon:g} by {plan.accountant}, which allows "
        f"{experiment.halting_round} rounds of at most {plan.rounds}",
    }
    for name, text in facts.items():
        console.print(f"[bold]{name:8}[/bold] {text}", highlight=False, soft_wrap=True)
    console.print(f"[bold]{'folder':8}[/bold] {folder}", highlight=False, soft_wrap=True)
