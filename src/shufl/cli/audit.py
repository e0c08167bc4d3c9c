"""`shufl audit`: attack the claimed δ(ε) of one round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shufl.cli import end_in_order, options
from shufl.protocol.console import Console

Accountants = Annotated[
    list[str] | None,
    typer.Option(
        "--accountant", help="Accountant to attack. Repeatable. Default: all that price the round."
    ),
]
Placements = Annotated[
    list[str] | None,
    typer.Option(
        "--placement",
        help="Where the other users are: homogeneous, antipodal, opposite, equilateral, or "
        "absent; repeatable. Default: all.",
    ),
]
EndToEnd = Annotated[
    str | None,
    typer.Option(
        "--end-to-end",
        metavar="CONFIG",
        help="Attack the plan of a run's configuration through the real client, shuffler and "
        "server instead: one user alone in every round (with sums all users). --epsilon, "
        "--samples (1000 by default: rounds of each world, or blocks with allocation), "
        "--confidence and --seed apply.",
    ),
]


def audit_command(
    n: Annotated[int | None, typer.Option("--n", max=10**6, help="Eligible users n.")] = None,
    gamma: options.Rate = 1.0,
    noise: options.Noise = None,
    adjacency: options.Adjacency = "replace",
    blankets: options.Blankets = 0.0,
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε at which δ is attacked.")] = 0.3,
    accountant: Accountants = None,
    placement: Placements = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Draws of each world. Default: 100000.")
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            "--confidence",
            help="Probability that an audit of a correct mechanism reports no violation.",
        ),
    ] = 0.99,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the draws.")
    ] = None,
    end_to_end: EndToEnd = None,
    json: options.Json = False,
) -> None:
    """Attack the accountants' δ(ε) of one round, and say which claims do not hold for every pair.

    Exit code 3 if a claim to hold for every pair is violated.
    """
    import numpy as np

    from shufl.accounting import ACCOUNTANTS, accountants_for, check_accountant, make_accountant
    from shufl.accounting.audit.attack import check_claims, claims_something
    from shufl.accounting.audit.placements import PLACEMENTS

    if end_to_end is not None:
        _end_to_end(end_to_end, epsilon, samples, confidence, seed, json)
        return
    with options.failing(ValueError):
        plan = options.whole_plan(n, gamma, noise, 1, "0.5", adjacency, blankets)
        event = plan.event()
        at = placement or list(PLACEMENTS)
        names = accountant or [
            name
            for name in accountants_for(event)
            if any(claims_something(ACCOUNTANTS[name], where) for where in at)
        ]
        attacked = check_claims(
            [make_accountant(check_accountant(name, event), adjacency) for name in names],
            event,
            epsilon,
            at,
            100_000 if samples is None else samples,
            confidence,
            np.random.default_rng(seed),
        )
        checks = dict(zip(names, attacked, strict=True))
    _report(checks, epsilon, confidence, json)


def _end_to_end(
    config: str,
    epsilon: float,
    samples: int | None,
    confidence: float,
    seed: int | None,
    json: bool,
) -> None:
    """The attack on a configuration's plan through the running system."""
    import secrets
    import signal

    from shufl.learning.config import load
    from shufl.learning.section import make_importable
    from shufl.results.experiment import prepare
    from shufl.shuffler import ShufflerError
    from shufl.simulator.canary import check_end_to_end

    make_importable([Path(config).parent, Path.cwd()])
    with options.failing(ValueError, ShufflerError):
        heeded = "end_to_end", "epsilon", "samples", "confidence", "seed", "json"
        options.check_alone("--end-to-end, whose CONFIG has the plan", *heeded)
        plan = prepare(load(config)).plan
        if plan.mechanism.name != "gaussian":
            raise ValueError(
                f"--end-to-end attacks mechanism gaussian only, got {plan.mechanism.name}"
            )
        drawn = secrets.randbits(32) if seed is None else seed
        rounds = 1000 if samples is None else samples
        for number in (signal.SIGINT, signal.SIGTERM):  # a shuffler is started
            signal.signal(number, end_in_order)
        found = check_end_to_end(plan, epsilon, rounds, confidence, drawn)
    _report({check.accountant: check for check in found}, epsilon, confidence, json)


def _report(checks: dict[str, Any], epsilon: float, confidence: float, json: bool) -> None:
    """Prints the checks; ends with 3 if a claim for every pair is violated."""
    if json:
        options.print_json(
            {
                name: {
                    "claimed_delta": check.claimed_delta,
                    "delta_lower": check.worst.delta_lower,
                    "placement": check.worst.placement,
                    "violated_for_every_pair": check.violated,
                    "covers": check.covers,
                }
                for name, check in checks.items()
            }
        )
    else:
        _print_table(checks, epsilon, confidence)
    if any(check.violated and check.holds_for == "every pair" for check in checks.values()):
        raise typer.Exit(3)


def _print_table(checks: dict[str, Any], epsilon: float, confidence: float) -> None:
    title = f"δ({epsilon:g}) of one round, attacked ({confidence:g} confidence)"
    table = Table(title=title, title_justify="left")
    columns = "accountant", "claims", "is at least", "with the others", "for every pair"
    for column in (*columns, "claims to hold for"):
        table.add_column(column)
    for name, check in checks.items():
        table.add_row(
            name,
            f"{check.claimed_delta:.4g}",
            f"{check.worst.delta_lower:.4g}",
            check.worst.placement,
            Text("violated", style="red") if check.violated else "not refuted",
            "every pair" if check.holds_for == "every pair" else "the homogeneous pair",
        )
    Console().print(table)
