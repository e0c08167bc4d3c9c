"""`shufl audit`: attack the claimed δ(ε) of one round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shufl.cli import end_in_order, options
from shufl.learning.your_code import make_importable
from shufl.protocol.console import Console

_MOST_USERS = 10**6
_VALUES = "users", "check_in_rate", "noise_multiplier", "shuffler_blankets", "adjacency"


@options.plan_options(*_VALUES, check_in_rate=1.0)
def audit_command(
    given: dict[str, Any],
    epsilon: Annotated[float, typer.Option(help="ε at which δ is attacked.")] = 0.3,
    accountant: Annotated[
        list[str] | None,
        typer.Option(help="Accountant to attack. Repeatable. Default: all that price the round."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Draws of each world. Default: 100000.")
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(help="Probability that an audit of a correct mechanism reports no violation."),
    ] = 0.99,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")
    ] = None,
    end_to_end: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Attack the plan of a run's configuration through the real client, shuffler and "
            "server instead: one user alone in every round (with sums all users). --epsilon, "
            "--samples (1000 by default: rounds of each world, or blocks with allocation), "
            "--confidence and --seed apply.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Attack the accountants' δ(ε) of one round, and say which claims do not hold for every pair.

    Exit code 3 if a claim to hold for every pair is violated.
    """
    import numpy as np

    from shufl.accounting import accountants_for, check_accountant, make_accountant
    from shufl.accounting.audit.attack import check_claims

    if end_to_end is not None:
        checks = _end_to_end(end_to_end, epsilon, samples, confidence, seed)
    else:
        with options.failing(ValueError):
            plan = options.whole_plan(given | {"rounds": 1, "delta": 0.5})
            if plan.users > _MOST_USERS:
                raise ValueError(
                    f"--users must be at most {_MOST_USERS} in an audit, got {plan.users}"
                )
            event = plan.event()
            names = accountant or accountants_for(event)
            attacked = check_claims(
                [make_accountant(check_accountant(name, event), plan.adjacency) for name in names],
                event,
                epsilon,
                samples=100_000 if samples is None else samples,
                confidence=confidence,
                rng=np.random.default_rng(seed),
            )
            checks = dict(zip(names, attacked, strict=True))
    if json:
        told = {
            name: {
                "claimed_delta": check.claimed_delta,
                "delta_lower": check.worst.delta_lower,
                "placement": check.worst.placement,
                "violated_for_every_pair": check.violated,
                "covers": check.covers,
            }
            for name, check in checks.items()
        }
        options.print_json(told)
    else:
        _print_table(checks, epsilon, confidence)
    if any(check.violated and check.holds_for == "every pair" for check in checks.values()):
        raise typer.Exit(3)


def _end_to_end(
    config: str, epsilon: float, samples: int | None, confidence: float, seed: int | None
) -> dict[str, Any]:
    """The attack on a configuration's plan through the running system."""
    import secrets
    import signal

    from shufl.learning.config import load
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
    return {check.accountant: check for check in found}


def _print_table(checks: dict[str, Any], epsilon: float, confidence: float) -> None:
    title = f"δ({epsilon:g}) of one round, attacked ({confidence:g} confidence)"
    columns = "accountant", "claims", "is at least", "with the others", "for every pair"
    table = Table(*columns, "claims to hold for", title=title, title_justify="left")
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
