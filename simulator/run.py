"""One run from configuration to report, new or resumed: progress, run folder, summary."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic_core import to_json
from rich.text import Text

from shufl.accounting import (
    GaussianMechanism,
    Ledger,
    LedgerError,
    PrivacyPlan,
    rounds_within_budget,
)
from shufl.server import (
    Checkpoint,
    CheckpointError,
    RoundRecord,
    RunResult,
    TrainingSettings,
    load_checkpoint,
)
from shufl.simulator.config import Config, dumps, load
from shufl.simulator.console import Console
from shufl.simulator.data.datasets import dataset_digest
from shufl.simulator.data.partition import sharing
from shufl.simulator.engines import ENGINES, Engine, interrupts
from shufl.simulator.experiment import Experiment, prepare
from shufl.simulator.names import DATASETS
from shufl.simulator.plots import plot_accuracy_epsilon
from shufl.simulator.progress import RoundProgress
from shufl.simulator.records import RunRecorder, check_ledger, note_start, rounds_told
from shufl.simulator.report import print_summary, summarise
from shufl.simulator.section import ConfigError
from shufl.simulator.tables import epsilon_text

MakeEngine = Callable[[Experiment], Engine]

_MAY_CHANGE = ("cpus_per_node", "round_timeout", "workers")
"""Keys of `[simulation]` with which a run may be resumed in another way: they decide no number.

But for the whole CPUs of a node, which are its threads: sums depend on how many there are.
"""


def run(config: Config, runs: Path, console: Console) -> RunResult:
    """Runs a configuration to its end and reports.

    The run folder `<name>-<time>` gets config.toml, plan.json, starts.jsonl, metrics.jsonl,
    tensorboard/, ledger.jsonl, checkpoint.pt, model.pt, summary.json, accuracy_epsilon.png, and on
    Flower the logs.

    Args:
        config: validated configuration.
        runs: where the run folder is made.
        console: where progress and tables go.

    Returns:
        How the run ended.

    Raises:
        ConfigError: before any work.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early; its folder
            stays.
    """
    experiment, engine = _prepare(config, None)
    return _begin(make_folder(runs, experiment), experiment, engine, console)


def begin_run(folder: Path, console: Console, make_engine: MakeEngine) -> RunResult:
    """Runs the configuration in a folder that `make_folder` has made, to its end.

    Args:
        folder: the run folder.
        console: where progress and tables go.
        make_engine: makes the engine, whatever the configuration names.

    Returns, raises: as `run`.
    """
    check_ledger(folder, 0, rounds_told(folder))
    experiment, engine = _prepare(load(str(folder / "config.toml")), make_engine)
    return _begin(folder, experiment, engine, console)


def _begin(folder: Path, experiment: Experiment, engine: Engine, console: Console) -> RunResult:
    _describe(console, experiment, engine, folder)
    run_id = secrets.token_hex(8)
    with Ledger.create(folder / "ledger.jsonl", experiment.plan, run_id) as ledger:
        return _run_in(folder, experiment, engine, ledger, None, console)


def resume_run(folder: Path, console: Console, make_engine: MakeEngine | None = None) -> RunResult:
    """Continues an interrupted run in its folder, with its configuration, to its end.

    What `_MAY_CHANGE` names may be another there. The run goes on from the checkpoint.
    `server.training` says what becomes of the rounds that were spent after it; the ledger keeps
    them all.

    Args:
        folder: the run folder.
        console: where progress and tables go.
        make_engine: makes the engine; left out: the one that the configuration names.

    Returns:
        How the run ended.

    Raises:
        ConfigError: the folder's config.toml cannot be run.
        LedgerError: no ledger, a damaged one, one that lacks rounds, that of another plan, or one
            in use.
        CheckpointError: no checkpoint although rounds are spent, or one that is damaged, of another
            run, or made by another configuration or other versions.
        MetricsError: the rows of the rounds so far cannot be read.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: as for `run`.
    """
    folder = folder.absolute()
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"a run folder has a config.toml, {folder} has none")
    experiment, engine = _prepare(load(str(folder / "config.toml")), make_engine)
    with Ledger.open(folder / "ledger.jsonl", experiment.plan) as ledger:
        check_ledger(folder, ledger.last_round, rounds_told(folder))
        checkpoint = _checkpoint_of(folder, experiment, engine, ledger)
        note_start(folder)
        _describe(console, experiment, engine, folder)
        done, spent = checkpoint.round if checkpoint else 0, ledger.last_round
        what = f"resumed after round {done}"
        if spent > done:
            fate = "played again at no further cost" if _repeats(experiment, engine) else "lost"
            what += f"; rounds {done + 1} to {spent} are spent and {fate}"
        _print_fact(console, "resume", what)
        return _run_in(folder, experiment, engine, ledger, checkpoint, console)


def _checkpoint_of(
    folder: Path, experiment: Experiment, engine: Engine, ledger: Ledger
) -> Checkpoint | None:
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
    for name, here in _origin(experiment, engine).items():
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


def _origin(experiment: Experiment, engine: Engine) -> dict[str, str]:
    """What decides a run's numbers beside its plan: a spent round is played again only with it."""
    config = experiment.config
    threads = max(1, int(config.simulation.cpus_per_node))
    alike = dict.fromkeys(_MAY_CHANGE) | {"cpus_per_node": threads}
    simulation = config.simulation.model_copy(update=alike)
    numbers = dumps(config.model_copy(update={"simulation": simulation}))
    configuration = hashlib.sha256(numbers.encode()).hexdigest()[:12]
    versions = {name: importlib.metadata.version(name) for name in ("shufl", "torch", "numpy")}
    origin = {"config.toml": configuration, "nodes": engine.nodes, **versions}
    data = config.data
    if data.dataset not in DATASETS or data.features is not None:  # they may change
        names = " ".join(filter(None, (data.dataset, data.features)))
        origin[f"data.dataset {names}"] = dataset_digest(experiment.dataset)[:12]
    return origin


