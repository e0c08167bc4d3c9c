"""What `import shufl` offers to a script or a notebook; the command line does the same by files."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from shufl.accounting import PrivacyPlan, epsilon_table
from shufl.learning import load_tensors
from shufl.learning.code_digest import code_digest
from shufl.learning.config import Config, load
from shufl.learning.data.datasets import Dataset
from shufl.learning.given_objects import carried, placeholders, with_objects
from shufl.learning.parameters import frozen_digest, load_sent
from shufl.learning.tasks import Task
from shufl.learning.your_code import make_importable, one_line, usual_settings
from shufl.protocol import StoppedBy
from shufl.protocol.console import Console
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import initial_model
from shufl.results.plots import plot_score_epsilon
from shufl.results.run import Run
from shufl.results.run_folder import MetricsError, config_of, read_run
from shufl.results.tables import scores_of, too_few_present
from shufl.server import RoundFailed, load_checkpoint
from shufl.simulator.grid.definition import grid_over, load_grid
from shufl.simulator.grid.runner import play_grid
from shufl.simulator.grid.table import varying_first

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GivenDataset = Dataset | Callable[[], Dataset] | None
GivenModel = nn.Module | Callable[..., nn.Module] | None
GivenFunction = Callable[..., Any] | None


STOP: Final = object()
"""What `on_round` returns to stop a run after the round."""


class RunResult:
    """The results of a run, or of its rounds so far.

    Attributes:
        folder: the run folder.
        plan: the privacy plan.
        metrics: one dict a round, as in metrics.jsonl; `pandas.DataFrame(run.metrics)` takes it.
        score: of the final model on the test data; before the end, of the last round that was
            evaluated. None if no round was.
        score_name: the name of the metric that `score` is, such as `accuracy`.
        stopped_by: why the run ended: `budget`, `rounds` (the plan's last), `on_round` (it returned
            `STOP`) or `interrupt`. None before the end, and for a run that failed.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        plan: PrivacyPlan,
        rounds: int,
        metrics: list[dict[str, Any]],
        score: float | None = None,
        stopped_by: StoppedBy | None = None,
    ):
        self.folder, self.plan, self.metrics = folder, plan, metrics
        self.score_name: str = metrics[0]["score"] if metrics else ""
        scores = scores_of(metrics)
        self.score = scores[-1][1] if score is None and scores else score
        self.stopped_by = stopped_by
        self._config, self._rounds = config, rounds

    @functools.cached_property
    def _table(self) -> list[Any]:
        too_few = too_few_present(self.plan, self.metrics, self._rounds)
        return epsilon_table(self.plan, self._rounds, too_few)

    @property
    def epsilon(self) -> dict[str, float | None]:
        """ε of all rounds that the budget allows, by accountant; None if one cannot tell it.

        It holds however the run ended. The ε of the rounds so far does not hold if somebody stopped
        the run because of its results: that choice depends on the data.
        """
        return {
            row.name: row.epsilon if row.planned is None else row.planned for row in self._table
        }

    @property
    def epsilon_so_far(self) -> dict[str, float | None]:
        """ε of the rounds that are spent, by accountant, if nobody chose when to stop."""
        return {row.name: row.epsilon for row in self._table}

    @functools.cached_property
    @usual_settings()
    def model(self) -> nn.Module:
        """The final model, on the CPU.

        Raises:
            RoundFailed: the run has not ended, or the file is damaged.
            ConfigError: the model, or the data that give its shape, are objects that `load_run` was
                not given, or that differ from those of `run`; or frozen parameters have changed.
        """
        if not (path := self.folder / "model.pt").exists():
            raise RoundFailed(f"{path} is missing: the run has not come to its end")
        code_digest(self._config.own_code)  # or refuses what has changed
        model = initial_model(self._config)
        try:
            state = load_tensors(path)
        except Exception as error:
            raise RoundFailed(f"{path} cannot be read: {one_line(error)}") from error
        try:
            load_sent(model, state)
        except RuntimeError as error:
            raise ConfigError(
                f"{path} is of another model than {self._config.model.name}"
            ) from error
        if frozen := frozen_digest(model):
            kept = load_checkpoint(self.folder / "checkpoint.pt").origin.get("frozen parameters")
            if kept != frozen[:12]:
                raise ConfigError(f"{path} is of frozen parameters {kept}, here are {frozen[:12]}")
        return model

    def plot(self) -> Figure:
        """A plot of the score against ε, with a curve for each accountant."""
        return plot_score_epsilon(self.metrics, self.plan)

    def __repr__(self) -> str:
        score = "none" if self.score is None else f"{self.score:.4f}"
        return f"<run of {self._rounds} rounds, {self.score_name} {score}, in {self.folder}>"


OnRound = Callable[[RunResult, nn.Module], Any]


