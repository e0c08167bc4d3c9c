"""What a grid came to: CSV, plot, and a page of Markdown with where every number comes from."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shufl.accounting import ACCOUNTANTS
from shufl.simulator.config import dumps
from shufl.simulator.grid.points import read_result
from shufl.simulator.grid.rows import write_rows
from shufl.simulator.grid.settings import Grid, Point, Series, shown
from shufl.simulator.plots import draw
from shufl.simulator.tables import epsilon_text, for_every_pair

Result = dict[str, Any]
"""A point's `result.json`."""

Table = list[list[str]]
"""Rows of cells, the heads first."""


def write_page(
    name: str, grid: Grid, points: list[Point], folder: Path, pages: Path, failed: dict[str, str]
) -> Path:
    """Writes NAME.csv, NAME.png, NAME.svg and NAME.md, which it returns, to `pages`."""
    pages.mkdir(parents=True, exist_ok=True)
    results = finished(points, folder)
    write_rows(results, pages / f"{name}.csv")
    plot_results(
        grid, [result for _, result in results], pages / f"{name}.png", pages / f"{name}.svg"
    )
    page = pages / f"{name}.md"
    page.write_text("\n".join(_lines(name, grid, results, len(points), failed)), encoding="utf-8")
    return page


def keep_grid(grid: Grid, folder: Path, failed: dict[str, str]) -> None:
    """Writes `grid.json` beside the points, for `shufl report`: the grid and why points failed."""
    text = json.dumps({"grid": grid.model_dump(mode="json"), "failed": failed})
    (folder / "grid.json").write_text(text, encoding="utf-8")


def finished(points: list[Point], folder: Path) -> list[tuple[Point, Result]]:
    """Those of the points that have a result, and it."""
    read = ((point, read_result(folder / point.key)) for point in points)
    return [(point, result) for point, result in read if result is not None]


def plot_results(grid: Grid, results: list[Result], *paths: Path) -> None:
    """A line a series through the means, the range over seeds around it; its ε, dashed."""
    words = any(isinstance(value, str) for value in grid.values)
    places = [place if words else value for place, value in enumerate(grid.values)]
    with draw(*paths) as axes:
        beside = None if grid.across == "privacy.target_epsilon" else axes.twinx()
        for series in grid.series:
            drawn = [
                (place, *_summary(made))
                for place, value in zip(places, grid.values, strict=True)
                if (made := _made(grid, results, series, value))
            ]
            if not drawn:
                continue
            at, means, lowest, highest, epsilons = zip(*drawn, strict=True)
            (line,) = axes.plot(at, means, label=series.name)
            own = {"color": line.get_color(), "marker": line.get_marker()}
            axes.fill_between(at, lowest, highest, color=own["color"], alpha=0.2)
            if beside is not None:
                beside.plot(at, epsilons, "--", markerfacecolor="white", **own)
                beside.set(yscale="log", ylabel="ε by the halting accountant (dashed)")
        axes.set(
            xscale="log" if min(places) > 0 and max(places) / min(places) > 4 else "linear",
            xlabel=grid.label,
            ylabel="test accuracy (%)",
            title=grid.title,
        )
        lowest, highest = axes.get_ylim()
        if highest - lowest > _WIDE:  # else the best series would be one line
            axes.set_yscale("function", functions=(_by_error, _from_error))
            axes.set_yticks([tick for tick in _TICKS if lowest < tick < highest])
            axes.set_ylim(lowest, min(highest, 100 - _LEAST_ERROR))
            axes.set_ylabel("test accuracy (%), log scale of the error")
        axes.set_xticks(places, list(map(shown, grid.values)))
        axes.minorticks_off()


_WIDE = 40.0  # percent
_TICKS = (10, 50, 80, 90, 95, 97, 98, 99, 99.5)
_LEAST_ERROR = 0.5  # percent, that a plot by error shows


