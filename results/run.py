"""A run from its configuration to its summary, and the folder that it owns."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.text import Text
from torch import nn

from shufl.accounting import (
    Ledger,
    LedgerError,
    PrivacyPlan,
    participation_note,
    rounds_within_budget,
)
from shufl.learning.code_digest import code_digest
from shufl.learning.config import FIXED, Config, dumps
from shufl.learning.data.datasets import dataset_digest
from shufl.learning.data.person_ids import spaced
from shufl.learning.parameters import frozen_digest, load_sent
from shufl.learning.your_code import usual_settings
from shufl.protocol import GaussianMechanism, RoundRecord
from shufl.protocol.console import Console
from shufl.protocol.files import write_whole
from shufl.protocol.text import rounded_down, rounded_up
from shufl.results.engine_interface import Engine
from shufl.results.experiment import Experiment, prepare, prepare_simulation
from shufl.results.interrupts import interrupts
from shufl.results.plots import plot_score_epsilon
from shufl.results.progress import RoundProgress
from shufl.results.run_folder import (
    RunRecorder,
    check_ledger,
    config_of,
    make_folder,
    note_start,
    rounds_told,
)
from shufl.results.summary import ENROLLED, print_summary, summarise
from shufl.results.tables import epsilon_text
from shufl.server import Checkpoint, CheckpointError, RunEnd, TrainingSettings, load_checkpoint

MakeEngine = Callable[[Experiment], Engine]
OnRound = Callable[[nn.Module], bool]

_MAY_CHANGE = ("cpus_per_node", "round_timeout", "workers")
"""Keys of `[simulation]` that may change when a run is resumed: no number depends on them.

