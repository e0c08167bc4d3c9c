"""The files of a run folder: configuration, plan, starts, and a row for each round."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from shufl.accounting import (
    Ledger,
    LedgerContent,
    LedgerError,
    PrivacyPlan,
    accountants_for,
    accountants_of_kind,
)
from shufl.learning.config import Config, dumps, load
from shufl.protocol import RoundRecord, validation
from shufl.protocol.files import naming, write_whole
from shufl.protocol.validation import ConfigError
from shufl.results.tables import too_few_present
from shufl.server import CheckpointError, read_checkpoint

if TYPE_CHECKING:
    from shufl.results.experiment import Experiment

_COLUMNS = {*(field.name for field in fields(RoundRecord)), "epsilons"} - {"metrics"}
_TELL_OF_ROUNDS = ("metrics.jsonl", "summary.json", "shuffler*.log")
_ROUND = re.compile(rb'"rounds?": ?(\d{1,18})')


def note_start(folder: Path) -> None:
    """Adds the `provenance` of a start to a run folder's starts.jsonl."""
    path = folder / "starts.jsonl"
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(provenance()) + "\n")


def read_starts(folder: Path) -> list[dict[str, str]]:
    """What `note_start` wrote; nothing in a folder of an older version."""
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def provenance() -> dict[str, str]:
    """Date, command and commit of the program that runs now.

    Of programs other than `shufl` only the name is kept: Flower's programs get a token as argument.
    """
    program = Path(sys.argv[0])
    own = program.name == "shufl" or program.parts[-2:] == ("cli", "__main__.py")
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes")
    command = shlex.join(["shufl", *sys.argv[1:]]) if own else program.name
    return {"date": now, "command": command, "commit": _commit()}


@functools.cache
def _commit() -> str:
    """The commit of this code, with `+` if files other than docs differ; empty if there is none."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        # Without this option a run that is killed here would leave a lock in your checkout.
        command = ["git", "--no-optional-locks", "-C", str(here.parents[1]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(here))  # a copy may lie in another checkout
        changed = git("status", "--porcelain", ".", ":!docs")
        return git("rev-parse", "HEAD")[:10] + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


class MetricsError(RuntimeError):
    """A metrics.jsonl file cannot be read."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, one a round, without a last one that was cut short.

    Raises:
        MetricsError: a line is not a row.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not set(row) >= _COLUMNS or row["score"] not in row:
                raise ValueError(f"a row has {', '.join(sorted(_COLUMNS))}, and its score")
            validation.integer("round", row["round"], 1)
        except (TypeError, ValueError) as error:
            raise MetricsError(
                f"{path} is damaged at line {number}; without it and all after it the run can go on"
            ) from error
        rows.append(row)
    return rows


def read_run(folder: Path) -> tuple[LedgerContent, list[dict[str, Any]]]:
    """A run folder's ledger, after a check against the other files, and its rows.

    Raises:
        LedgerError: there is no ledger, one of the files is damaged, or the ledger lacks rounds.
    """
    try:
        rows, told = read_rows(folder / "metrics.jsonl"), rounds_told(folder)
    except (MetricsError, CheckpointError) as error:
        raise LedgerError(str(error)) from error
    ledger = Ledger.read(folder / "ledger.jsonl")  # last: a run at work writes it first
    check_ledger(folder, ledger.entries[-1].round if ledger.entries else 0, told)
    return ledger, rows


