"""`shufl account`, `calibrate` and `compare`: the accountants on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from simulator.epsilons import epsilon_text, holds_for_text
from simulator.plain_json import to_json

Users = Annotated[int | None, typer.Option("--n", help="Eligible users n.")]
Rate = Annotated[float | None, typer.Option("--gamma", help="Check-in rate γ in (0, 1].")]
Noise = Annotated[float | None, typer.Option("--noise", help="Noise multiplier z.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds T.")]
Delta = Annotated[str, typer.Option("--delta", help='δ in (0, 1), or "1/n".')]
Adjacency = Annotated[str, typer.Option("--adjacency", help="replace or zero-out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Target = Annotated[float, typer.Option("--target-epsilon", help="The ε to stay within.")]
Blankets = Annotated[
    float,
    typer.Option("--blankets", help="Expected blankets λ that the shuffler adds to each round."),
]
Accountant = Annotated[str, typer.Option("--accountant", help="Whose ε.")]


def account_command(
    run: Annotated[Path | None, typer.Argument(help="A run folder, instead of a plan.")] = None,
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    blankets: Blankets = 0.0,
    json: Json = False,
) -> None:
    """Print ε by every accountant, for a plan given by flags or for a run folder."""
    from accounting import Ledger, LedgerError, participation_note, price

    try:
        if run is not None:
            ledger = Ledger.read(run / "ledger.jsonl")
            counts: dict[Any, int] = {ledger.plan.event(): 0}
            for event in ledger.events():
                counts[event] = counts.get(event, 0) + 1
            adjacency, at = ledger.plan.adjacency, ledger.plan.delta
        else:
            users = checked_users(n, noise)
            event = make_event(users, gamma, noise, blankets)
            counts, at = {event: _count("--rounds", rounds)}, _delta(delta, users)
        check_adjacency(adjacency)
        rows = price(counts.items(), adjacency, at, lower=True)
        taken = sum(getattr(each, "check_in_rate", 1.0) * count for each, count in counts.items())
    except (ValueError, LedgerError) as error:
        fail(error)
    if note := participation_note(taken, 1, at):
        typer.echo(f"warning: {note}", err=True)
    if json:
        print_json(
            {
                row.name: {
                    "epsilon": row.epsilon,
                    "covers": row.covers,
                    "warning": row.warning,
                    "lower_bound": row.lower,
                }
                for row in rows
            }
        )
        return
    table = Table(title=f"ε at δ = {at:.4g}, {adjacency}", title_justify="left")
    table.add_column("accountant")
    table.add_column("ε", justify="right")
    table.add_column("holds for")
    for row in rows:
        holds_for = holds_for_text(row.epsilon, row.covers, row.warning)
        if row.lower is not None and row.lower > 0.0:
            holds_for += f"; at least {row.lower:.4g} for this pair"
        table.add_row(row.name, epsilon_text(row.epsilon), holds_for)
    Console().print(table)


def calibrate_command(
    target_epsilon: Target,
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    blankets: Annotated[
        float | None,
        typer.Option(
            "--blankets",
            help="Expected blankets λ that the shuffler adds to each round. Default: none, or with "
            "--accountant blanket those that are needed.",
        ),
    ] = None,
    accountant: Accountant = "theorem3",
    dimension: Annotated[
        int | None,
        typer.Option(
            "--dimension",
            help="Parameters d of the model, for its error. Default: many, only noise counts.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the noise, the rounds, γ or the blankets (whichever is left out) for a target ε.

    With --accountant blanket and neither --noise nor --blankets: the two of the least error of the
    mean update.
    """
    from accounting import (
        check_accountant,
        epsilon_of,
        largest_rate,
        least_blankets,
        least_error_blankets,
        least_noise,
        mean_update_error,
        most_rounds,
        participation_note,
    )

    try:
        users = checked_users(n, noise)
        at = _delta(delta, users)
        check_adjacency(adjacency)
        if not 0 < target_epsilon < math.inf:
            raise ValueError(f"--target-epsilon must lie in (0, inf), got {target_epsilon}")
        size = math.inf if dimension is None else _count("--dimension", dimension)
        given = {"noise": noise, "rounds": rounds, "gamma": gamma}
        if accountant == "blanket" and blankets == 0.0:
            raise ValueError("--blankets must be above 0 with --accountant blanket, got 0")
        if accountant == "blanket":
            given["blankets"] = blankets
        elif blankets is None:
            blankets = 0.0
        missing = [name for name, value in given.items() if value is None]
        if len(missing) != 1 and missing != ["noise", "blankets"]:
            raise ValueError(
                "leave out exactly one of --noise, --rounds and --gamma"
                + (", or --blankets, or --noise and --blankets" if accountant == "blanket" else "")
            )

        def epsilon(**values: Any) -> float:
            now = {"rounds": rounds, "gamma": gamma, "noise": noise, "blankets": blankets} | values
            event = make_event(users, now["gamma"], now["noise"], now["blankets"])
            judge = check_accountant(accountant, event)
            return epsilon_of(judge, adjacency, event, _count("--rounds", now["rounds"]), at)

        if missing == ["noise"]:
            noise = least_noise(lambda z: epsilon(noise=z), target_epsilon)
        elif missing == ["rounds"]:
            rounds = most_rounds(lambda t: epsilon(rounds=t), target_epsilon)
        elif missing == ["gamma"]:
            gamma = largest_rate(lambda g: epsilon(gamma=g), target_epsilon, users)
        elif missing == ["blankets"]:
            blankets = least_blankets(lambda b: epsilon(blankets=b), target_epsilon)
        else:
            noise, blankets = least_error_blankets(
                lambda z, b: epsilon(noise=z, blankets=b),
                target_epsilon,
                users,
                needed("--gamma", gamma),
            )
        reached = epsilon() if rounds else 0.0
        error_of_mean = mean_update_error(users, gamma, noise, blankets, size)
        reports = users * gamma + blankets
        if note := participation_note(gamma, rounds, at):
            typer.echo(f"warning: {note}", err=True)
    except ValueError as error:
        fail(error)
    result = {
        "n": users,
        "gamma": gamma,
        "noise": noise,
        "blankets": blankets,
        "rounds": rounds,
        "delta": at,
        "adjacency": adjacency,
        "accountant": accountant,
        "target_epsilon": target_epsilon,
        "epsilon": reached,
        "dimension": dimension,
        "mean_update_error": error_of_mean,
        "reports_a_round": reports,
        "bytes_a_round": None if dimension is None else reports * _sealed_bytes(dimension),
    }
    if json:
        print_json(result)
        return
    table = Table(title=f"{', '.join(missing)} for ε ≤ {target_epsilon:g}", show_header=False)
    for key, value in result.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(f"[bold]{key}[/bold]" if key in missing else key, shown)
    Console().print(table)


