"""What `import shufl` offers to a script or a notebook; the command line does the same by files."""

from __future__ import annotations

import copy
import enum
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
from shufl.learning.config import Config, load
from shufl.learning.data.datasets import Dataset
from shufl.learning.isolation import usual_settings
from shufl.learning.own_code import code_digest
from shufl.learning.section import (
    Carried,
    ConfigError,
    is_carried,
    make_importable,
    one_line,
    readers_code,
)
from shufl.learning.trained import frozen_digest, load_sent
from shufl.protocol import StoppedBy
from shufl.protocol.console import Console
from shufl.results.experiment import Experiment
from shufl.results.plots import plot_score_epsilon
from shufl.results.rows import MetricsError, read_run
from shufl.results.run import Run, config_of
from shufl.results.tables import scores_of, too_few_present
from shufl.server import RoundFailed, load_checkpoint
from shufl.simulator.grid.runner import play_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GivenDataset = Dataset | Callable[[], Dataset] | None
GivenModel = nn.Module | Callable[..., nn.Module] | None


class _Stop(enum.Enum):
    STOP = "stop"


STOP: Final = _Stop.STOP
"""What `on_round` returns to stop a run after the round."""


class RunResult:
    """What a run came to, or has come to so far.

    Attributes:
        folder: the run folder.
        plan: the privacy plan.
        metrics: one dict a round, as in metrics.jsonl; `pandas.DataFrame(run.metrics)` takes it.
        score: on the test data, of the final model; before the end, of the last round that was
            evaluated, or None.
        score_name: what `score` is.
        stopped_by: `budget`, `rounds` (the plan's last), `on_round` (it returned `STOP`) or
            `interrupt`; None before the end, and of a run that failed.
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
        """ε by accountant, of all the rounds that the budget allows; None where it is not known.

        It holds however the run ended. ε of the rounds so far does not hold if somebody stopped
        the run because of its results: that choice depends on the data.
        """
        return {
            row.name: row.epsilon if row.planned is None else row.planned for row in self._table
        }

    @property
    def epsilon_so_far(self) -> dict[str, float | None]:
        """ε by accountant, of the rounds that are spent, where nobody chose when to stop."""
        return {row.name: row.epsilon for row in self._table}

    @functools.cached_property
    @usual_settings()
    def model(self) -> nn.Module:
        """The final model.

        Raises:
            RoundFailed: the run has not come to its end, or the file is damaged.
            ConfigError: the model, or the data that give its shape, are objects that `load_run`
                was not given, or others than `run` was; or frozen parameters have changed.
        """
        if not (path := self.folder / "model.pt").exists():
            raise RoundFailed(f"{path} is missing: the run has not come to its end")
        code_digest(self._config.own_code)  # or refuses what has changed
        model = Experiment(self._config, self.plan, 0, 0).make_model()
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
        """The score against ε, a curve for each accountant."""
        return plot_score_epsilon(self.metrics, self.plan)

    def __repr__(self) -> str:
        score = "none" if self.score is None else f"{self.score:.4f}"
        return f"<run of {self._rounds} rounds, {self.score_name} {score}, in {self.folder}>"


OnRound = Callable[[RunResult, nn.Module], Any]

_STANDS_FOR: dict[str, dict[str, Any]] = {
    "dataset": {"data.dataset": "object:dataset"},
    "model": {"model.name": "object:model", "model.options": {}},
}
"""Placeholders in a configuration, until the objects given as arguments replace them."""


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
        dataset: the data themselves, or what makes them, instead of `data.dataset`.
        model: the model itself, which is copied, or what makes it of the shape of a record and the
            number of outputs, instead of `model.name` and `model.options`.
        on_round: is called after every round with the result so far and a copy of the model, and
            may return `STOP`. What it raises ends the run, and comes out as it is. On Flower it is
            called in another thread.
        progress: whether to print progress and tables.
        runs: where the run folder is made.

    Raises:
        ConfigError: before any work.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early; its folder
            stays.
        KeyboardInterrupt: after the run has ended in order; its folder stays.
    """
    if not isinstance(config, Mapping):
        config = _path("config", config)
    if not (changes is None or isinstance(changes, Mapping)):
        raise ConfigError(f"changes must be a dict of values by section.key, got {changes!r}")
    changes, runs = dict(changes or {}), _path("runs", runs)
    _check_on_round(on_round)
    folder = config.parent if isinstance(config, Path) else Path()
    make_importable([folder, Path.cwd()])
    given = {"dataset": dataset, "model": model}
    for argument, stands_for in _STANDS_FOR.items():
        if given[argument] is None:
            continue
        section = next(iter(stands_for)).partition(".")[0]
        for key in changes:
            if str(key).strip().startswith(tuple(stands_for)) or key == section:
                raise ConfigError(
                    f"changes must not have {key}: the argument {argument}= stands for it"
                )
        changes |= stands_for
    source = config if isinstance(config, Mapping) else str(config)
    loaded = _with(load(source, changes), _carried(dataset, model))
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

    Objects that `run` was given must be given again. Data are compared with those of before.
    `on_round` is not called for rounds that have a row in metrics.jsonl already.

    Raises:
        ConfigError: no run folder, or an object is missing or too many.
        CheckpointError: the data, the model or the versions are others than before.
        LedgerError, MetricsError: a file of the folder is damaged.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError, KeyboardInterrupt: as for `run`.
    """
    folder = _path("folder", folder)
    make_importable([Path.cwd()])
    config = _with_objects(config_of(folder), dataset, model)
    _check_on_round(on_round)
    return _train(Run.of(folder, Console(quiet=not progress), config=config), on_round)


def load_run(
    folder: str | Path, *, dataset: GivenDataset = None, model: GivenModel = None
) -> RunResult:
    """Reads a run folder back.

    Only the `model` of the result needs the objects that `run` was given.

    Examples:
        >>> import shufl
        >>> changes = {"privacy.rounds": 1, "simulation.engine": "vectorised"}
        >>> run = shufl.run("quickstart", changes, progress=False)
        >>> shufl.load_run(run.folder).epsilon == run.epsilon
        True

    Raises:
        ConfigError: it is no run folder, or an object is too many.
        LedgerError, MetricsError: there is no ledger, a file is damaged, or the ledger lacks
            rounds.
    """
    folder = _path("folder", folder).absolute()
    make_importable([Path.cwd()])
    config = _with_objects(config_of(folder), dataset, model)
    ledger, rows = read_run(folder)
    ended: list[Any] = []
    if (summary := folder / "summary.json").exists():
        try:
            read = json.loads(summary.read_bytes())
            score = read[read["score"]]  # null is one that is not finite
            ended = [math.nan if score is None else float(score), read["stopped_by"]]
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{summary} is damaged: {one_line(error)}") from error
    return RunResult(folder, config, ledger.plan, len(ledger.entries), rows, *ended)


def grid(
    source: str | Path, *, results: str | Path = "results", cpus: int = 1, progress: bool = True
) -> list[dict[str, Any]]:
    """Plays a grid of configurations and seeds on Ray, as `shufl experiment`; one row a run.

    Args:
        source: a TOML file, or the name of a grid that ships with shufl.
        results: where the runs are kept; those that are there are not made anew.
        cpus: processors for each run.
        progress: whether to print a line for each run.

    Raises:
        ConfigError: before any work.
        EngineFailed: Ray does not start, or lacks processors.
        RuntimeError: some runs failed; the page says why, and the others are kept.
        KeyboardInterrupt: the same call goes on.
    """
    make_importable([_path("source", source).parent, Path.cwd()])
    results = _path("results", results)
    rows, page, failed = play_grid(str(source), results, None, cpus, Console(quiet=not progress))
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows) + len(failed)} runs failed, see {page}")
    return rows


def _train(run: Run, on_round: OnRound | None) -> RunResult:
    rows: list[dict[str, Any]] = []  # the reader's, who may change them

    def result(rounds: int, *ended: Any) -> RunResult:
        rows.extend(copy.deepcopy(run.rows[len(rows) :]))
        about = run.folder, run.experiment.config, run.experiment.plan
        return RunResult(*about, rounds, list(rows), *ended)

    def told(model: nn.Module) -> bool:
        assert on_round is not None
        return on_round(result(run.rows[-1]["round"]), copy.deepcopy(model)) is STOP

    ended = run.train() if on_round is None else run.train(told)
    if ended.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"shufl.resume goes on with the run in {run.folder}")
    return result(ended.rounds, ended.metrics[run.experiment.task.score], ended.stopped_by)


def _path(name: str, given: Any) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{name} must be a path, got {given!r}")
    return Path(given)


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
    """A run's configuration, with objects in the places of those that it had."""
    objects = _carried(dataset, model)
    for key, given in objects.items():
        section, name = key.split(".")
        named = getattr(getattr(config, section), name)
        if not is_carried(named):
            raise ConfigError(f"{key} of this run is {named}, not an object")
        objects[key] = Carried(named, given.value)
    return _with(config, objects)


def _carried(dataset: GivenDataset, model: GivenModel) -> dict[str, Carried]:
    """The objects that stand in place of names, by the names' keys."""
    carried = {}
    if dataset is not None:
        name = _name_of(dataset)
        if callable(dataset):
            with readers_code(f"dataset {name} could not be made", quote=()):
                dataset = dataset()
        carried["data.dataset"] = Carried(name, dataset)
    if model is not None:
        carried["model.name"] = Carried(_name_of(model), model)
    return carried


def _name_of(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__name__))


def _with(config: Config, objects: Mapping[str, Carried]) -> Config:
    """The configuration with the objects in it."""
    for key, carried in objects.items():
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: carried})
        config = config.model_copy(update={section: changed})
    return config