def run(
    config: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    dataset: GivenDataset = None,
    features: GivenFunction = None,
    task: Task | None = None,
    model: GivenModel = None,
    algorithm: GivenFunction = None,
    aggregator: GivenFunction = None,
    on_round: OnRound | None = None,
    progress: bool = True,
    runs: str | Path = "runs",
) -> RunResult:
    """Trains until the privacy budget or the planned rounds end, as `shufl run` does.

    Examples:
        >>> import shufl
        >>> changes = {"privacy.rounds": 2, "simulation.engine": "vectorised"}
        >>> run = shufl.run("quickstart", changes, progress=False)
        >>> len(run.metrics), run.score_name
        (2, 'accuracy')
        >>> run.epsilon["blanket"] < run.epsilon["local"]
        True

    Args:
        config: the name of a configuration that ships with shufl, a TOML file, or its values.
        changes: values by `section.key`, as `shufl run --set` takes them.
        dataset: a `Dataset`, or a function without arguments that returns one, in place of
            `data.dataset`.
        features: a function that maps records, in place of `data.features`.
        task: what is learnt, in place of `data.task`.
        model: a `torch.nn.Module`, which is copied; or a function that takes the shape of a record,
            the number of outputs and the keyword arguments in `model.options`, and returns one. It
            stands in place of `model.name`.
        algorithm: a function that computes a user's step, in place of `training.algorithm`.
        aggregator: a function that makes an aggregator, in place of `training.aggregator`.
        on_round: a function that is called after every round with the result so far and a copy of
            the model. It may return `STOP`. An error of it ends the run and is raised as it is. On
            Flower it is called in another thread.
        progress: whether to print progress and tables.
        runs: the folder in which the run folder `<name>-<time>` is made.

    Returns:
        The results of the whole run.

    Raises:
        ConfigError: a mistake in the configuration, found before any work.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early; its folder
            stays, and `resume` goes on with it.
        KeyboardInterrupt: a signal ended the run in order; `resume` goes on with it.
    """
    if not isinstance(config, Mapping):
        config = _path("config", config)
    if not (changes is None or isinstance(changes, Mapping)):
        raise ConfigError(f"changes must be a dict of values by section.key, got {changes!r}")
    changes, runs = dict(changes or {}), _path("runs", runs)
    _check_on_round(on_round)
    folder = config.parent if isinstance(config, Path) else Path()
    make_importable([folder, Path.cwd()])
    objects = carried(dataset, features, task, model, algorithm, aggregator)
    source = config if isinstance(config, Mapping) else str(config)
    loaded = with_objects(load(source, placeholders(objects, changes)), objects)
    return _train(Run.new(loaded, runs, Console(quiet=not progress)), on_round)


def resume(
    folder: str | Path,
    *,
    dataset: GivenDataset = None,
    features: GivenFunction = None,
    task: Task | None = None,
    model: GivenModel = None,
    algorithm: GivenFunction = None,
    aggregator: GivenFunction = None,
    on_round: OnRound | None = None,
    progress: bool = True,
) -> RunResult:
    """Goes on with an interrupted run, to its end.

    Args:
        folder: the run folder.
        dataset: as `run` was given it; None if it was given none.
        features: as `run` was given them.
        task: as `run` was given it.
        model: as `run` was given it.
        algorithm: as `run` was given it.
        aggregator: as `run` was given it.
        on_round: as for `run`; it is not called for rounds that have a row in metrics.jsonl.
        progress: as for `run`.

    Returns:
        The results of the whole run.

    Raises:
        ConfigError: it is no run folder, or an object is missing or superfluous.
        CheckpointError: the data, the model or the versions have changed.
        LedgerError, MetricsError: a file of the folder is damaged.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError, KeyboardInterrupt: as for `run`.
    """
    objects = carried(dataset, features, task, model, algorithm, aggregator)
    folder = _path("folder", folder)
    make_importable([Path.cwd()])
    config = with_objects(config_of(folder), objects)
    _check_on_round(on_round)
    return _train(Run.of(folder, Console(quiet=not progress), config=config), on_round)


def load_run(
    folder: str | Path,
    *,
    dataset: GivenDataset = None,
    features: GivenFunction = None,
    task: Task | None = None,
    model: GivenModel = None,
    algorithm: GivenFunction = None,
    aggregator: GivenFunction = None,
) -> RunResult:
    """Reads a run folder back.

    Examples:
        >>> import shufl
        >>> changes = {"privacy.rounds": 1, "simulation.engine": "vectorised"}
        >>> run = shufl.run("quickstart", changes, progress=False)
        >>> shufl.load_run(run.folder).epsilon == run.epsilon
        True

    Args:
        folder: the run folder.
        dataset: as `run` was given it. Only `RunResult.model` needs this object, and those below.
        features: as `run` was given them.
        task: as `run` was given it.
        model: as `run` was given it.
        algorithm: as `run` was given it.
        aggregator: as `run` was given it.

    Returns:
        The results so far, or of the whole run.

    Raises:
        ConfigError: it is no run folder, or an object is superfluous.
        LedgerError, MetricsError: there is no ledger, a file is damaged, or the ledger lacks
            rounds.
    """
    objects = carried(dataset, features, task, model, algorithm, aggregator)
    folder = _path("folder", folder).absolute()
    make_importable([Path.cwd()])
    config = with_objects(config_of(folder), objects)
    ledger, rows = read_run(folder)
    score: float | None = None
    stopped_by: StoppedBy | None = None
    if (summary := folder / "summary.json").exists():
        try:
            read = json.loads(summary.read_bytes())
            found, stopped_by = read[read["score"]], read["stopped_by"]
            score = math.nan if found is None else float(found)  # null: it is not finite
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{summary} is damaged: {one_line(error)}") from error
    return RunResult(
        folder, config, ledger.plan, len(ledger.entries), rows, score=score, stopped_by=stopped_by
    )


