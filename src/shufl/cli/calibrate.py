"""`shufl calibrate`: what a plan needs to stay within a target ε."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.rounding import rounded_down, rounded_up

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan
    from shufl.simulator.grid.plans import Setting

_NOISE = {"noise_multiplier": "z", "local_epsilon": "ε₀", "central_noise": "σ"}
_FOUND = {**_NOISE, "shuffler_blankets": "λ", "rounds": "rounds", "check_in_rate": "γ"}


@options.plan_options("target_epsilon", *options.PLAN, "cover", found=_FOUND)
def calibrate_command(
    given: dict[str, Any],
    accountant: Annotated[
        str | None,
        typer.Option(help="Whose ε stays within it. Default: blanket, with sums sum-central."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Predict the accuracy on it, and take its model's size: mnist, …"),
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters d of the model, where no dataset is named."),
    ] = None,
    device_megabytes: Annotated[
        float | None,
        typer.Option(help="Leave out plans in which a device sends more than this over the run."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="With --dataset: write the first plan's configuration to this file."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Find what is left out of a plan, for a target ε.

    Noise and blankets are found together: those of least error of the mean update. If the noise is
    given, the rounds, the check-in rate or the blankets are found, whichever is left out. If the
    noise is left out, and the rounds or the check-in rate too, several of these are compared: the
    error, what a device sends, and what the shuffler holds.
    """
    from shufl.accounting.search import say_search
    from shufl.simulator.grid.plans import SETTINGS, find_plans

    with options.failing(ValueError, OSError):
        asked = _asked(given, accountant)
        if dataset is not None and dataset not in SETTINGS:
            raise ValueError(f"--dataset must be one of {', '.join(SETTINGS)}, got {dataset}")
        if write is not None:
            if dataset is None:
                raise ValueError("--write needs --dataset")
            options.check_file("--write", write)
        setting = None if dataset is None else SETTINGS[dataset]
        size = _dimension(asked, setting, dimension)
        tried = _tried(asked, size, device_megabytes)
        if write is not None and setting is not None:  # else the file could not be run
            from shufl.learning.data.partition import check_enough  # which needs torch

            check_enough(setting.records, asked.users, "iid")
        say_search(asked)
        rows = find_plans(tried, size, setting)
        if write is not None and dataset is not None:
            configuration = _configuration(dataset, rows[0])
    first = rows[0]["privacy"]
    options.warn_of_delta(first["check_in_rate"], first["rounds"], first["delta"])
    if row := next((row for row in rows if row["unused"]), None):
        of = row["privacy"]
        what = f"{of['rounds']} rounds at γ = {of['check_in_rate']:g}: " if _compares(asked) else ""
        typer.echo(f"warning: {what}{row['unused']}", err=True)
    if json:
        options.print_json({"plans": rows} if _compares(asked) else rows[0])
    elif _compares(asked):
        _print_plans(asked, rows)
    else:
        _print_plan(asked, rows[0])
    if write is not None:  # last, so that the plans are not lost where the disk is full
        write.write_text(configuration, encoding="utf-8")
        if not json:
            typer.echo(f"written: {write}; shufl run {write}")


def _asked(given: dict[str, Any], accountant: str | None) -> OpenPlan:
    """The plan that is asked for, of which something is open; refuses what no search finds."""
    from shufl.accounting import ACCOUNTANTS
    from shufl.accounting.search import example_of

    usual = "sum-central" if given.get("mixing") == "sum" else "blanket"
    asked = options.open_plan(given | {"accountant": accountant or usual})
    if asked.target_epsilon is None:
        raise ValueError("--target-epsilon is missing")
    if "shuffler_blankets" not in given and ACCOUNTANTS[asked.accountant].counts_on_blankets:
        asked = asked.replace(shuffler_blankets="least-error")
    if not asked.open:
        raise ValueError("nothing is left out; shufl account says what a whole plan costs")
    if len(asked.open) > 1 and _NOISE.keys().isdisjoint(asked.open):
        flags = ", ".join(map(options.flag_of, asked.open))
        raise ValueError(f"beside the noise give all but one of {flags}; or leave out the noise")
    example_of(asked)
    return asked


def _compares(asked: OpenPlan) -> bool:
    """Whether plans of several check-in rates or rounds are compared, each with its own noise."""
    return len(asked.open) > 1 and not {"rounds", "check_in_rate"}.isdisjoint(asked.open)


