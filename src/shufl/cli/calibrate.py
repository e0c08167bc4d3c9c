"""`shufl calibrate`: what a plan needs to stay within a target ε."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.rounding import rounded_down, rounded_up

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan


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
    accountant: Annotated[
        str, typer.Option("--accountant", help="Accountant whose ε stays within the target.")
    ] = "theorem3",
    mechanism: options.Mechanism = "gaussian",
    participation: options.Participation = "check-in",
    mixing: options.Mixing = "shuffle",
    central_noise: options.CentralNoise = None,
    dimension: Annotated[
        int | None,
        typer.Option(
            "--dimension",
            min=1,
            max=10**9,
            help="Model parameters d, for the error. Default: so many that only noise counts.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Find the noise, the rounds, γ or the blankets (whichever is left out) for a target ε.

    With --accountant blanket and neither --noise nor --blankets: the two of the least error of the
    mean update. With --accountant sum-central the noise is that of shuffler and server.
    """
    with options.failing(ValueError):
        if accountant == "blanket" and blankets == 0.0:
            raise ValueError("--blankets must be above 0 with --accountant blanket, got 0")
        added = blankets or ("least-error" if accountant == "blanket" else 0.0)
        given = n, gamma, noise, rounds, delta, adjacency, added, mechanism
        more = participation, mixing, central_noise
        about = {"accountant": accountant, "target_epsilon": target_epsilon}
        asked = options.open_plan(*given, *more, **about)
        if len(asked.open) != 1 and asked.open != ("noise_multiplier", "shuffler_blankets"):
            also = ", or --blankets, or --noise and --blankets" if accountant == "blanket" else ""
            raise ValueError(f"leave out exactly one of --noise, --rounds and --gamma{also}")
        result = _calibrated(asked, dimension)
    if json:
        options.print_json(result)
        return
    missing = [_NAMES.get(name, name) for name in asked.open]
    table = Table(title=f"{', '.join(missing)} for ε ≤ {target_epsilon:g}", show_header=False)
    for key, value in result.items():
        if value is not None:
            shown = str(value)
            if isinstance(value, float):
                shown = _ROUNDED[key](value, 6) if key in _ROUNDED else f"{value:.6g}"
            table.add_row(Text(key, style="bold" if key in missing else ""), shown)
    Console().print(table)


_UP = "noise", "blankets", "central-noise", "delta", "epsilon"
_ROUNDED = {"gamma": rounded_down} | dict.fromkeys(_UP, rounded_up)

_NAMES = {
    "check_in_rate": "gamma",
    "noise_multiplier": "noise",
    "shuffler_blankets": "blankets",
    "central_noise": "central-noise",
}


def _calibrated(asked: OpenPlan, dimension: int | None) -> dict[str, Any]:
    """The plan with what was left out: its ε, its error, and what a round weighs."""
    from shufl.accounting import fitted, mean_update_error, unused_note
    from shufl.accounting.search import say_search
    from shufl.shuffler import message_length, usual_sealing

    say_search(asked)
    plan = fitted(asked)
    blankets, of_sums = plan.shuffler_blankets, plan.mixing == "sum"
    reports = plan.users if of_sums else plan.users * plan.check_in_rate + blankets
    about = plan.mixing, usual_sealing(plan.mixing)
    report_bytes = None if dimension is None else message_length(dimension, *about)
    if note := unused_note(asked, plan):
        typer.echo(f"warning: {note}", err=True)
    if plan.rounds:
        options.warn_of_delta(plan, plan.rounds)
    return {
        "n": plan.users,
        "gamma": plan.check_in_rate,
        "noise": plan.mechanism.noise_multiplier,
        "blankets": blankets,
        "central-noise": plan.central_noise if of_sums else None,
        "rounds": plan.rounds,
        "delta": plan.delta,
        "adjacency": plan.adjacency,
        "accountant": plan.accountant,
        "target_epsilon": plan.target_epsilon,
        "mechanism": plan.mechanism.name,
        "participation": plan.participation,
        "epsilon": plan.epsilon(),
        "dimension": dimension,
        "mean_update_error": mean_update_error(plan, math.inf if dimension is None else dimension),
        "reports_a_round": reports,
        "bytes_a_round": None if report_bytes is None else reports * report_bytes,
    }