def grid(
    source: str | Path | Mapping[str, Any],
    over: Mapping[str, Iterable[Any]] | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = (0,),
    dataset: GivenDataset = None,
    features: GivenFunction = None,
    task: Task | None = None,
    model: GivenModel = None,
    algorithm: GivenFunction = None,
    results: str | Path = "results",
    cpus: int = 1,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Plays many runs on Ray, and keeps their results.

    Examples:
        >>> import shufl
        >>> rows = shufl.grid(
        ...     "quickstart",
        ...     over={"training.learning_rate": [0.1, 0.5], "privacy.check_in_rate": [0.3, 0.5]},
        ...     changes={"privacy.rounds": 1},
        ...     progress=False,
        ... )
        >>> len(rows), list(rows[0])[:4]
        (4, ['training.learning_rate', 'privacy.check_in_rate', 'seed', 'score'])

    Args:
        source: a configuration, as `run` takes it; with `over=None` a grid as `shufl experiment`
            takes it: a TOML file, or the name of one that ships with shufl.
        over: values by `section.key`. A run is played for each combination of them and each seed,
            by the vectorised engine.
        changes: values of all runs, by `section.key`.
        seeds: of the runs.
        dataset: as for `run`.
        features: as for `run`.
        task: as for `run`.
        model: as for `run`.
        algorithm: as for `run`. There is no aggregator: this engine has no single reports.
        results: the folder in which runs are kept; a run that is there is not played again.
        cpus: processors for each run.
        progress: whether to print a line for each run.

    Returns:
        A dict for each run, which `pandas.DataFrame(rows)` takes: first what varies (the keys of
        `over`, or series and value; seed, score, loss, ε by accountant), then the rest of the plan,
        the configuration, command, commit, date and versions.

    Raises:
        ConfigError: a mistake in the grid, found before any work.
        EngineFailed: Ray does not start, or lacks processors.
        RuntimeError: some runs failed; the page says why, and the others are kept.
        KeyboardInterrupt: a signal came; the same call goes on with the grid.
    """
    objects = carried(dataset, features, task, model, algorithm, None)
    if not isinstance(source, Mapping):
        make_importable([_path("source", source).parent])
        source = str(source)
    make_importable([Path.cwd()])
    results = _path("results", results)
    if over is not None:
        name, asked = grid_over(source, over, seeds, dict(changes or {}), objects)
    elif objects or changes or isinstance(source, Mapping):
        raise ConfigError("over must say what varies: a dict of lists of values by section.key")
    else:
        name, asked = load_grid(source)
    console = Console(quiet=not progress)
    found, page, failed = play_grid(name, asked, results, None, cpus, console, objects)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(found) + len(failed)} runs failed, see {page}")
    return varying_first(found, list(over or ("series", "value")))


def _path(argument: str, given: Any) -> Path:
    """A path that an argument gives; refuses what is none."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{argument} must be a path, got {given!r}")
    return Path(given)


def _train(run: Run, on_round: OnRound | None) -> RunResult:
    rows: list[dict[str, Any]] = []  # yours, which you may change

    def result(rounds: int, **ended: Any) -> RunResult:
        rows.extend(copy.deepcopy(run.rows[len(rows) :]))
        config, plan = run.experiment.config, run.experiment.plan
        return RunResult(run.folder, config, plan, rounds, list(rows), **ended)

    def told(model: nn.Module) -> bool:
        assert on_round is not None
        return on_round(result(run.rows[-1]["round"]), copy.deepcopy(model)) is STOP

    ended = run.train() if on_round is None else run.train(told)
    if ended.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"shufl.resume goes on with the run in {run.folder}")
    score = ended.metrics[run.experiment.task.score]
    return result(ended.rounds, score=score, stopped_by=ended.stopped_by)


def _check_on_round(on_round: Any) -> None:
    """Refuses what cannot be called with a result and a model."""
    try:
        if on_round is not None:
            inspect.signature(on_round).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"on_round must take a result and a model: {error}") from error
    except ValueError:  # of a function that does not say what it takes
        pass