def _by_error(values: np.ndarray) -> np.ndarray:
    """From an accuracy in percent to minus the logarithm of the error."""
    return -np.log(np.clip(100 - values, _LEAST_ERROR, None))


def _from_error(values: np.ndarray) -> np.ndarray:
    """Undoes `_by_error`."""
    return 100 - np.exp(-values)


def _lines(
    name: str,
    grid: Grid,
    results: list[tuple[Point, Result]],
    points: int,
    failed: dict[str, str],
) -> Iterator[str]:
    """The page's lines."""
    seeds = ", ".join(map(str, sorted({point.seed for point, _ in results})))
    yield from (f"# {grid.title}", "")
    if grid.about:
        yield from (grid.about.strip(), "")
    yield from (
        f"Test accuracy in percent, with seeds {seeds}: the mean, and the range. "
        f"{len(results)} of {points} runs are",
        f"finished. All numbers: [{name}.csv]({name}.csv).",
        "",
        f"![{grid.title}]({name}.png)",
        "",
    )
    plain = [result for _, result in results]
    yield from _markdown(accuracy_table(grid, plain), words=(0,))
    yield from ("", "## What each run did", "")
    yield from _markdown(plan_table(grid, results), words=(0, 9))
    yield from ("", *textwrap.wrap(EVERY_PAIR, 120))
    yield from ("", "## What ε holds for", "")
    yield from _markdown(coverage_table(plain), words=(0, 1))
    yield from ("", "Coins and noise come from the seed: these runs protect nobody.")
    if failed:
        yield from ("", "## Runs that failed", "")
        yield from (f"- {point}: {reason}" for point, reason in failed.items())
    yield from ("", "## Where the numbers come from", "")
    for command, commit, versions, runs, hours in origins(plain):
        of_commit = f" at commit `{commit}`" if commit else ""
        yield f"- `{command}`{of_commit}, {versions}: {runs} runs, {hours:.2f} hours of rounds"
    yield ""
    yield "The configuration of each series, at its first value and seed:"
    for series in grid.series:
        point = next((point for point, _ in results if point.series == series.name), None)
        if point is not None:
            yield from ("", f"<details><summary>{series.name}</summary>", "", "```toml")
            yield from (dumps(point.config).strip(), "```", "", "</details>")
    yield ""


def _markdown(table: Table, words: tuple[int, ...]) -> Iterator[str]:
    """A table's lines; columns that are not of words stand on the right."""
    head, *_ = table
    for row in (head, [("---" if at in words else "---:") for at in range(len(head))], *table[1:]):
        yield f"| {' | '.join(row)} |"


def accuracy_table(grid: Grid, results: list[Result]) -> Table:
    """Mean and range of each series at each value."""
    rows = [[grid.label, *map(shown, grid.values)]]
    for series in grid.series:
        cells = [_cell(_made(grid, results, series, value)) for value in grid.values]
        rows.append([series.name, *cells])
    return rows


def plan_table(grid: Grid, results: list[tuple[Point, Result]]) -> Table:
    """The largest ε of the runs that differ in their seed alone, and their privacy plan."""
    alike: dict[tuple[str, str], list[Result]] = {}
    for _, result in results:
        alike.setdefault((result["series"], shown(result["value"])), []).append(result)
    given = {name for _, result in results for name in result["epsilon"]}
    names = [name for name in ACCOUNTANTS if name in given] + sorted(given.difference(ACCOUNTANTS))
    heads = (grid.label, *_FIRST, "γ", "z", "λ", "rounds", "δ", "neighbours")
    rows = [["series", *heads, *(f"ε {name}" for name in names)]]
    for (series, value), made in alike.items():
        rows.append([
            series,
            value,
            *(text for _, text in _first_epsilons(made)),
            *("–" if made[0][key] is None else f"{made[0][key]:.4g}" for key in _NUMBERS),
            made[0]["adjacency"],
            *(epsilon_text(_largest_epsilon(made, name)) for name in names),
        ])  # fmt: skip
    return rows


