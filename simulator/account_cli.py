"""`shufl account`, `calibrate` and `compare`: the accountants on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from simulator.plain_json import to_json

Users = Annotated[int | None, typer.Option("--n", help="Eligible users n.")]
Rate = Annotated[float | None, typer.Option("--gamma", help="Check-in rate γ in (0, 1].")]
Noise = Annotated[float | None, typer.Option("--noise", help="Noise multiplier z.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds T.")]
Delta = Annotated[str, typer.Option("--delta", help='δ in (0, 1), or "1/n".')]
Adjacency = Annotated[str, typer.Option("--adjacency", help="replace or zero-out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Target = Annotated[float, typer.Option("--target-epsilon", help="The ε to stay within.")]
Accountant = Annotated[str, typer.Option("--accountant", help="Whose ε.")]


def account_command(
    run: Annotated[Path | None, typer.Argument(help="A run folder, instead of a plan.")] = None,
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    json: Json = False,
) -> None:
    """Print ε by every accountant, for a plan given by flags or for a run folder."""
    from accounting import Ledger, LedgerError, price

    try:
        if run is not None:
            ledger = Ledger.read(run / "ledger.jsonl")
            counts: dict[Any, int] = {}
            for event in ledger.events():
                counts[event] = counts.get(event, 0) + 1
            adjacency, at = ledger.plan.adjacency, ledger.plan.delta
        else:
            users = needed("--n", n)
            event = make_event(users, gamma, noise)
            counts, at = {event: _count("--rounds", rounds)}, _delta(delta, users)
        check_adjacency(adjacency)
        rows = price(counts.items(), adjacency, at)
    except (ValueError, LedgerError) as error:
        fail(error)
    if json:
        print_json(
            {r.name: {"epsilon": r.epsilon, "covers": r.covers, "warning": r.warning} for r in rows}
        )
        return
    table = Table(title=f"ε at δ = {at:.4g}, {adjacency}", title_justify="left")
    table.add_column("accountant")
    table.add_column("ε", justify="right")
    table.add_column("holds for")
    for row in rows:
        note = f" ({row.warning})" if row.warning else ""
        table.add_row(row.name, f"{row.epsilon:.4g}", row.covers + note)
    Console().print(table)


def calibrate_command(
    target_epsilon: Target,
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    accountant: Accountant = "theorem3",
    json: Json = False,
) -> None:
    """Find the noise, the rounds or γ (whichever is left out) that stays within a target ε."""
    from accounting import epsilon_of, largest_rate, least_noise, most_rounds

    try:
        users = needed("--n", n)
        at = _delta(delta, users)
        check_adjacency(adjacency)
        if not target_epsilon > 0:
            raise ValueError(f"--target-epsilon must be above 0, got {target_epsilon}")
        given = {"noise": noise, "rounds": rounds, "gamma": gamma}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) != 1:
            raise ValueError("leave out exactly one of --noise, --rounds and --gamma")

        def epsilon(share: float | None, z: float | None, times: int | None) -> float:
            event = make_event(users, share, z)
            return epsilon_of(accountant, adjacency, event, _count("--rounds", times), at)

        if missing == ["noise"]:
            noise = least_noise(lambda z: epsilon(gamma, z, rounds), target_epsilon)
        elif missing == ["rounds"]:
            rounds = most_rounds(lambda t: epsilon(gamma, noise, t), target_epsilon)
        else:
            gamma = largest_rate(lambda g: epsilon(g, noise, rounds), target_epsilon, users)
        reached = epsilon(gamma, noise, rounds) if rounds else 0.0
    except ValueError as error:
        fail(error)
    result = {
        "n": users,
        "gamma": gamma,
        "noise": noise,
        "rounds": rounds,
        "delta": at,
        "adjacency": adjacency,
        "accountant": accountant,
        "target_epsilon": target_epsilon,
        "epsilon": reached,
    }
    if json:
        print_json(result)
        return
    table = Table(title=f"{missing[0]} for ε ≤ {target_epsilon:g}", show_header=False)
    for key, value in result.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(f"[bold]{key}[/bold]" if key == missing[0] else key, shown)
    Console().print(table)


def compare_command(
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw ε against rounds to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Print, and plot, ε against rounds by every accountant side by side."""
    from accounting import price

    try:
        users = needed("--n", n)
        at = _delta(delta, users)
        check_adjacency(adjacency)
        event = make_event(users, gamma, noise)
        last = _count("--rounds", rounds)
        points = sorted({max(1, round(last ** (step / 8))) for step in range(9)})
        curves: dict[str, list[float]] = {}
        for point in points:
            for row in price([(event, point)], adjacency, at):
                curves.setdefault(row.name, []).append(row.epsilon)
        if plot is not None:
            _draw(points, curves, f"δ = {at:.3g}, {adjacency}", plot)
    except (ValueError, OSError) as error:
        fail(error)
    if json:
        print_json({"rounds": points, "epsilon": curves})
        return
    table = Table(title=f"ε against rounds at δ = {at:.4g}, {adjacency}", title_justify="left")
    for column in ("rounds", *curves):
        table.add_column(column, justify="right")
    for index, point in enumerate(points):
        table.add_row(str(point), *(f"{curve[index]:.4g}" for curve in curves.values()))
    Console().print(table)


def make_event(n: int, gamma: float | None, noise: float | None) -> Any:
    """One check-in round, from the options."""
    from accounting import ShuffledCheckInGaussianDpEvent

    return ShuffledCheckInGaussianDpEvent(n, needed("--gamma", gamma), needed("--noise", noise))


def needed(option: str, value: Any) -> Any:
    """The value of an option that must be given."""
    if value is None:
        raise ValueError(f"{option} is missing")
    return value


def _count(option: str, value: int | None) -> int:
    if not 1 <= needed(option, value) <= 10**9:
        raise ValueError(f"{option} must lie in [1, 10^9], got {value}")
    return int(value)  # type: ignore[arg-type]


def _delta(text: str, n: int) -> float:
    try:
        delta = 1 / n if text == "1/n" and n > 0 else float(text)
    except ValueError:
        delta = math.nan
    if not 0 < delta < 1:
        raise ValueError(f'--delta must be a number in (0, 1), or "1/n" with n > 1, got {text}')
    return delta


def check_adjacency(adjacency: str) -> None:
    """Refuses an unknown adjacency."""
    from accounting import ADJACENCIES

    if adjacency not in ADJACENCIES:
        allowed = " or ".join(ADJACENCIES)
        raise ValueError(f"--adjacency must be {allowed}, got {adjacency}")


def _draw(points: list[int], curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, curve in curves.items():
        if any(math.isfinite(value) for value in curve):
            axes.plot(points, curve, marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="ε", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def print_json(content: Any) -> None:
    """One JSON object on one line."""
    typer.echo(to_json(content))


def fail(error: Exception) -> NoReturn:
    """One line on standard error, exit code 2."""
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(2)
