"""`shufl histogram`: a private histogram, simulated from a column or read from a run."""

from __future__ import annotations

import csv
import importlib
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from shufl.cli import options
from shufl.learning.data.files import CsvForm
from shufl.learning.data.person_ids import spaced
from shufl.protocol.console import Console
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.text import rounded_up
from shufl.protocol.validation import choice
from shufl.results.plots import draw
from shufl.results.tables import epsilon_rows, epsilon_text, print_epsilons, too_few_present

if TYPE_CHECKING:
    from shufl.accounting import PrivacyPlan
    from shufl.simulator.histogram import Histogram

_VALUES = "target_epsilon", "delta", "check_in_rate", "local_epsilon"
_OTHER = "other"
_EMPTY = '""'  # how the empty value is named and shown
_MOST_SHOWN = 60


@options.plan_options(*_VALUES, check_in_rate=1.0, delta="1/n")
def histogram_command(
    given: dict[str, Any],
    source: Annotated[
        Path,
        typer.Argument(
            help="A CSV or Parquet file, or the folder of a run of mechanism randomised-response."
        ),
    ],
    column: Annotated[str | None, typer.Option(help="The column of the file.")] = None,
    user_column: Annotated[
        str | None,
        typer.Option(
            help="The column that says whose a row is: of each person one row, at random, counts. "
            "Default: each row is taken for one person."
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(
            help='All categories: A,B,"C, D", or a text file, one a line. They are public. '
            'The empty value is written "".'
        ),
    ] = None,
    separator: Annotated[str, typer.Option(help="What separates the cells of a CSV file.")] = ",",
    encoding: Annotated[str, typer.Option(help="Of a CSV file: utf-8, cp1252, …")] = "utf-8",
    other: Annotated[
        bool, typer.Option("--other", help=f"One more category, {_OTHER}, for any other value.")
    ] = False,
    accountant: Annotated[
        str, typer.Option(help="blanket, crowd (no blankets) or local (no shuffler).")
    ] = "blanket",
    consistent: Annotated[
        bool, typer.Option("--consistent", help="Make the shares sum to 1, none below 0.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a simulation.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for histogram.csv and .png. Default: the run's, or none."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Estimate the share of each category, with error bars, and print ε by every accountant."""
    from shufl.accounting import LedgerError, epsilon_table
    from shufl.simulator.histogram import count_column, plan_for, simulate

    if out is not None:
        importlib.import_module("matplotlib")  # before the work
    true, too_few, note = None, False, None
    with options.failing(ValueError, OSError, LedgerError):
        if source.is_dir():
            shown = "categories", "consistent", "out", "json"
            options.check_alone("a run folder, which has its plan", *shown)
            plan, found, too_few, by = _of_run(source)
            names = _categories(categories, False) or [str(i) for i in range(len(found.shares))]
            if len(names) != len(found.shares):
                raise ValueError(
                    f"--categories must be {len(found.shares)}, as the run has, got {len(names)}"
                )
            out = out or source
        else:
            choice("--accountant", accountant, ("blanket", "crowd", "local"))
            names = _needed("--categories", _categories(categories, other))
            counted = _needed("--column", column)
            _needed("--target-epsilon", given.get("target_epsilon"))
            if len(separator := separator.replace("\\t", "\t")) != 1:
                raise ValueError(f"--separator must be one character, got {separator!r}")
            form = CsvForm(separator, encoding)
            counts, true, rows_there = count_column(
                source, counted, names, other, user_column, seed, form
            )
            users = int(counts.sum())
            by = f"each of {spaced(rows_there)} rows is taken for one person"
            if user_column is not None:
                by = f"by column {user_column}: one of each one's rows counts, at random, of "
                by += f"{spaced(rows_there)} in all"
            plan, note = plan_for(users, len(names), **given, accountant=cast(Any, accountant))
            found = simulate(counts, plan, seed, one_each=user_column is None)
        found = found.consistent() if consistent else found
        rows = epsilon_rows(epsilon_table(plan, 1, too_few))
        columns = {"category": names, "share": found.shares, "standard_error": found.errors}
        told = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        columns |= {} if true is None else {"true": true}
        title = f"ε = {plan.target_epsilon:g} by {plan.accountant}, δ = {rounded_up(plan.delta)}"
        title += f", n = {plan.users} users, {by}"
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            _write(out / "histogram.csv", columns)
            _plot(out / "histogram.png", names, found, title)
    if note:
        typer.echo(f"warning: {note}", err=True)
    if json:
        options.print_json(
            {"histogram": told, "users_by": by, "users": plan.users, "privacy": plan.section()}
            | {"epsilon": rows}
        )
        return
    console = Console()
    _print(console, columns, found, plan, title)
    print_epsilons(console, "ε by accountant", rows, plan.accountant)
    if true is not None:
        for line in (
            "simulated: all that is random follows from the seed",
            "on real machines a round can be lost, with its ε: have a budget for two of them",
        ):
            console.print(line, soft_wrap=True)
    if out is not None:
        console.print(f"written: {out / 'histogram.csv'} and .png", soft_wrap=True)


def _needed(option: str, value: Any) -> Any:
    """The value of an option that must be given."""
    if value is None:
        raise ValueError(f"{option} is missing")
    return value


def _categories(text: str | None, other: bool) -> list[str] | None:
    """The names of --categories, or None if it was not given."""
    if text is None:
        return None
    if os.path.isfile(text):  # noqa: PTH113 (Path.is_file fails for a list longer than a name)
        given = [line for line in options.read_text(Path(text)).splitlines() if line.strip()]
    else:
        (given,) = csv.reader([text], skipinitialspace=True)
    names = ["" if name.strip() == _EMPTY else name.strip() for name in given] + [_OTHER] * other
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ValueError(f"--categories must be all different, got {name!r} twice")
    if len(names) < 2:
        raise ValueError(f"--categories must be at least 2, got {len(names)}")
    return names


def _of_run(folder: Path) -> tuple[PrivacyPlan, Histogram, bool, str]:
    """Of a run that has ended: plan, estimate, `too_few_present`, and where its users come from."""
    from shufl.learning import load_tensors
    from shufl.learning.config import load
    from shufl.protocol import RandomisedResponse
    from shufl.results.run_folder import read_run
    from shufl.simulator.histogram import Histogram

    ledger, rows = read_run(folder)
    plan = ledger.plan
    if not isinstance(plan.mechanism, RandomisedResponse):
        raise ValueError(
            f"{folder} is a run of mechanism {plan.mechanism.name}, not of a histogram"
        )
    released = [row for row in rows if row["outcome"] == RoundOutcome.RELEASED]
    if not released or not (folder / "model.pt").exists():
        raise ValueError(f"{folder} has released no histogram; its metrics.jsonl has its rounds")
    config = load(str(folder / "config.toml"))
    try:
        scores = load_tensors(folder / "model.pt")["scores"].double().numpy()
    except Exception as error:  # of all the kinds that a damaged file can raise
        raise ValueError(f"{folder / 'model.pt'} is damaged: {type(error).__name__}") from None
    shares = scores + 1.0 / len(scores)
    found = Histogram.of(shares, plan, released[0]["users_present"], config.shuffler.number)
    return plan, found, too_few_present(plan, rows, 1), config.data.users_by


def _print(
    console: Console, columns: dict[str, Any], found: Histogram, plan: PrivacyPlan, title: str
) -> None:
    from shufl.simulator.histogram import response_of

    response = response_of(plan)
    about = (
        f"reports of ε₀ = {epsilon_text(response.local_epsilon)}, true with "
        f"probability {response.truth:.4g}; {rounded_up(plan.shuffler_blankets)} blankets expected"
    )
    for line in (about, title):
        console.print(line, highlight=False, soft_wrap=True)
    shown = {"share": found.shares, "± (95 %)": found.margins}
    if "true" in columns:
        shown["true share"] = columns["true"]
    table = Table("category")
    for heading in shown:
        table.add_column(heading, justify="right")
    digits = max(1, 1 - math.floor(math.log10(100.0 * float(found.margins.min()))))
    for it in _largest(found):
        cells = (f"{numbers[it]:.{digits}%}" for numbers in shown.values())
        table.add_row(columns["category"][it] or _EMPTY, *cells)
    console.print(table)
    if len(found.shares) > _MOST_SHOWN:
        console.print(f"the largest {_MOST_SHOWN} of {len(found.shares)}; --out writes all")


def _largest(found: Histogram) -> list[int]:
    """The places of all categories, or where there are many, of the largest."""
    places = list(range(len(found.shares)))
    if len(places) > _MOST_SHOWN:
        places.sort(key=lambda it: -found.shares[it])
    return places[:_MOST_SHOWN]


def _write(path: Path, columns: dict[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for name, *numbers in zip(*columns.values(), strict=True):
            writer.writerow([name, *(f"{number:.9g}" for number in numbers)])


def _plot(path: Path, names: list[str], found: Histogram, title: str) -> None:
    """Bars with 95 % intervals."""
    places = _largest(found)
    with draw(path) as axes:
        axes.bar(
            [names[it] or _EMPTY for it in places],
            100.0 * found.shares[places],
            yerr=100.0 * found.margins[places],
            capsize=3,
            color="#8cf",
        )
        axes.tick_params(axis="x", rotation=0 if len(places) <= 10 else 90)
        axes.set(ylabel="share (%), with 95 % interval", title=title)
