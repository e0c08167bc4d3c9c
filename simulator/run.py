"""One run from configuration to report: shuffler process, Flower engine, run folder."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from accounting import Ledger, LedgerError
from clients import ClientSettings, make_client_app
from server import RoundRecord, RunResult, ServerSettings, make_server_app
from shuffler import ShufflerProcess
from simulator.config import Config, dumps
from simulator.engine import interrupts, logs_to, run_on_flower
from simulator.experiment import Experiment, prepare
from simulator.plain_json import to_json
from simulator.progress import RoundProgress
from simulator.records import RunRecorder
from simulator.report import plot_accuracy_epsilon, print_summary, summarise


def run(config: Config, runs: Path, console: Console) -> RunResult:
    """Runs a configuration to its end and reports.

    The run folder `<name>-<time>` gets config.toml, plan.json, metrics.jsonl, tensorboard/,
    ledger.jsonl, checkpoint.pt, model.pt, summary.json, accuracy_epsilon.png, and the logs.

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
    summary = summarise(result, experiment.plan)
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
    """Starts the shuffler, then Flower, and waits for the end."""
    config, plan = experiment.config, experiment.plan
    run_id = secrets.token_hex(8)
    stop = threading.Event()
    results: list[RunResult] = []
    with (
        interrupts(stop),
        ShufflerProcess(log_file=folder / "shuffler.log") as shuffler,
        RoundProgress(console, experiment.halting_round, plan.target_epsilon) as progress,
        logs_to(folder / "server.log", "server"),
    ):

        def observe(record: RoundRecord) -> None:
            recorder(record)
            progress(record)

        server_app = make_server_app(
            ServerSettings(
                run_id=run_id,
                plan=plan,
                make_model=experiment.make_model,
                load_test=experiment.load_test,
                optimiser=experiment.optimiser,
                nodes=config.simulation.nodes,
                shuffler_address=shuffler.address,
                shuffler_credentials=shuffler.control,
                folder=folder,
                round_timeout=config.simulation.round_timeout,
                evaluate_every=config.training.evaluate_every,
                checkpoint_every=config.training.checkpoint_every,
                sealing=config.shuffler.sealing,
            ),
            observe,
            results.append,
            stop.is_set,
        )
        client_app = make_client_app(
            ClientSettings(
                run_id=run_id,
                plan=plan,
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
    facts: dict[str, Any] = {
        "data": f"{config.data.dataset}, {plan.users} users on {config.simulation.nodes} nodes; "
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
