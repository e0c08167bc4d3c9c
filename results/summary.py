"""The end of a run: its summary, as plain values and as a table."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from shufl.accounting import epsilon_table
from shufl.learning.data.person_ids import spaced
from shufl.protocol.console import Console
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.text import rounded_up
from shufl.results.engine_interface import Engine
from shufl.results.experiment import Experiment
from shufl.results.run_folder import RunRecorder
from shufl.results.tables import (
    STOPPED,
    epsilon_rows,
    last_doubt,
    print_epsilons,
    score_text,
    too_few_present,
)
from shufl.server import RunEnd

ENROLLED = "as the authority enrolled them (each node's log says by which column)"
"""Where the users of real nodes come from."""

_OF_PLAN = (
    "users", "delta", "adjacency", "shuffler_blankets", "mixing", "central_noise",
    "least_present", "accountant", "target_epsilon",
)  # fmt: skip


def summarise(
    result: RunEnd, experiment: Experiment, engine: Engine, recorder: RunRecorder
) -> dict[str, Any]:
    """The results of a run, as plain values."""
    plan, simulation = experiment.plan, experiment.config.simulation
    rows, task, labels = recorder.rows, experiment.task, experiment.dataset.test_labels
    simulated = engine.nodes == "simulated"  # nobody counts the records of real nodes
    too_few = too_few_present(plan, rows, result.rounds)
    present = [row["users_present"] for row in rows if row["outcome"] != RoundOutcome.LOST]
    return {
        **{key: getattr(simulation, key) for key in ("engine", "noise", "device", "precision")},
        "gradients": engine.gradients,
        "rounds": result.rounds,
        "stopped_by": result.stopped_by,
        "score": task.score,
        **result.metrics,
        "constant": None if task.constant is None else float(task.constant(labels)),
        "test_records": len(labels),
        "records": len(experiment.partition.index) if simulated else None,
        "users_by": experiment.users_by if simulated else ENROLLED,
        **{key: getattr(plan, key) for key in _OF_PLAN},
        "fewest_users_present": min(present, default=None),  # in a lost round nobody counts
        "epsilon": epsilon_rows(epsilon_table(plan, result.rounds, too_few)),
        "doubt": last_doubt(rows),
        "versions": {
            name: importlib.metadata.version(name) for name in ("shufl", "torch", "numpy", "flwr")
        },
    }


def print_summary(console: Console, summary: dict[str, Any], engine: Engine, folder: Path) -> None:
    """The closing table."""
    run = Table(title="Run", show_header=False, title_justify="left")
    run.add_row("engine", engine.description)
    run.add_row("rounds", str(summary["rounds"]))
    run.add_row("stopped by", STOPPED[summary["stopped_by"]])
    score = summary["score"]
    run.add_row(f"test {score}", score_text(score, summary[score]))
    run.add_row("budget", f"ε ≤ {summary['target_epsilon']:g} by {summary['accountant']}")
    run.add_row("users", f"{spaced(summary['users'])} {summary['users_by']}")
    if summary["mixing"] == "sum":
        run.add_row("mixing", "the shuffler hands over a sum, and no report")
    else:
        blankets = rounded_up(summary["shuffler_blankets"], 6)
        run.add_row("blankets", f"{blankets} expected of each shuffler a round")
    run.add_row("δ, adjacency", f"{rounded_up(summary['delta'])}, {summary['adjacency']}")
    if summary["doubt"]:
        run.add_row("doubtful", summary["doubt"])
    run.add_row("run folder", str(folder))
    console.print(run)
    print_epsilons(
        console, "ε of the run, by accountant", summary["epsilon"], summary["accountant"]
    )
