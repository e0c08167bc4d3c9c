"""What a run leaves behind: metrics.jsonl and TensorBoard events, one entry a round."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from accounting import ACCOUNTANTS, PrivacyPlan, accountants_for
from server.settings import RoundRecord
from simulator.plain_json import to_json


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, one a round."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class RunRecorder:
    """Writes each round as it ends, with epsilon under every accountant; keeps the rows.

    An accountant that does not price the plan's mechanism has null.
    """

    def __init__(self, folder: Path, plan: PrivacyPlan):
        self.rows: list[dict[str, Any]] = []
        self._plan = plan
        self._accountants = {
            name: plan.make_accountant(name) for name in accountants_for(plan.mechanism)
        }
        self._file = (folder / "metrics.jsonl").open("x", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def __call__(self, record: RoundRecord) -> None:
        """Records one round."""
        epsilons: dict[str, float | None] = dict.fromkeys(ACCOUNTANTS)
        for name, accountant in self._accountants.items():
            accountant.compose(self._plan.event())
            epsilons[name] = accountant.get_epsilon(self._plan.delta)
        row = {**asdict(record), "epsilons": epsilons}
        self.rows.append(row)
        self._file.write(to_json(row) + "\n")
        self._file.flush()
        self._to_tensorboard(record, epsilons)

    def close(self) -> None:
        """Closes both outputs."""
        self._file.close()
        self._tensorboard.close()

    def _to_tensorboard(self, record: RoundRecord, epsilons: dict[str, float | None]) -> None:
        scalars: dict[str, float | None] = {
            "reports": record.reports,
            "rejected": record.rejected,
            "silent_nodes": record.silent_nodes,
            "test/accuracy": record.accuracy,
            "test/loss": record.loss,
            **{f"epsilon/{name}": value for name, value in epsilons.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, record.round)