def compare_command(
    n: Users = None,
    gamma: Rate = None,
    noise: Noise = None,
    rounds: Rounds = None,
    delta: Delta = "1/n",
    adjacency: Adjacency = "replace",
    blankets: Blankets = 0.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw ε against rounds to this file.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also other systems at the Gaussian's own ε₀ (replace)."),
    ] = False,
    json: Json = False,
) -> None:
    """Print, and plot, ε against rounds by every accountant side by side."""
    from accounting import price
    from accounting.peers import comparisons

    try:
        users = checked_users(n, noise)
        at = _delta(delta, users)
        check_adjacency(adjacency)
        event = make_event(users, gamma, noise, blankets)
        last = _count("--rounds", rounds)
        points = sorted({max(1, round(last ** (step / 8))) for step in range(9)})
        curves: dict[str, list[float | None]] = {}
        for point in points:
            for row in price([(event, point)], adjacency, at):
                curves.setdefault(row.name, []).append(row.epsilon)
        others = (
            comparisons.peers(users, event.check_in_rate, event.noise_multiplier, points, at)
            if peers
            else []
        )
        drawn = curves | {peer.name: list(peer.epsilons) for peer in others}
        if plot is not None:
            _draw(points, drawn, f"δ = {at:.3g}, {adjacency}", plot)
    except (ValueError, OSError) as error:
        fail(error)
    if json:
        told = {p.name: {"epsilon": list(p.epsilons), "covers": p.covers} for p in others}
        print_json({"rounds": points, "epsilon": curves} | ({"peers": told} if peers else {}))
        return
    table = Table(title=f"ε against rounds at δ = {at:.4g}, {adjacency}", title_justify="left")
    for column in ("rounds", *curves):
        table.add_column(column, justify="right")
    for index, point in enumerate(points):
        table.add_row(str(point), *(epsilon_text(curve[index]) for curve in curves.values()))
    Console().print(table)
    if others:
        _print_peers(points, others)


def _print_peers(points: list[int], others: Any) -> None:
    """Other systems' ε, and below it what each is the ε of."""
    table = Table(title="other systems, replace; no guarantee for this one", title_justify="left")
    for column in ("rounds", *(peer.name for peer in others)):
        table.add_column(column, justify="right")
    for index, point in enumerate(points):
        table.add_row(str(point), *(f"{peer.epsilons[index]:.4g}" for peer in others))
    Console().print(table)
    for peer in others:
        typer.echo(f"{peer.name}: {peer.covers}")


def _sealed_bytes(dimension: int) -> int:
    """Of one report of a model with so many parameters."""
    from shuffler import report_length, sealed_length

    return sealed_length(report_length(dimension))


def make_event(n: int, gamma: float | None, noise: float | None, blankets: float) -> Any:
    """One check-in round, from the options."""
    from accounting import ShuffledCheckInGaussianDpEvent

    if blankets and not 1e-3 <= blankets <= 1e9:
        raise ValueError(f"--blankets must be 0 or lie in [0.001, 10^9], got {blankets:g}")
    return ShuffledCheckInGaussianDpEvent(
        n, needed("--gamma", gamma), needed("--noise", noise), blankets
    )


def needed(option: str, value: Any) -> Any:
    """The value of an option that must be given."""
    if value is None:
        raise ValueError(f"{option} is missing")
    return value


def checked_users(n: int | None, noise: float | None, digits: int = 12) -> int:
    """The number of users; refuses one, and a noise, that is beyond what is computed."""
    if not 1 <= needed("--n", n) <= 10**digits:
        raise ValueError(f"--n must lie in [1, 10^{digits}], got {n}")
    if noise and not 1e-3 <= noise <= 1e6:
        raise ValueError(f"--noise must be 0 or lie in [0.001, 10^6], got {noise:g}")
    return int(n)  # type: ignore[arg-type]


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


def _draw(points: list[int], curves: dict[str, list[float | None]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, curve in curves.items():
        if any(value is not None and math.isfinite(value) for value in curve):
            axes.plot(points, curve, marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="ε", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def print_json(content: Any) -> None:
    """One JSON object on one line."""
    typer.echo(to_json(content))


def fail(error: Exception) -> NoReturn:
    """One line on standard error, exit code 2."""
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(2)
