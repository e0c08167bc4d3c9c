"""`shufl calibrate`: what a plan needs to stay within a target ε."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.text import rounded_down, rounded_up
from shufl.protocol.validation import choice

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan

_NOISE = {"noise_multiplier": "z", "local_epsilon": "ε₀", "central_noise": "σ"}


@options.plan_options("target_epsilon", *options.PLAN, "cover", shuffler_blankets=None)
def calibrate_command(
    given: dict[str, Any],
    accountant: Annotated[
        str | None,
        typer.Option(
            help="The accountant whose ε must stay within the target. Default: blanket, or "
            "sum-central with --mixing sum."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Predict the accuracy on it, and take its model's size: mnist, …"),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="A configuration of your own: take its users, and its model's size."),
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters d of the model, where none of these is named."),
    ] = None,
    device_megabytes: Annotated[
        float | None,
        typer.Option(help="Leave out plans in which a device sends more than this over the run."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="With --dataset or --config: write it, with the first plan, to this file."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Find what is left out of a plan, for a target ε.

    Without --noise-multiplier, this finds the noise and the blankets of least error. With it, leave
    out one of rounds, check-in rate and blankets. If rounds or check-in rate are left out beside
    the noise, plans with several values are compared.
    """
    from shufl.accounting.search import say_search
    from shufl.shuffler import most_parameters, usual_sealing
    from shufl.simulator.grid.plans import SETTINGS, candidates, find_plans, measured, with_plan

    with options.failing(ValueError, OSError):
        if dataset is not None:
            choice("--dataset", dataset, tuple(SETTINGS))
        if [dataset, config, dimension].count(None) < 2:
            raise ValueError(
                "give either --dataset or --dimension, the model's parameters, or --config"
            )
        if write is not None:
            if dataset is config is None:
                raise ValueError("--write needs --dataset or --config")
            options.check_file("--write", write, new=True)
        if config is not None:
            given = given | measured(config, given.get("users"))
            dimension = given.pop("dimension")
        setting = None if dataset is None else SETTINGS[dataset]
        asked = _asked(given, accountant)
        if write is not None and setting is not None:
            from shufl.learning.data.partition import check_enough  # which needs torch

            check_enough(setting.records, asked.users, "iid")  # else the file could not be run
        size = setting.dimension if setting else dimension or asked.categories
        if size and size > (most := most_parameters(usual_sealing(asked.mixing), asked.mixing)):
            raise ValueError(f"--dimension must be at most {most}, as a report holds, got {size}")
        tried = candidates(asked, size, device_megabytes)
        say_search(asked)
        rows = find_plans(tried, size, setting)
        text = "" if config is None else with_plan(config, rows[0])
        text = text if setting is None else setting.configuration(rows[0])
    first = rows[0]["privacy"]
    options.warn_of_delta(first["check_in_rate"], first["rounds"], first["delta"])
    if note := next((row["unused"] for row in rows if row["unused"]), None):
        typer.echo(f"warning: {note}", err=True)
    if json:
        options.print_json({"plans": rows})
    else:
        _print_plans(asked, rows)
    if write is not None:  # last, so that the plans are not lost where the disk is full
        write.write_text(text, encoding="utf-8")
        if not json:
            typer.echo(f"written: {write}, the first plan; shufl run {write}")


def _asked(given: dict[str, Any], accountant: str | None) -> OpenPlan:
    """The plan that is asked for; refuses a plan whose open values no search finds."""
    from shufl.accounting import ACCOUNTANTS
    from shufl.accounting.search import example_of

    usual = "sum-central" if given.get("mixing") == "sum" else "blanket"
    asked = options.open_plan(given | {"accountant": accountant or usual})
    if asked.target_epsilon is None:
        raise ValueError("--target-epsilon is missing: a number above 0")
    if "shuffler_blankets" not in given and ACCOUNTANTS[asked.accountant].counts_on_blankets:
        asked = asked.replace(shuffler_blankets="least-error")
    if not asked.open:
        raise ValueError("nothing is left out; shufl account says what a whole plan costs")
    if len(asked.open) > 1 and _NOISE.keys().isdisjoint(asked.open):
        names = ", ".join(asked.open)
        raise ValueError(f"with the noise given, only one of {names} may be left out")
    example_of(asked)
    return asked


def _print_plans(asked: OpenPlan, rows: list[dict[str, Any]]) -> None:
    """The plans, a row for each, the best first."""
    from shufl.accounting import ACCOUNTANTS

    pairs = ACCOUNTANTS[asked.accountant].holds_for
    title = f"n = {asked.users}, ε ≤ {asked.target_epsilon:g} by {asked.accountant}, for {pairs}, "
    of_sums, predicts = asked.mixing == "sum", "accuracy" in rows[0]
    table = Table(title=title + f"δ = {rounded_up(asked.delta)}", title_justify="left")
    table.collapse_padding, table.pad_edge = predicts, not predicts  # to fit in 80 columns
    noises = [name for name in _NOISE if rows[0]["privacy"].get(name)]
    heads = ["γ", "rounds", *(_NOISE[name] for name in noises), *([] if of_sums else ["λ"])]
    heads += ["ε", "error", "device sends", "shuffler holds", *(["accuracy"] * predicts)]
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        values, accuracy = row["privacy"], row.get("accuracy")
        traffic = row["device_bytes"], row["shuffler_bytes"]
        table.add_row(
            rounded_down(values["check_in_rate"]),
            str(values["rounds"]),
            *(rounded_up(values[name]) for name in noises),
            *([] if of_sums else [str(math.ceil(values["shuffler_blankets"]))]),
            rounded_up(row["epsilon"]),
            f"{row['run_error']:.2e}",
            *("–" if size is None else decimal(int(size)) for size in traffic),
            *(["–" if accuracy is None else f"{accuracy:.1%}"] if predicts else []),
        )
    Console().print(table)
    if of_sums or asked.accountant != "local":  # which holds for a server that knows who sent
        typer.echo(_WITH_SUMS if of_sums else _WITH_COVER if asked.cover else _WITHOUT_COVER)
    if predicts:
        typer.echo("accuracy is approximate; –: with more error than was ever tried")


_WITH_SUMS = (
    "all users send in every round, a node of several users one message for them; no report can be "
    "looked at, and one cheating node can spoil a round"
)
_WITH_COVER = "all users send in every round, those who did not check in an empty report"
_WITHOUT_COVER = (
    "ε holds where nobody sees who sends in a round; on real machines that takes --cover, with "
    "which all users send in every round"
)
