"""`shufl calibrate`: what a plan needs to stay within a target ε."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shufl.cli import options
from shufl.cli.account import make_event
from shufl.simulator.console import Console


@dataclass(frozen=True)
class _Plan:
    """A plan of which one or two values may be left out (None), and the ε to stay within."""

    n: int
    gamma: float | None
    noise: float | None
    blankets: float | None
    rounds: int | None
    delta: float
    adjacency: str
    accountant: str
    target_epsilon: float
    mechanism: str

    def missing(self) -> list[str]:
        """The names of the values that were left out, which are to be found.

        Raises:
            ValueError: not what can be found.
        """
        names = ["noise", "rounds", "gamma", "blankets"]
        missing = [name for name in names if getattr(self, name) is None]
        if len(missing) != 1 and missing != ["noise", "blankets"]:
            raise ValueError(
                "leave out exactly one of --noise, --rounds and --gamma"
                + (
                    ", or --blankets, or --noise and --blankets"
                    if self.accountant == "blanket"
                    else ""
                )
            )
        return missing

    def epsilon(self, **values: Any) -> float:
        """ε of the plan with these values in it."""
        from shufl.accounting import check_accountant, epsilon_of

        plan = replace(self, **values)
        event = make_event(plan.n, plan.gamma, plan.noise, plan.blankets, plan.mechanism)
        judge = check_accountant(plan.accountant, event)
        rounds = options.checked_count("--rounds", plan.rounds)
        return epsilon_of(judge, plan.adjacency, event, rounds, plan.delta)

    def completed(self) -> _Plan:
        """The plan with the values that were left out."""
        from shufl.accounting import (
            largest_rate,
            least_blankets,
            least_error_blankets,
            least_noise,
            most_rounds,
        )
        from shufl.accounting.mechanisms import MECHANISMS

        target, mechanism = self.target_epsilon, MECHANISMS[self.mechanism]
        match self.missing():
            case ["noise"]:
                least = mechanism.least_noise
                noise = least_noise(lambda z: self.epsilon(noise=z), target, least)
                return replace(self, noise=noise)
            case ["rounds"]:
                return replace(self, rounds=most_rounds(lambda t: self.epsilon(rounds=t), target))
            case ["gamma"]:
                rate = largest_rate(lambda g: self.epsilon(gamma=g), target, self.n)
                return replace(self, gamma=rate)
            case ["blankets"]:
                fewest = least_blankets(lambda b: self.epsilon(blankets=b), target)
                return replace(self, blankets=fewest)
        noise, blankets = least_error_blankets(
            lambda z, b: self.epsilon(noise=z, blankets=b),
            target,
            self.n,
            options.needed("--gamma", self.gamma),
            mechanism,
        )
        return replace(self, noise=noise, blankets=blankets)


def calibrate_command(
    target_epsilon: Annotated[
        float, typer.Option("--target-epsilon", help="The ε to stay within.")
    ],
    n: options.Users = None,
    gamma: options.Rate = None,
    noise: options.Noise = None,
    rounds: options.Rounds = None,
    delta: options.Delta = "1/n",
    adjacency: options.Adjacency = "replace",
    blankets: Annotated[
        float | None,
        typer.Option(
            "--blankets",
            help="Expected blankets λ that the shuffler adds to each round. Default: none, or with "
            "--accountant blanket those that are needed.",
        ),
    ] = None,
    accountant: Annotated[str, typer.Option("--accountant", help="Whose ε.")] = "theorem3",
    mechanism: options.Mechanism = "gaussian",
    dimension: Annotated[
        int | None,
        typer.Option(
            "--dimension",
            help="Parameters d of the model, for its error. Default: many, only noise counts.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Find the noise, the rounds, γ or the blankets (whichever is left out) for a target ε.

    With --accountant blanket and neither --noise nor --blankets: the two of the least error of the
    mean update.
    """
    from shufl.accounting.mechanisms import MECHANISMS
    from shufl.accounting.validation import choice

    try:
        users = options.checked_users(n, noise)
        at = options.checked_delta(delta, users)
        options.check_adjacency(adjacency)
        if not 0 < target_epsilon < math.inf:
            raise ValueError(f"--target-epsilon must lie in (0, inf), got {target_epsilon}")
        if dimension is not None:
            options.checked_count("--dimension", dimension)
        if accountant == "blanket" and blankets == 0.0:
            raise ValueError("--blankets must be above 0 with --accountant blanket, got 0")
        added = 0.0 if blankets is None and accountant != "blanket" else blankets
        choice("--mechanism", mechanism, tuple(MECHANISMS))
        of_plan = users, gamma, noise, added, rounds, at, adjacency, accountant, target_epsilon
        missing, result = _calibrated(_Plan(*of_plan, mechanism), dimension)
    except ValueError as error:
        options.fail(error)
    if json:
        options.print_json(result)
        return
    table = Table(title=f"{', '.join(missing)} for ε ≤ {target_epsilon:g}", show_header=False)
    for key, value in result.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(Text(key, style="bold" if key in missing else ""), shown)
    Console().print(table)


def _calibrated(plan: _Plan, dimension: int | None) -> tuple[list[str], dict[str, Any]]:
    """What was left out, and the plan with it: its ε, its error, and what a round weighs."""
    from shufl.accounting import MOST_ROUNDS, mean_update_error, unused_note
    from shufl.accounting.mechanisms import MECHANISMS
    from shufl.shuffler import report_length, sealed_length

    missing = plan.missing()
    plan = plan.completed()
    if missing == ["rounds"] and plan.rounds == MOST_ROUNDS:
        typer.echo(f"warning: stopped at {MOST_ROUNDS} rounds, more may be allowed", err=True)
    size = math.inf if dimension is None else dimension
    reports = plan.n * plan.gamma + plan.blankets
    report_bytes = None if dimension is None else sealed_length(report_length(dimension))
    result = asdict(plan) | {
        "epsilon": plan.epsilon() if plan.rounds else 0.0,
        "dimension": dimension,
        "mean_update_error": mean_update_error(plan.n, plan.gamma, plan.noise, plan.blankets, size),
        "reports_a_round": reports,
        "bytes_a_round": None if report_bytes is None else reports * report_bytes,
    }
    found = {name: getattr(plan, name) for name in missing if name != "rounds"}
    least = MECHANISMS[plan.mechanism].least_noise
    if note := unused_note(plan.target_epsilon, result["epsilon"], least, **found):
        typer.echo(f"warning: {note}", err=True)
    if plan.rounds:
        options.warn_of_delta(plan.gamma, plan.rounds, plan.delta)
    return missing, result
