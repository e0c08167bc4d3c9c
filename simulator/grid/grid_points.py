"""One point of a grid: playing it or going on with it, and its result."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, ValidationError
from torch import nn

from shufl.learning.code_digest import code_digest
from shufl.learning.config import Config
from shufl.learning.data.datasets import dataset_digest, load_dataset
from shufl.learning.given_objects import objects_in, with_objects
from shufl.learning.parameters import tensors_digest
from shufl.learning.your_code import Carried, find, usual_settings, your_code
from shufl.protocol.console import Console
from shufl.protocol.files import write_whole
from shufl.protocol.plan_fields import CheckInRate
from shufl.protocol.validation import NotNegative, Probability, Record, first_mistake
from shufl.results.experiment import begin_anew, prepare_simulation
from shufl.results.run import Run
from shufl.results.run_folder import MetricsError, config_of, provenance, read_rows
from shufl.server import CheckpointError
from shufl.simulator.grid.definition import Point
from shufl.simulator.grid.reference_runs import Reference, UserReference, as_central, trusted

_RESULT = "result.json"
_OF_PLAN = (
    "delta", "adjacency", "accountant", "check_in_rate", "shuffler_blankets", "central_noise",
)  # fmt: skip


@usual_settings()
def play(point: Point, folder: Path, threads: int, rests: str | None = None) -> None:
    """Plays a point, or goes on with it where it was interrupted, and writes its `result.json`.

    Args:
        point: what is played.
        folder: of the point: for `result.json` and run folders.
        threads: how many threads torch gets.
        rests: what the point `rests_on`, for a process that does not have your notebook.
    """
    torch.set_num_threads(threads)
    rests = rests_on(point) if rests is None else rests
    if point.trainer == "shufl":
        came_to = _outcome(_played(point.config, folder, rests))
    elif point.trainer == "central-users":
        played = _played(trusted(point.config), folder, rests)
        users = json.loads((played / "plan.json").read_bytes())["users"]
        came_to = as_central(_outcome(played), users)
    else:
        came_to = _by_another(point)
    packages = ("shufl", "torch", "numpy", "dp-accounting")
    versions = {name: importlib.metadata.version(name) for name in packages}
    origin = provenance() | {"versions": versions, "rests_on": rests}
    write_result(folder, point, came_to | origin)


@usual_settings()
def check(point: Point) -> None:
    """Checks that a point can be played."""
    if point.trainer in ("shufl", "central-users"):
        prepare_simulation(point.config if point.trainer == "shufl" else trusted(point.config))
    else:
        _trainer(point)


def rests_on(point: Point) -> str:
    """A digest of your own code and data that a point needs; empty if it needs none.

    Raises:
        ConfigError: the data cannot be loaded, or a module has changed since it was imported.
    """
    name, model = point.config.data.dataset, point.config.model.name
    own = ":" in name if isinstance(name, str) else True
    data = dataset_digest(load_dataset(name))[:12] if own else ""
    start = ""
    if isinstance(model, Carried) and isinstance(model.value, nn.Module):
        tensors = itertools.chain(model.value.named_parameters(), model.value.named_buffers())
        start = tensors_digest(dict(tensors))[:12]
    return code_digest(point.own_code)[:12] + data + start


class Trainer(Protocol):
    """Trains a point of a grid in a way of your own (`trainer = "module:callable"`).

    The callable gets the point's `Config` and returns the trainer. An error that it raises is told
    before any run begins.
    """

    def train(self) -> dict[str, Any]:
        """Trains to the end.

        Returns:
            `score_name`, and `score`, a finite number. Any of these too: `loss`; `rounds` (played)
            and `check_in_rate`, if they differ from the configuration's. A trainer that promises
            privacy adds `epsilon` (numbers by the name of an accountant), `delta`, `adjacency`,
            `accountant`, `noise_multiplier`, `shuffler_blankets` and `central_noise`; by default
            nothing is promised.
        """


_TRAINERS = {
    "central": functools.partial(Reference, private=True),
    "plain": functools.partial(Reference, private=False),
    "plain-users": UserReference,
}


def _trainer(point: Point) -> Trainer:
    """Makes the trainer of a point; one that cannot train it refuses the configuration here."""
    begin_anew(point.config)
    make = find("trainer", point.trainer, _TRAINERS)
    with your_code(f"trainer {point.trainer} does not take the configuration"):
        made: Trainer = make(point.config)
    return made


def _by_another(point: Point) -> dict[str, Any]:
    privacy, trainer, begun = point.config.privacy, _trainer(point), time.monotonic()
    usual = {"rounds": privacy.rounds, "check_in_rate": privacy.check_in_rate}
    with your_code(f"trainer {point.trainer} did not tell what came of it"):
        return usual | trainer.train() | {"seconds": time.monotonic() - begun}


def write_result(folder: Path, point: Point, came_to: dict[str, Any], strict: bool = True) -> None:
    """Writes a point's `result.json`, which `read_result` gives back.

    Args:
        folder: of the point.
        point: whose result it is.
        came_to: the result.
        strict: whether a number must not be given as text.

    Raises:
        ValueError: `came_to` is not what a `ResultFile` has, beside the point.
    """
    result = {"series": point.series, "value": point.value, "seed": point.seed} | came_to
    try:
        checked = ResultFile.model_validate(result, strict=strict)
    except ValidationError as error:
        raise ValueError(first_mistake(error, ResultFile)) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _RESULT, checked.model_dump_json(indent=2).encode() + b"\n")


class ResultFile(Record):
    """What `result.json` has; by default nothing is promised.

    Older results lack what came later. `rests_on` is empty without code and data of one's own.
    """

    series: str
    value: int | float | str
    seed: int
    score: Annotated[float, Field(allow_inf_nan=False, description="a number")]
    loss: Annotated[float, Field(allow_inf_nan=False, description="a number")] | None = None
    constant: Annotated[float, Field(allow_inf_nan=False, description="a number")] | None = None
    rounds: Annotated[int, Field(ge=0, description="a whole number, at least 0")]
    delta: Probability | None = None
    check_in_rate: CheckInRate
    noise_multiplier: NotNegative = 0.0
    shuffler_blankets: NotNegative = 0.0
    central_noise: NotNegative = 0.0
    seconds: NotNegative
    score_name: str
    adjacency: str = "–"
    accountant: str = "–"
    command: str
    commit: str = ""
    date: str = ""
    rests_on: str = ""
    epsilon: dict[str, NotNegative | None] = Field(default_factory=dict)
    versions: dict[str, str]


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a point; None if it has not been played to its end, or the file is damaged."""
    try:
        return ResultFile.model_validate_json((folder / _RESULT).read_bytes()).model_dump()
    except (FileNotFoundError, ValueError):
        return None