The whole CPUs of a node may not: they are its threads, and sums depend on how many there are.
"""


class Run:
    """A run and its folder `<name>-<time>`: `new` makes one, `of` opens one again, `train` ends it.

    The folder gets config.toml, plan.json, starts.jsonl, metrics.jsonl, tensorboard/,
    ledger.jsonl, checkpoint.pt, model.pt, summary.json, score_epsilon.png, and on Flower the
    logs.

    Attributes:
        rows: of metrics.jsonl, as far as the run is.
    """

    def __init__(self, folder: Path, experiment: Experiment, engine: Engine, console: Console):
        self.folder, self.experiment, self.engine = folder.absolute(), experiment, engine
        self.rows: list[dict[str, Any]] = []
        self._console = console

    @classmethod
    @usual_settings()
    def new(cls, config: Config, runs: Path, console: Console) -> Run:
        """A run of this configuration, with a folder of its own in `runs`.

        Raises:
            ConfigError: before any work.
        """
        runs = runs.absolute()  # your code may change to another folder
        experiment, engine = prepare_simulation(config)
        return cls(make_folder(runs, experiment), experiment, engine, console)

    @classmethod
    @usual_settings()
    def of(
        cls,
        folder: Path,
        console: Console,
        make_engine: MakeEngine | None = None,
        config: Config | None = None,
    ) -> Run:
        """The run whose folder this is, with the folder's configuration.

        The keys in `_MAY_CHANGE` may have other values there. `make_engine` makes an engine of
        real nodes, which no configuration names; `config` is the folder's, if it has been read
        already.

        Raises:
            ConfigError: the folder's config.toml cannot be run.
        """
        config = config or config_of(folder)
        if make_engine is not None:  # a server's process loads no engine of a simulation
            experiment = prepare(config, real_nodes=True)
            return cls(folder, experiment, make_engine(experiment), console)
        return cls(folder, *prepare_simulation(config), console)

    @usual_settings()
    def train(self, on_round: OnRound = lambda model: False) -> RunEnd:
        """Trains to the end, from the checkpoint if the run was begun before.

        `server.training` says what becomes of the rounds that were spent after the checkpoint; the
        ledger keeps them all. `on_round` is called after every round that was not played before,
        with the model, and says whether to stop the run.

        Raises:
            LedgerError: the ledger is damaged, lacks rounds, has another plan, or is in use.
            CheckpointError: rounds are spent and there is no checkpoint; or it is damaged, of
                another run, or made by another configuration or other versions.
            MetricsError: the rows of the rounds so far cannot be read.
            EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early; its folder
                stays, as it does if `on_round` raises an error.
        """
        path, plan = self.folder / "ledger.jsonl", self.experiment.plan
        if begun := path.exists():
            ledger = Ledger.open(path, plan)
        else:
            check_ledger(self.folder, 0, rounds_told(self.folder))
            ledger = Ledger.create(path, plan, secrets.token_hex(8))
        with ledger:
            if begun:
                check_ledger(self.folder, ledger.last_round, rounds_told(self.folder))
            checkpoint = self._checkpoint(ledger)
            _describe(self._console, self.experiment, self.engine, self.folder)
            if begun:
                done, spent = checkpoint.round if checkpoint else 0, ledger.last_round
                what = f"resumed after round {done}"
                if spent > done:
                    fate = "played again at no further cost" if self._repeats else "lost"
                    what += f"; rounds {done + 1} to {spent} are spent and {fate}"
                _print_fact(self._console, "resume", what)
            return self._train(ledger, checkpoint, on_round)

    def _train(self, ledger: Ledger, checkpoint: Checkpoint | None, on_round: OnRound) -> RunEnd:
        """Trains and reports, while the ledger is held."""
        experiment, folder, console = self.experiment, self.folder, self._console
        config, plan = experiment.config, experiment.plan
        training = TrainingSettings(
            plan=plan,
            ledger=ledger,
            make_model=experiment.make_model,
            load_test=experiment.load_test,
            task=experiment.task,
            optimiser=experiment.optimiser,
            folder=folder,
            evaluate_every=config.training.evaluate_every,
            checkpoint_every=config.training.checkpoint_every,
            origin=self._origin,
            reproducible=self._repeats,
            checkpoint=checkpoint,
        )
        recorder = RunRecorder(folder, plan)
        note_start(folder)
        self.rows = recorder.rows
        told = self.rows[-1]["round"] if self.rows else 0
        stop, stopped_by_caller = threading.Event(), False
        progress = RoundProgress(console, experiment.halting_round, plan.target_epsilon)

        def observe(record: RoundRecord, model: nn.Module) -> None:
            # Shown first: after the first round it takes seconds to price it by all accountants.
            alone = plan.accountant == "blanket"
            progress(record, None if alone else recorder.epsilon("blanket", record.round))
            recorder(record)
            nonlocal stopped_by_caller
            if record.round > told and on_round(model):
                stopped_by_caller = True
                stop.set()

        (folder / "summary.json").unlink(missing_ok=True)  # of an end before it was resumed
        try:
            with interrupts(stop), progress:
                result = self.engine.run(training, observe, stop)
        except BaseException:
            _tell_what_was_spent(console, folder)
            raise
        finally:
            recorder.close()
        if stopped_by_caller and result.stopped_by == "interrupt":
            result = replace(result, stopped_by="on_round")
        summary = summarise(result, experiment, self.engine, recorder)
        content = to_json(summary, indent=2, inf_nan_mode="null") + b"\n"
        write_whole(folder / "summary.json", content)
        print_summary(console, summary, self.engine, folder)
        plot_score_epsilon(recorder.rows, plan, folder / "score_epsilon.png")
        return result

    def _checkpoint(self, ledger: Ledger) -> Checkpoint | None:
        """The checkpoint at which the run goes on; None before its first round."""
        path, experiment = self.folder / "checkpoint.pt", self.experiment
        if not ledger.entries and not path.exists():
            return None
        checkpoint = load_checkpoint(path)
        if checkpoint.run_id != ledger.run_id:
            raise CheckpointError(
                f"checkpoint {path} is of run {checkpoint.run_id}, the ledger of run "
                f"{ledger.run_id}"
            )
        for name, here in self._origin.items():
            if (before := checkpoint.origin.get(name)) != here:
                raise CheckpointError(
                    f"checkpoint {path} was made with {name} {before}, it cannot go on with {here}"
                )
        try:
            load_sent(experiment.make_model(), checkpoint.model)
        except RuntimeError as error:
            raise CheckpointError(
                f"checkpoint {path} does not fit model {experiment.config.model.name}: its code "
                "has changed since the run began"
            ) from error
        return checkpoint

    @functools.cached_property
    def _origin(self) -> dict[str, str]:
        """What decides the run's numbers beside its plan; a resumed run must have the same."""
        config = self.experiment.config
        threads = max(1, int(config.simulation.cpus_per_node))
        alike = dict.fromkeys(_MAY_CHANGE) | {"cpus_per_node": threads}
        simulation = config.simulation.model_copy(update=alike)
        numbers = dumps(config.model_copy(update={"simulation": simulation, "about": None}))
        configuration = hashlib.sha256(numbers.encode()).hexdigest()[:12]
        versions = {name: importlib.metadata.version(name) for name in ("shufl", "torch", "numpy")}
        origin = {"config.toml": configuration, "nodes": self.engine.nodes, **versions}
        if frozen := frozen_digest(self.experiment.make_model()):
            origin["frozen parameters"] = frozen[:12]
        data = config.data
        if code := code_digest(config.own_code):
            origin[f"code of {' '.join(config.own_code)}"] = code[:12]
        if data.dataset not in FIXED or data.features is not None:
            names = " ".join(filter(None, (str(data.dataset), data.features)))
            origin[f"data.dataset {names}"] = dataset_digest(self.experiment.dataset)[:12]
        return origin

    @property
    def _repeats(self) -> bool:
        """Whether a round played again from the same model makes the same release, bit for bit."""
        return self.experiment.seed is not None and self.engine.repeats_releases


