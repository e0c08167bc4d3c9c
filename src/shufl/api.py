"""What `import shufl` offers to a script or a notebook; the command line does the same by files."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from shufl.accounting import PrivacyPlan, epsilon_table
from shufl.learning import load_tensors
from shufl.learning.code_digest import code_digest
from shufl.learning.config import Config, load
from shufl.learning.data.datasets import Dataset
from shufl.learning.parameters import frozen_digest, load_sent
from shufl.learning.your_code import (
    Carried,
    is_carried,
    make_importable,
    one_line,
    usual_settings,
    your_code,
)
from shufl.protocol import StoppedBy
from shufl.protocol.console import Console
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import initial_model
from shufl.results.plots import plot_score_epsilon
from shufl.results.run import Run
from shufl.results.run_folder import MetricsError, config_of, read_run
from shufl.results.tables import scores_of, too_few_present
from shufl.server import RoundFailed, load_checkpoint
from shufl.simulator.grid.runner import play_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GivenDataset = Dataset | Callable[[], Dataset] | None
GivenModel = nn.Module | Callable[..., nn.Module] | None


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

_STANDS_FOR = {"dataset": ("data.dataset",), "model": ("model.name", "model.options")}
"""The keys of a configuration in whose place an object stands; the first has its name."""


def run(
    config: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    dataset: GivenDataset = None,
    model: GivenModel = None,
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
        model: a `torch.nn.Module`, which is copied; or a function that takes the shape of a record
            and the number of outputs, and returns one. It stands in place of `model.name` and
            `model.options`.
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
        config = Path(config)
    if not (changes is None or isinstance(changes, Mapping)):
        raise ConfigError(f"changes must be a dict of values by section.key, got {changes!r}")
    changes, runs = dict(changes or {}), Path(runs)
    _check_on_round(on_round)
    folder = config.parent if isinstance(config, Path) else Path()
    make_importable([folder, Path.cwd()])
    given = {"dataset": dataset, "model": model}
    for argument, keys in _STANDS_FOR.items():
        if given[argument] is None:
            continue
        for key in changes:
            if str(key).strip().startswith(keys) or key == keys[0].partition(".")[0]:
                raise ConfigError(
                    f"changes must not have {key}: the argument {argument}= stands for it"
                )
        changes |= dict.fromkeys(keys, "") | {keys[0]: f"object:{_name_of(given[argument])}"}
    source = config if isinstance(config, Mapping) else str(config)
    loaded = _with_objects(load(source, changes), dataset, model)
    return _train(Run.new(loaded, runs, Console(quiet=not progress)), on_round)


def resume(
    folder: str | Path,
    *,
    dataset: GivenDataset = None,
    model: GivenModel = None,
    on_round: OnRound | None = None,
    progress: bool = True,
) -> RunResult:
    """Goes on with an interrupted run, to its end.

    Args:
        folder: the run folder.
        dataset: the object that `run` was given as its dataset; None if it was given none.
        model: the object that `run` was given as its model; None if it was given none.
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
    folder = Path(folder)
    make_importable([Path.cwd()])
    config = _with_objects(config_of(folder), dataset, model)
    _check_on_round(on_round)
    return _train(Run.of(folder, Console(quiet=not progress), config=config), on_round)


def load_run(
    folder: str | Path, *, dataset: GivenDataset = None, model: GivenModel = None
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
        dataset: the object that `run` was given as its dataset. Only `RunResult.model` needs it.
        model: the object that `run` was given as its model. Only `RunResult.model` needs it.

    Returns:
        The results so far, or of the whole run.

    Raises:
        ConfigError: it is no run folder, or an object is superfluous.
        LedgerError, MetricsError: there is no ledger, a file is damaged, or the ledger lacks
            rounds.
    """
    folder = Path(folder).absolute()
    make_importable([Path.cwd()])
    config = _with_objects(config_of(folder), dataset, model)
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
    source: str | Path, *, results: str | Path = "results", cpus: int = 1, progress: bool = True
) -> list[dict[str, Any]]:
    """Plays a grid of configurations and seeds on Ray, as `shufl experiment` does.

    Args:
        source: a TOML file, or the name of a grid that ships with shufl.
        results: the folder in which runs are kept; a run that is there is not played again.
        cpus: processors for each run.
        progress: whether to print a line for each run.

    Returns:
        A dict for each run: series, value and seed; score, loss and rounds; the plan's numbers; ε
        by accountant; and command, commit, date and versions.

    Raises:
        ConfigError: a mistake in the grid, found before any work.
        EngineFailed: Ray does not start, or lacks processors.
        RuntimeError: some runs failed; the page says why, and the others are kept.
        KeyboardInterrupt: a signal came; the same call goes on with the grid.
    """
    make_importable([Path(source).parent, Path.cwd()])
    results = Path(results)
    rows, page, failed = play_grid(str(source), results, None, cpus, Console(quiet=not progress))
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows) + len(failed)} runs failed, see {page}")
    return rows


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


def _with_objects(config: Config, dataset: GivenDataset, model: GivenModel) -> Config:
    """The configuration with the objects in it, in the places that have an object's name."""
    for section, key, given in (("data", "dataset", dataset), ("model", "name", model)):
        if given is None:
            continue
        name = getattr(getattr(config, section), key)
        if not is_carried(str(name)):
            raise ConfigError(f"{section}.{key} of this run is {name}, not an object")
        value = given
        if key == "dataset" and callable(given):
            with your_code(f"dataset {_name_of(given)} could not be made", quote=()):
                value = given()
        changed = getattr(config, section).model_copy(update={key: Carried(name, value)})
        config = config.model_copy(update={section: changed})
    return config


def _name_of(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__name__))