def rounds_told(folder: Path) -> dict[str, int]:
    """The last round that each file beside the ledger tells of.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    told: dict[str, int] = {}
    for path in (path for pattern in _TELL_OF_ROUNDS for path in folder.glob(pattern)):
        told[path.name] = max(map(int, _ROUND.findall(path.read_bytes())), default=0)
    if (path := folder / "checkpoint.pt").exists():
        told[path.name], _ = read_checkpoint(path)
    for path in (folder / "tensorboard").glob("events.*"):
        steps = (Event.FromString(event).step for event in RawEventFileLoader(str(path)).Load())
        told["tensorboard"] = max(told.get("tensorboard", 0), max(steps, default=0))
    return told


def check_ledger(folder: Path, last_round: int, told: dict[str, int]) -> None:
    """Refuses a ledger that was cut short: it has each round on disk before any other file has.

    Raises:
        LedgerError: it lacks rounds that were spent.
    """
    for name, round in told.items():
        if round > last_round:
            raise LedgerError(
                f"ledger {folder / 'ledger.jsonl'} ends at round {last_round}, but {name} tells of "
                f"round {round}: it lacks rounds that were spent"
            )


class RunRecorder:
    """Writes each round as it ends, with epsilon under every accountant; keeps the rows.

    An accountant that does not price the plan's rounds has null; so has one that counts on others,
    once `too_few_present` says so. In the folder of an interrupted run the rows go on where
    they ended, and TensorBoard's events, which may lag behind, are written anew.
    """

    def __init__(self, folder: Path, plan: PrivacyPlan):
        self.rows: list[dict[str, Any]] = []
        self._plan = plan
        names = accountants_for(plan.event())
        self._accountants = {name: plan.make_accountant(name) for name in names}
        self._path = path = folder / "metrics.jsonl"
        if path.exists():
            self.rows = read_rows(path)
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("ab")
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        from torch.utils.tensorboard import SummaryWriter  # slow; who only reads has no need of it

        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        for row in self.rows:
            self._to_tensorboard(row)

    def __call__(self, record: RoundRecord) -> None:
        """Records one round, unless it has its row already."""
        if self.rows and record.round <= self.rows[-1]["round"]:
            return
        epsilons: dict[str, float | None] = dict.fromkeys(accountants_of_kind(self._plan.event()))
        row = asdict(record)
        metrics = row.pop("metrics")
        row |= metrics | {"epsilons": epsilons}
        self.rows.append(row)
        too_few = too_few_present(self._plan, self.rows, record.round)
        for name, accountant in self._accountants.items():
            if not (too_few and accountant.counts_on_others):
                epsilons[name] = self.epsilon(name, record.round)
        with naming(self._path):
            self._file.write(to_json(row, inf_nan_mode="null") + b"\n")
            self._file.flush()
        self._to_tensorboard(row)

    def epsilon(self, name: str, round: int) -> float | None:
        """ε of all rounds to this one, by an accountant; None if it does not price them."""
        if (accountant := self._accountants.get(name)) is None:
            return None
        return float(accountant.epsilon_after(self._plan.event(), self._plan.delta, round))

    def close(self) -> None:
        """Closes both outputs."""
        self._file.close()
        self._tensorboard.close()

    def _to_tensorboard(self, row: dict[str, Any]) -> None:
        scalars: dict[str, float | None] = {
            **{key: row[key] for key in ("reports", "rejected", "users_present", "silent_nodes")},
            **{f"test/{name}": row[name] for name in row.keys() - _COLUMNS},
            **{f"epsilon/{name}": value for name, value in row["epsilons"].items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, row["round"])


def config_of(folder: Path) -> Config:
    """The configuration of a run folder.

    Raises:
        ConfigError: it has none, or one that cannot be run.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"a run folder has a config.toml, {folder} has none")
    return load(str(folder / "config.toml"))


def make_folder(runs: Path, experiment: Experiment) -> Path:
    """A new folder `<name>-<time>` with the resolved configuration and the plan."""
    stem = f"{experiment.config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (runs / stem).absolute()
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                folder.mkdir()
                break
            except FileExistsError:
                folder = folder.with_name(f"{stem}-{number}")
    except OSError as error:
        raise ConfigError(f"no run folder can be made in {runs}: {error.strerror}") from error
    write_whole(folder / "config.toml", dumps(experiment.config).encode())
    write_whole(folder / "plan.json", experiment.plan.to_json().encode())
    return folder
