"""What `import shufl` offers to a script or a notebook; the command line does the same by files."""

from __future__ import annotations

import copy
import enum
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from shufl.accounting import PrivacyPlan, epsilon_table
from shufl.server import RoundFailed, load_tensors
from shufl.simulator.config import Config, load
from shufl.simulator.console import Console
from shufl.simulator.data.datasets import Dataset
from shufl.simulator.experiment import Experiment
from shufl.simulator.grid.runner import play_grid
from shufl.simulator.plots import plot_accuracy_epsilon
from shufl.simulator.records import read_run
from shufl.simulator.run import Run, config_of
from shufl.simulator.section import Carried, ConfigError, is_carried, make_importable, readers_code
from shufl.simulator.tables import too_few_present

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
    """

    score_name = "accuracy"

    def __init__(
        self,
        folder: Path,
        config: Config,
        plan: PrivacyPlan,
        rounds: int,
        metrics: list[dict[str, Any]],
        score: float | None = None,
    ):
        self.folder, self.plan, self.metrics = folder, plan, metrics
        scores = [row["accuracy"] for row in metrics if row["accuracy"] is not None]
        self.score = scores[-1] if score is None and scores else score
        self._config, self._rounds = config, rounds

    @functools.cached_property
    def _table(self) -> list[Any]:
        too_few = too_few_present(self.plan, self.metrics, self._rounds)
        return epsilon_table(self.plan, self._rounds, too_few)

    @property
    def epsilon(self) -> dict[str, float | None]:
        """ε by accountant, of all the rounds that the budget allows; None where it is not known.

        It holds however the run ended: who stops a run by its results chooses by the data, and
        then ε of the rounds so far does not hold.
        """
        return {
            row.name: row.epsilon if row.planned is None else row.planned for row in self._table
        }

    @property
    def epsilon_so_far(self) -> dict[str, float | None]:
        """ε by accountant, of the rounds that are spent, where nobody chose when to stop."""
        return {row.name: row.epsilon for row in self._table}

    @functools.cached_property
    def model(self) -> nn.Module:
        """The final model.

        Raises:
            RoundFailed: the run has not come to its end.
            ConfigError: the model, or the data that give its shape, were objects that are gone.
        """
        if not (path := self.folder / "model.pt").exists():
            raise RoundFailed(f"{path} is not there: the run has not come to its end")
        model = Experiment(self._config, self.plan, 0, 0).make_model()
        model.load_state_dict(load_tensors(path))
        return model

    def plot(self) -> Figure:
        """The score against ε, a curve for each accountant."""
        return plot_accuracy_epsilon(self.metrics, self.plan)

    def __repr__(self) -> str:
        score = "none" if self.score is None else f"{self.score:.4f}"
        return f"<run of {self._rounds} rounds, {self.score_name} {score}, in {self.folder}>"


OnRound = Callable[[RunResult, nn.Module], Any]


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

    >>> import shufl
    >>> run = shufl.run(
    ...     "quickstart", {"privacy.rounds": 2, "simulation.engine": "vectorised"}, progress=False
    ... )
    >>> len(run.metrics), run.score_name
    (2, 'accuracy')
    >>> run.epsilon["blanket"] < run.epsilon["local"]
    True

    Args:
        config: the name of a configuration that ships with shufl, a TOML file, or its values.
        changes: values by `section.key`, as `shufl run --set` takes them.
        dataset: the data themselves, or what makes them, instead of `data.dataset`.
        model: the model itself, which is copied, or what makes it of the shape of a record and the
            number of classes, instead of `model.name` and `model.options`.
        on_round: is called after every round with the result so far and a copy of the model, and
            may return `STOP`. What it raises ends the run, and comes out as it is.
        progress: whether to print progress and tables.
        runs: where the run folder is made.

    Raises:
        ConfigError: before any work.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: the run ended early; its folder
            stays.
    """
    folder = Path(config).parent if isinstance(config, str | Path) else Path()
    make_importable([folder, Path.cwd()])
    objects = _carried(dataset, model)
    names = {**objects, **({"model.options": {}} if "model.name" in objects else {})}
    source = config if isinstance(config, Mapping) else str(config)
    loaded = _with(load(source, {**(changes or {}), **names}), objects)
    return _train(Run.new(loaded, Path(runs), Console(quiet=not progress)), on_round)


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

    Raises:
        ConfigError: no run folder, or an object is missing or too many.
        CheckpointError: the data, the model or the versions are others than before.
        LedgerError, MetricsError: a file of the folder is damaged.
        EngineFailed, RoundFailed, ShufflerError, TimeoutError: as for `run`.
    """
    folder = Path(folder)
    make_importable([Path.cwd()])
    config, objects = config_of(folder), _carried(dataset, model)
    for key, given in objects.items():
        section, name = key.split(".")
        named = getattr(getattr(config, section), name)
        if not is_carried(named):
            raise ConfigError(f"{key} of this run is {named}, not an object")
        objects[key] = Carried(named, given.value)
    config = _with(config, objects)
    return _train(Run.of(folder, Console(quiet=not progress), config=config), on_round)


def load_run(folder: str | Path) -> RunResult:
    """Reads a run folder back.

    >>> import shufl
    >>> run = shufl.run("quickstart", {"privacy.rounds": 1, "simulation.engine": "vectorised"},
    ...                 progress=False)
    >>> shufl.load_run(run.folder).epsilon == run.epsilon
    True

    Raises:
        ConfigError: it is no run folder.
        LedgerError: there is no ledger, a file is damaged, or the ledger lacks rounds.
    """
    folder = Path(folder).absolute()
    config = config_of(folder)
    ledger, rows = read_run(folder)
    summary = folder / "summary.json"
    score = json.loads(summary.read_bytes())["accuracy"] if summary.exists() else None
    return RunResult(folder, config, ledger.plan, len(ledger.entries), rows, score)


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
    """
    make_importable([Path(source).parent, Path.cwd()])
    console = Console(quiet=not progress)
    rows, page, failed = play_grid(str(source), Path(results), None, cpus, console)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows) + len(failed)} runs failed, see {page}")
    return rows


def _train(run: Run, on_round: OnRound | None) -> RunResult:
    def result(rounds: int, score: float | None = None) -> RunResult:
        about = run.folder, run.experiment.config, run.experiment.plan
        return RunResult(*about, rounds, list(run.rows), score)

    def told(model: nn.Module) -> bool:
        assert on_round is not None
        return on_round(result(run.rows[-1]["round"]), copy.deepcopy(model)) is STOP

    ended = run.train() if on_round is None else run.train(told)
    return result(ended.rounds, ended.accuracy)


def _carried(dataset: GivenDataset, model: GivenModel) -> dict[str, Carried]:
    """The objects that stand in place of names, by the names' keys."""
    carried = {}
    if dataset is not None:
        name = _name_of(dataset)
        if callable(dataset):
            with readers_code(f"dataset {name} could not be made"):
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