def _dimension(asked: OpenPlan, setting: Setting | None, dimension: int | None) -> int | None:
    """The model's parameters, if they are known."""
    from shufl.shuffler import most_parameters, usual_sealing

    if setting is not None and dimension is not None:
        raise ValueError("give either --dataset or --dimension, the model's parameters")
    size = setting.dimension if setting else dimension or asked.categories
    most = most_parameters(usual_sealing(asked.mixing), asked.mixing)
    if size is not None and size > most:
        raise ValueError(f"--dimension must be at most {most}, as a report holds, got {size}")
    return size


def _tried(asked: OpenPlan, size: int | None, most_megabytes: float | None) -> list[OpenPlan]:
    """The plan itself, or each that is compared and in which a device sends no more than it may."""
    from shufl.simulator.grid.plans import choices, device_bytes

    if not _compares(asked):
        if most_megabytes is not None:
            raise ValueError("--device-megabytes goes with plans that are compared")
        return [asked]
    if size is None:
        raise ValueError("give either --dataset or --dimension, the model's parameters")
    compared = choices(asked)
    sent = [device_bytes(each, size) / 1e6 for each in compared]
    most = math.inf if most_megabytes is None else most_megabytes
    if not min(sent) <= most:
        raise ValueError(
            f"--device-megabytes must be at least {min(sent)}, which the plan of least traffic "
            f"takes, got {most_megabytes}"
        )
    return [each for each, megabytes in zip(compared, sent, strict=True) if megabytes <= most]


def _configuration(dataset: str, row: dict[str, Any]) -> str:
    """The configuration of a plan, as TOML."""
    from shufl.learning.config import dumps, load
    from shufl.simulator.grid.plans import SETTINGS

    values = {
        "name": f"{dataset}-plan",
        "data.dataset": dataset,
        "data.users": row["users"],
        "training.learning_rate": row["learning_rate"],
        "privacy": row["privacy"],
    }
    return dumps(load(SETTINGS[dataset].config, values))


_UP = "noise_multiplier", "shuffler_blankets", "central_noise", "local_epsilon", "delta", "epsilon"
_ROUNDED = {"check_in_rate": rounded_down, **dict.fromkeys(_UP, rounded_up)}


def _print_plan(asked: OpenPlan, row: dict[str, Any]) -> None:
    """One plan, a line for each value."""
    names = " and ".join(asked.open)
    table = Table(title=f"{names} for ε ≤ {asked.target_epsilon:g}", show_header=False)
    for key, value in {"users": row["users"], **row["privacy"], **row}.items():
        if key not in ("privacy", "unused") and value is not None and value is not False:
            shown = str(value)
            if isinstance(value, float):
                shown = _ROUNDED[key](value, 6) if key in _ROUNDED else f"{value:.6g}"
            table.add_row(Text(key, style="bold" if key in asked.open else ""), shown)
    Console().print(table)


def _print_plans(asked: OpenPlan, rows: list[dict[str, Any]]) -> None:
    """The plans that were compared, a row for each, the best first."""
    from shufl.accounting import ACCOUNTANTS

    found = [name for name in asked.open if name not in ("rounds", "check_in_rate")]
    predicts = "accuracy" in rows[0]
    title = f"n = {asked.users}, ε ≤ {asked.target_epsilon:g} for "
    title += f"{ACCOUNTANTS[asked.accountant].holds_for}, δ = {rounded_up(asked.delta)}"
    table = Table(title=title, title_justify="left")
    heads = "γ", "rounds", *(_FOUND[name] for name in found), "error", "a device sends", "shuffler a round"
    for head in (*heads, *(["accuracy"] if predicts else [])):
        table.add_column(head, justify="right")
    for row in rows:
        values, accuracy = row["privacy"], row.get("accuracy")
        table.add_row(
            f"{values['check_in_rate']:g}",
            str(values["rounds"]),
            *(
                str(math.ceil(values[name]))
                if name == "shuffler_blankets"
                else rounded_up(values[name])
                for name in found
            ),
            f"{row['run_error']:.2e}",
            decimal(int(row["device_bytes"])),
            decimal(int(row["shuffler_bytes"])),
            *(["–" if accuracy is None else f"{accuracy:.1%}"] if predicts else []),
        )
    Console().print(table)
    typer.echo(_WITH_SUMS if asked.mixing == "sum" else _WITH_COVER if asked.cover else _WITHOUT)
    if predicts:
        typer.echo("accuracy is approximate; –: with more error than was ever tried")


_WITH_SUMS = (
    "all users send in every round, a node of several users one message for them; no report can be "
    "looked at, and one cheating node can spoil a round"
)
_WITH_COVER = "all users send in every round, those who did not check in an empty report"
_WITHOUT = (
    "ε holds where nobody sees who sends in a round; on real machines that takes --cover, with "
    "which all users send in every round"
)
