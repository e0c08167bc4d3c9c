"""What a run leaves behind: its starts, and one entry a round in metrics.jsonl and TensorBoard."""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from shufl.accounting import (
    Ledger,
    LedgerContent,
    LedgerError,
    PrivacyPlan,
    accountants_for,
    accountants_of_kind,
)
from shufl.protocol import RoundRecord, validation
from shufl.results.tables import too_few_present
from shufl.server import CheckpointError, read_checkpoint

_COLUMNS = {*(field.name for field in fields(RoundRecord)), "epsilons"} - {"metrics"}
_TELL_OF_ROUNDS = ("metrics.jsonl", "summary.json", "shuffler*.log")
_ROUND = re.compile(rb'"rounds?": ?(\d{1,18})')


def note_start(folder: Path) -> None:
    """Adds the `provenance` of a start to a run folder's starts.jsonl."""
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(provenance()) + "\n")


def read_starts(folder: Path) -> list[dict[str, str]]:
    """What `note_start` wrote; nothing in a folder of an older version."""
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def provenance() -> dict[str, str]:
    """Now; the command at work; the commit of its code.

    Of programs other than `shufl` only the name is kept: Flower's get a token as an argument.
    """
    program = Path(sys.argv[0])
    own = program.name == "shufl" or program.parts[-2:] == ("cli", "__main__.py")
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes")
    command = shlex.join(["shufl", *sys.argv[1:]]) if own else program.name
    return {"date": now, "command": command, "commit": _commit()}


@functools.cache
def _commit() -> str:
    """The commit of the code at work; `+` where files but docs differ; empty outside a checkout."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        # Without it a run that is killed here leaves a lock in the reader's checkout.
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
    """The rows of a metrics.jsonl file, one a round, but for a last one that was cut short.

    Raises:
        MetricsError: a line is no row.
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
    """A run folder's ledger, which no other file contradicts, and its rows.

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
    """Refuses a ledger that was cut: a round is in it, on disk, before any other file has it.

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

    An accountant that does not price the plan's rounds has null; so has one that counts on others
    once `too_few_present` says so. In the folder of an interrupted run the rows go on where they
    ended, and TensorBoard's events, which may lag behind, are made anew from the rows.
    """

    def __init__(self, folder: Path, plan: PrivacyPlan):
        self.rows: list[dict[str, Any]] = []
        self._plan = plan
        self._composed = 0
        self._accountants = {
            name: plan.make_accountant(name) for name in accountants_for(plan.event())
        }
        path = folder / "metrics.jsonl"
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
            if too_few and accountant.counts_on_others:
                continue
            accountant.compose(self._plan.event(), record.round - self._composed)
            epsilons[name] = accountant.get_epsilon(self._plan.delta)
        self._composed = record.round
        self._file.write(to_json(row, inf_nan_mode="null") + b"\n")
        self._file.flush()
        self._to_tensorboard(row)

    def close(self) -> None:
        """Closes both outputs."""
        self._file.close()
        self._tensorboard.close()

    def _to_tensorboard(self, row: dict[str, Any]) -> None:
        scalars: dict[str, float | None] = {
            "reports": row["reports"],
            "rejected": row["rejected"],
            "users_present": row["users_present"],
            "silent_nodes": row["silent_nodes"],
            **{f"test/{name}": row[name] for name in row.keys() - _COLUMNS},
            **{f"epsilon/{name}": value for name, value in row["epsilons"].items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, row["round"])
