"""The end of a run: the table, the plot and the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accounting import PrivacyPlan, accountants_for, epsilon_table
from server import RunResult
from simulator.engines import Engine
from simulator.experiment import Experiment
from simulator.tables import draw, epsilon_rows, print_epsilons

_STOPPED = {
    "budget": "privacy budget: one more round would exceed it",
    "rounds": "all planned rounds done",
    "interrupt": "interrupted",
}


def summarise(
    result: RunResult, experiment: Experiment, engine: Engine, too_few_present: bool
) -> dict[str, Any]:
    """What a run came to, as plain values: rounds, why it stopped, accuracy, every epsilon.

    Args:
        result: how the run ended.
        experiment: what was run.
        engine: what ran it.
        too_few_present: as for `accounting.epsilon_table`.
    """
    plan, simulation = experiment.plan, experiment.config.simulation
    return {
        "engine": simulation.engine,
        "noise": simulation.noise,
        "device": simulation.device,
        "precision": simulation.precision,
        "gradients": engine.gradients,
        "rounds": result.rounds,
        "stopped_by": result.stopped_by,
        "accuracy": result.accuracy,
        "loss": result.loss,
        "delta": plan.delta,
        "adjacency": plan.adjacency,
        "shuffler_blankets": plan.shuffler_blankets,
        "least_present": plan.least_present,
        "accountant": plan.accountant,
        "target_epsilon": plan.target_epsilon,
        "epsilon": epsilon_rows(epsilon_table(plan, result.rounds, too_few_present)),
    }


def print_summary(console: Console, summary: dict[str, Any], engine: Engine, folder: Path) -> None:
    """The closing table."""
    run = Table(title="Run", show_header=False, title_justify="left")
    run.add_row("engine", engine.description)
    run.add_row("rounds", str(summary["rounds"]))
    run.add_row("stopped by", _STOPPED[summary["stopped_by"]])
    run.add_row("test accuracy", f"{summary['accuracy']:.2%}")
    run.add_row("budget", f"ε ≤ {summary['target_epsilon']:g} by {summary['accountant']}")
    run.add_row("blankets", f"{summary['shuffler_blankets']:g} expected of each shuffler a round")
    run.add_row("δ, adjacency", f"{summary['delta']:.3g}, {summary['adjacency']}")
    run.add_row("run folder", str(folder))
    console.print(run)
    print_epsilons(
        console, "ε of the run, by accountant", summary["epsilon"], summary["accountant"]
    )


def plot_accuracy_epsilon(rows: list[dict[str, Any]], plan: PrivacyPlan, path: Path) -> None:
    """Test accuracy against epsilon, one line an accountant, the budget as a vertical line."""
    evaluated = [row for row in rows if row["accuracy"] is not None]
    with draw(path) as axes:
        for name in accountants_for(plan.event()):
            priced = [row for row in evaluated if row["epsilons"][name] is not None]
            axes.plot(
                [row["epsilons"][name] for row in priced],
                [100 * row["accuracy"] for row in priced],
                marker=".",
                label=name,
            )
        axes.axvline(
            plan.target_epsilon, color="grey", linestyle="--", label=f"budget ({plan.accountant})"
        )
        axes.set(
            xscale="log",
            xlabel=f"ε at δ = {plan.delta:.3g} ({plan.adjacency})",
            ylabel="test accuracy (%)",
            title=f"n = {plan.users}, γ = {plan.check_in_rate:g}, "
            f"z = {plan.mechanism.noise_multiplier:g}, λ = {plan.shuffler_blankets:g}",
        )
        axes.legend()