def head_facts(results: list[tuple[Point, Result]]) -> Iterator[tuple[str, str]]:
    """What matters first: from the least to the largest of all runs."""
    runs = [
        (*_first_epsilons([result]), (result["accuracy"], f"{result['accuracy']:.2%}"))
        for _, result in results
    ]
    for head, values in zip((*_FIRST, "test accuracy"), zip(*runs, strict=True), strict=False):
        given = [each for each in values if each[0] is not None]
        ends = [end(given)[1] for end in (min, max)] if given else ["none"]
        yield head, " to ".join(dict.fromkeys(ends))


_FIRST = ("halting ε", "ε for every pair")
EVERY_PAIR = (
    "The halting ε is that of the accountant that ends the run. The ε for every pair is the least "
    "by an accountant that holds for every pair of neighbours. The accountant is in brackets; what "
    "it assumes stands below. Of several seeds the largest ε counts."
)


def _first_epsilons(results: list[Result]) -> list[tuple[float | None, str]]:
    """`_FIRST` of runs that differ in their seed alone: the number, and it with its accountant.

    An accountant that does not price all of them has none.
    """
    halts = results[0]["accountant"]
    priced = {
        name: max(result["epsilon"][name] for result in results)
        for name in results[0]["epsilon"]
        if all(result["epsilon"].get(name) is not None for result in results)
    }
    return [
        (priced[name], f"{epsilon_text(priced[name])} ({name})") if name in priced else (None, "–")
        for name in (halts, for_every_pair(priced))
    ]


def _largest_epsilon(results: list[Result], accountant: str) -> float | None:
    """None where the accountant prices none of them."""
    given = [result["epsilon"].get(accountant) for result in results]
    return max((epsilon for epsilon in given if epsilon is not None), default=None)


def coverage_table(results: list[Result]) -> Table:
    """What the ε of each accountant that priced a result holds for."""
    priced = {name for result in results for name in result["epsilon"]}
    covers = {name: each.covers for name, each in ACCOUNTANTS.items()} | {"opacus": _OPACUS_COVERS}
    rows = [[name, text] for name, text in covers.items() if name in priced]
    return [["accountant", "its ε holds for"], *rows]


_OPACUS_COVERS = (
    "every pair of datasets of which one has a record more; assumes that the server, which sees "
    "every gradient, is trusted"
)
_NUMBERS = ("check_in_rate", "noise_multiplier", "shuffler_blankets", "rounds", "delta")


def origins(results: list[Result]) -> Iterator[tuple[str, str, str, int, float]]:
    """Command, commit and versions, with how many runs they made and the hours of these."""
    by_origin: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        by_origin.setdefault((result["command"], result["commit"], versions), []).append(result)
    for (command, commit, versions), made in by_origin.items():
        yield command, commit, versions, len(made), sum(each["seconds"] for each in made) / 3600


def _made(grid: Grid, results: list[Result], series: Series, value: float | str) -> list[Result]:
    """Those of a series that stand for a value."""
    own = [result for result in results if result["series"] == series.name]
    return [each for each in own if each["value"] == value] if grid.varies(series) else own


def _summary(results: list[Result]) -> tuple[float, float, float, float]:
    """Mean, lowest and highest accuracy in percent; the largest ε, not a number if none."""
    accuracies = [100 * result["accuracy"] for result in results]
    epsilon = _largest_epsilon(results, results[0]["accountant"])
    lowest, highest = min(accuracies), max(accuracies)
    return statistics.fmean(accuracies), lowest, highest, math.nan if epsilon is None else epsilon


def _cell(results: list[Result]) -> str:
    if not results:
        return "–"
    accuracies = [result["accuracy"] for result in results]
    text = f"{100 * statistics.fmean(accuracies):.2f}"
    if len(accuracies) > 1:
        text += f" ({100 * min(accuracies):.2f} to {100 * max(accuracies):.2f})"
    return text