def _prepare(config: Config, make_engine: MakeEngine | None) -> tuple[Experiment, Engine]:
    """The experiment, and the engine that will run it."""
    experiment = prepare(config)
    return experiment, (make_engine or ENGINES[config.simulation.engine].load())(experiment)


def _repeats(experiment: Experiment, engine: Engine) -> bool:
    """Whether a round played again from the same model makes the same release, bit for bit."""
    return experiment.seed is not None and engine.repeats_releases


def _run_in(
    folder: Path,
    experiment: Experiment,
    engine: Engine,
    ledger: Ledger,
    checkpoint: Checkpoint | None,
    console: Console,
) -> RunResult:
    """Trains and reports, in a folder whose ledger is held."""
    config, plan = experiment.config, experiment.plan
    training = TrainingSettings(
        plan=plan,
        ledger=ledger,
        make_model=experiment.make_model,
        load_test=experiment.load_test,
        optimiser=experiment.optimiser,
        folder=folder,
        evaluate_every=config.training.evaluate_every,
        checkpoint_every=config.training.checkpoint_every,
        origin=_origin(experiment, engine),
        reproducible=_repeats(experiment, engine),
        checkpoint=checkpoint,
    )
    recorder = RunRecorder(folder, plan)
    stop = threading.Event()
    progress = RoundProgress(console, experiment.halting_round, plan.target_epsilon)

    def observe(record: RoundRecord) -> None:
        recorder(record)
        blanket = recorder.rows[-1]["epsilons"]["blanket"]
        progress(record, None if plan.accountant == "blanket" else blanket)

    (folder / "summary.json").unlink(missing_ok=True)  # of an earlier end, before it was resumed
    try:
        with interrupts(stop), progress:
            result = engine.run(training, observe, stop)
    except BaseException:
        _tell_what_was_spent(console, folder)
        raise
    finally:
        recorder.close()
    summary = summarise(result, experiment, engine, recorder)
    (folder / "summary.json").write_bytes(to_json(summary, indent=2, inf_nan_mode="null") + b"\n")
    print_summary(console, summary, engine, folder)
    plot_accuracy_epsilon(recorder.rows, plan, folder / "accuracy_epsilon.png")
    return result


def _tell_what_was_spent(console: Console, folder: Path) -> None:
    """After a run that ended early: what its ledger says, which is what counts."""
    try:
        ledger = Ledger.read(folder / "ledger.jsonl")
    except LedgerError:
        spent = "nothing was spent"
    else:
        plan, count, allowed = ledger.plan, len(ledger.entries), rounds_within_budget(ledger.plan)
        spent = f"{count} rounds spent, ε {epsilon_text(plan.epsilon(rounds=count))}"
        if count < allowed:
            spent += f" so far and {epsilon_text(plan.epsilon(rounds=allowed))} as planned,"
        spent += f" by {plan.accountant}"
    console.print(
        f"ended early: {spent}; ledger, metrics and checkpoints stay in {folder}", soft_wrap=True
    )


def make_folder(runs: Path, experiment: Experiment) -> Path:
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
    note_start(folder)
    return folder


def _strength(plan: PrivacyPlan) -> str:
    """What one report's noise is worth by itself."""
    if not isinstance(plan.mechanism, GaussianMechanism):
        return f"{plan.mechanism.name} of ε₀ = {epsilon_text(plan.mechanism.local_epsilon)}"
    return f"σ = {plan.sigma:g}"


def _describe(console: Console, experiment: Experiment, engine: Engine, folder: Path) -> None:
    """What is about to run, in five lines or six."""
    plan, config = experiment.plan, experiment.config
    mapped = "" if config.data.features is None else f"{config.data.features} of "
    users = f"{plan.users} users"
    if engine.nodes == "simulated":  # real ones may have data of their own
        records = len(experiment.dataset.train_labels)
        users += f", {sharing(records, plan.users, config.data.partition)}"
    randomness = "the operating system's entropy" if experiment.seed is None else "the seed"
    facts = {
        "data": f"{mapped}{config.data.dataset}, {users}; "
        f"{config.model.name}, {experiment.parameters} parameters",
        "engine": engine.description,
        "privacy": f"γ = {plan.check_in_rate:g}, C = {plan.mechanism.clip_norm:g}, "
        f"z = {plan.mechanism.noise_multiplier:g} ({_strength(plan)}), {plan.adjacency}, "
        f"δ = {plan.delta:.3g}, minimum batch {plan.minimum_batch}, "
        f"{plan.shuffler_blankets:g} blankets a round expected; "
        f"coins and noise from {randomness}",
        "budget": f"ε ≤ {plan.target_epsilon:g} by {plan.accountant}, which allows "
        f"{experiment.halting_round} rounds of at most {plan.rounds}",
        "folder": str(folder),
    }
    if experiment.unused:
        facts["note"] = experiment.unused
    for name, text in facts.items():
        _print_fact(console, name, text)


def _print_fact(console: Console, name: str, text: str) -> None:
    console.print(Text(f"{name:8}", style="bold"), text, highlight=False, soft_wrap=True)