def _tell_what_was_spent(console: Console, folder: Path) -> None:
    """Prints what a run that ended early has spent: the ledger says it."""
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


def _strength(plan: PrivacyPlan) -> str:
    """What one report's noise is worth by itself."""
    if not isinstance(plan.mechanism, GaussianMechanism):
        return f"{plan.mechanism.name} of ε₀ = {epsilon_text(plan.mechanism.local_epsilon)}"
    return f"σ = {rounded_up(plan.sigma, 6)}"


def _drawn(plan: PrivacyPlan) -> str:
    by_allocation = plan.participation == "allocation"
    return f" (one round in every {plan.every}, drawn by the device)" if by_allocation else ""


def _mixed(plan: PrivacyPlan, parameters: int) -> str:
    """What is added to users' reports; with sums also what sums can and cannot do."""
    if plan.mixing == "shuffle":
        return f"{rounded_up(plan.shuffler_blankets, 6)} blankets a round expected"
    most = rounded_down(plan.longest_cheat(parameters), 3)
    return (
        f"sums with noise of {rounded_up(plan.noise_of_sum(plan.least_present))} C: all users "
        "send, no report can be looked at, and one cheating node can spoil a round, or add "
        f"{most} C to its sum (of more than one user: more)"
    )


def _describe(console: Console, experiment: Experiment, engine: Engine, folder: Path) -> None:
    """What is about to run, in a few lines."""
    plan, config = experiment.plan, experiment.config
    mapped = "" if config.data.features is None else f"{config.data.features} of "
    users = f"{spaced(plan.users)} users {ENROLLED}"
    if engine.nodes == "simulated":  # real ones may have data of their own
        users = experiment.partition.told(experiment.users_by)
    randomness = "the operating system's entropy" if experiment.seed is None else "the seed"
    facts = {
        "data": f"{mapped}{config.data.dataset}, {users}; "
        f"{config.model.name}, {experiment.parameters} parameters",
        "engine": engine.description,
        "privacy": f"γ = {rounded_down(plan.check_in_rate, 6)}{_drawn(plan)}, "
        f"C = {plan.mechanism.clip_norm:g}, "
        f"z = {rounded_up(plan.mechanism.noise_multiplier, 6)} ({_strength(plan)}), "
        f"{plan.adjacency}, "
        f"δ = {rounded_up(plan.delta)}, minimum batch {plan.minimum_batch}, "
        f"{_mixed(plan, experiment.parameters)}; coins and noise from {randomness}",
        "budget": f"ε ≤ {plan.target_epsilon:g} by {plan.accountant}, which allows "
        f"{experiment.halting_round} rounds of at most {plan.rounds}",
        "folder": str(folder),
    }
    if experiment.unused:
        facts["note"] = experiment.unused
    if warning := participation_note(plan.check_in_rate, experiment.halting_round, plan.delta):
        facts["warning"] = warning
    for name, text in facts.items():
        _print_fact(console, name, text)


def _print_fact(console: Console, name: str, text: str) -> None:
    console.print(Text(f"{name:8}", style="bold"), text, highlight=False, soft_wrap=True)