def _played(config: Config, folder: Path, rests: str) -> Path:
    """The run folder of a point's configuration, played to its end."""
    console, note = Console(quiet=True), folder / "rests_on"
    if note.exists() and note.read_text() == rests:
        for begun in sorted(folder.glob("*/checkpoint.pt")):
            try:
                own = with_objects(config_of(begun.parent), objects_in(config))
                return _to_its_end(Run.of(begun.parent, console, config=own))
            except (CheckpointError, MetricsError):  # as after an update; it is played anew
                pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    note.write_text(rests)
    return _to_its_end(Run.new(config, folder, console))


def _to_its_end(run: Run) -> Path:
    """The folder of a run that has been trained to its end."""
    if run.train().stopped_by == "interrupt":
        raise InterruptedError("a signal stopped the run; the same command goes on with it")
    return run.folder


def _outcome(played: Path) -> dict[str, Any]:
    """What tables show of a run, from its folder."""
    summary = json.loads((played / "summary.json").read_bytes())
    plan = json.loads((played / "plan.json").read_bytes())
    return {
        "score_name": summary["score"],
        "score": summary[summary["score"]],
        "loss": summary["loss"],
        "constant": summary["constant"],
        "rounds": summary["rounds"],
        "epsilon": {name: row["epsilon"] for name, row in summary["epsilon"].items()},
        "noise_multiplier": plan["mechanism"]["noise_multiplier"],
        "seconds": sum(row["seconds"] for row in read_rows(played / "metrics.jsonl")),
    } | {key: plan[key] for key in _OF_PLAN}
