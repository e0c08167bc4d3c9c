"""`shufl plan`: which check-in rate, rounds, noise and blankets to choose for a target ε."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.rounding import rounded_up

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan


def plan_command(
    users: Annotated[int, typer.Option(max=10**9, help="Eligible users n.")],
    epsilon: Annotated[float, typer.Option(help="The ε to stay within, for every pair.")],
    delta: options.Delta = "1/n",
    adjacency: options.Adjacency = "replace",
    dataset: Annotated[
        str | None,
        typer.Option(help="Predict the accuracy on it, and take its model's size: mnist, …"),
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters d of the model, where no dataset is named."),
    ] = None,
    cover: Annotated[
        bool,
        typer.Option(
            "--cover",
            help="All users send in every round, as real machines must, so that nobody sees who "
            "checked in.",
        ),
    ] = False,
    mixing: options.Mixing = "shuffle",
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
    """Compare plans for a target ε: error, accuracy, traffic of a device, load on the shuffler.

    For each check-in rate and number of rounds the noise and the blankets of least error are found.
    ε holds for every pair of datasets, by the accountant blanket, whoever else takes part. With
    --mixing sum the noise is that of shuffler and server, by sum-central, and all users send.
    """
    from shufl.shuffler import most_parameters, usual_sealing
    from shufl.simulator.grid.plans import RATES, ROUNDS, SETTINGS, Question, as_dict, find_plans

    with options.failing(ValueError, OSError):
        of_sums = mixing == "sum"
        cover = cover or of_sums
        given = users, None, None, None, delta, adjacency, 0.0 if of_sums else "least-error"
        asked = options.open_plan(
            *given,
            mixing=mixing,
            target_epsilon=epsilon,
            accountant="sum-central" if of_sums else "blanket",
            cover=cover,
        )
        if epsilon >= 1e3:
            raise ValueError(f"--epsilon must lie in (0, 1000), got {epsilon}")
        if dataset is not None and dataset not in SETTINGS:
            raise ValueError(f"--dataset must be one of {', '.join(SETTINGS)}, got {dataset}")
        if (dataset is None) == (dimension is None):
            raise ValueError("give either --dataset or --dimension, the model's parameters")
        if write is not None:
            if dataset is None:
                raise ValueError("--write needs --dataset")
            options.check_file("--write", write)
        setting = None if dataset is None else SETTINGS[dataset]
        size = setting.dimension if setting else dimension or 0
        if size > (most := most_parameters(usual_sealing(mixing), mixing)):
            raise ValueError(f"--dimension must be at most {most}, as a report holds, got {size}")
        question = Question(asked, size, device_megabytes)
        if not question.pairs():
            least = question.device_bytes(min(RATES), min(ROUNDS)) / 1e6
            raise ValueError(
                f"--device-megabytes must be at least {least}, which the plan of least traffic "
                f"takes, got {device_megabytes}"
            )
        if write is not None and setting is not None:  # else the file could not be run
            from shufl.learning.data.partition import check_enough  # which needs torch

            check_enough(setting.records, users, "iid")
        plans = find_plans(question)
        if not plans:
            raise ValueError(f"no noise up to 64 and 10^7 blankets reach epsilon {epsilon:g}")
        rows = [as_dict(plan, setting) for plan in plans]
        if write is not None and dataset is not None:
            configuration = _configuration(dataset, asked, rows[0])
    if json:
        options.print_json({"cover": cover, "plans": rows})
    else:
        if row := next((row for row in rows if row["unused"]), None):
            what = f"γ = {row['check_in_rate']:g}, {row['rounds']} rounds"
            typer.echo(f"warning: {what}: {row['unused']}", err=True)
        title = f"n = {users}, ε ≤ {epsilon:g} for every pair, δ = {rounded_up(asked.delta)}"
        Console().print(_table(rows, title, predicts=setting is not None))
        typer.echo(_WITH_SUMS if of_sums else _WITH_COVER if cover else _WITHOUT_COVER)
        if setting is not None:
            typer.echo("accuracy is approximate; –: with more error than was ever tried")
    if write is not None:  # last, so that the plans are not lost where the disk is full
        write.write_text(configuration, encoding="utf-8")
        if not json:
            typer.echo(f"written: {write}, the first of them; shufl run {write}")


_WITH_SUMS = (
    "all users send in every round, a node of several users one message for them; no report can be "
    "looked at, and one cheating node can spoil a round"
)
_WITH_COVER = "all users send in every round, those who did not check in an empty report"
_WITHOUT_COVER = (
    "ε holds where nobody sees who sends in a round; on real machines that takes --cover, with "
    "which all users send in every round"
)


def _configuration(dataset: str, asked: OpenPlan, row: dict[str, Any]) -> str:
    """The configuration of a plan, as TOML."""
    from shufl.learning.config import dumps, load
    from shufl.simulator.grid.plans import SETTINGS

    values = {
        "name": f"{dataset}-plan",
        "data.dataset": dataset,
        "data.users": asked.users,
        "training.learning_rate": row["learning_rate"],
        "privacy.accountant": asked.accountant,
        "privacy.target_epsilon": asked.target_epsilon,
        "privacy.delta": asked.delta,
        "privacy.adjacency": asked.adjacency,
        "privacy.check_in_rate": row["check_in_rate"],
        "privacy.rounds": row["rounds"],
        "privacy.noise_multiplier": row["noise_multiplier"],
        "privacy.shuffler_blankets": row["shuffler_blankets"],
        "privacy.mixing": asked.mixing,
        "privacy.central_noise": row["central_noise"],
        "privacy.minimum_batch": "",
        "privacy.cover": str(asked.cover).lower(),
    }
    chosen = [f"{key}={value}" for key, value in values.items()]
    return dumps(load(SETTINGS[dataset].config, chosen))


def _table(rows: list[dict[str, Any]], title: str, predicts: bool) -> Table:
    table = Table(title=title, title_justify="left")
    of_sums = rows[0]["central_noise"] > 0
    noise = ("σ",) if of_sums else ("z", "λ")
    heads = ("γ", "rounds", *noise, "error", "a device sends", "shuffler a round")
    for head in (*heads, *(["accuracy"] if predicts else [])):
        table.add_column(head, justify="right")
    for row in rows:
        accuracy = row["accuracy"]
        predicted = "–" if accuracy is None else f"{accuracy:.1%}"
        table.add_row(
            f"{row['check_in_rate']:g}",
            str(row["rounds"]),
            *(
                [rounded_up(row["central_noise"])]
                if of_sums
                else [
                    rounded_up(row["noise_multiplier"]),
                    str(math.ceil(row["shuffler_blankets"])),
                ]
            ),
            f"{row['run_error']:.2e}",
            decimal(int(row["device_bytes"])),
            decimal(int(row["shuffler_bytes"])),
            *([predicted] if predicts else []),
        )
    return table
