"""The results of a grid: table, plot, and pages that say where every number comes from."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shufl.accounting import ACCOUNTANTS
from shufl.learning.config import values_of
from shufl.protocol.files import write_whole
from shufl.protocol.text import rounded_down, rounded_up
from shufl.results.plain_words import stated
from shufl.results.plots import draw
from shufl.results.run_page import Part, Table, image, origin, render, what_trained
from shufl.results.tables import epsilon_text, for_every_pair, score_axis, score_text
from shufl.simulator.grid.definition import Grid, Point, Series, shown
from shufl.simulator.grid.grid_points import read_result
from shufl.simulator.grid.table import write_rows

Result = dict[str, Any]
"""A point's `result.json`."""


def write_page(
    name: str, grid: Grid, points: list[Point], folder: Path, pages: Path, failed: dict[str, str]
) -> Path:
    """Writes NAME.csv, NAME.svg and NAME.md to the folder `pages`; returns the last one's path."""
    pages.mkdir(parents=True, exist_ok=True)
    results = finished(points, folder)
    write_rows(results, pages / f"{name}.csv")
    if results:
        plot_results(grid, [result for _, result in results], pages / f"{name}.svg")
    sections = _sections(grid, points, results, failed, f"{name}.svg")
    page = pages / f"{name}.md"
    text = render("page.md", grid.title, f"All numbers: [{name}.csv]({name}.csv).", sections)
    write_whole(page, text.encode())
    return page


def keep_grid(grid: Grid, folder: Path, failed: dict[str, str]) -> None:
    """Writes `grid.json` beside the points, for `page_of_grid`: the grid and why points failed."""
    own = grid.model_dump(mode="json") | {"base": values_of(grid.base)}
    text = json.dumps({"grid": own, "failed": failed}, default=str)  # of a file's dates
    write_whole(folder / "grid.json", text.encode())


def page_of_grid(folder: Path) -> str:
    """The page of an experiment's folder in `results`."""
    stored = json.loads((folder / "grid.json").read_bytes())
    grid = Grid.checked(folder / "grid.json", stored["grid"])
    points = grid.points()
    results = finished(points, folder)
    plot = image(plot_results, grid, [result for _, result in results]) if results else ""
    sections = _sections(grid, points, results, stored["failed"], plot)
    if not results:
        return render("page.html", grid.title, folder.resolve().name, sections)
    sections[0] |= {"title": "The runs in numbers", "page": True}
    plain = _plain_words(grid, [point for point, _ in results], [each for _, each in results])
    return render("page.html", grid.title, folder.resolve().name, sections, plain)


def finished(points: list[Point], folder: Path) -> list[tuple[Point, Result]]:
    """The points that have a result, each with its result."""
    read = ((point, read_result(folder / point.key)) for point in points)
    return [(point, result) for point, result in read if result is not None]


def plot_results(grid: Grid, results: list[Result], *paths: Path) -> None:
    """Plots each series: its mean, the range over seeds around it, and its ε, dashed."""
    words = any(isinstance(value, str) for value in grid.values)
    places: list[Any] = list(range(len(grid.values)) if words else grid.values)
    axis, unit = score_axis(results[0]["score_name"])
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
            ylabel=axis,
            title=grid.title,
        )
        lowest, highest = axes.get_ylim()
        if unit == 100.0 and highest - lowest > _WIDE:  # keeps the best series apart
            axes.set_yscale("function", functions=(_by_error, _from_error))
            axes.set_yticks([tick for tick in _TICKS if lowest < tick < highest])
            axes.set_ylim(lowest, min(highest, 100 - _LEAST_ERROR))
            axes.set_ylabel(f"{axis}, log scale of the error")
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


def _sections(
    grid: Grid,
    points: list[Point],
    finished: list[tuple[Point, Result]],
    failed: dict[str, str],
    plot: str,
) -> list[Part]:
    """The sections of a page; `plot` is the address of the plot by `plot_results`."""
    results = [result for _, result in finished]
    seeds = sorted({result["seed"] for result in results})
    dumped = [(point.config.model_dump(exclude_none=True), point.trainer) for point in points]
    trained = [what_trained(*each) for each in dumped]
    facts = [
        *_head_facts(results),
        ("runs", f"{len(results)} of {len(points)}"),
        ("seeds", ", ".join(map(str, seeds)) or "none"),
        *((key, "; ".join(dict.fromkeys(each[key] for each in trained))) for key in trained[0]),
        ("coins and noise", "from the seeds: simulations, which protect nobody"),
        *origin(results),
    ]
    sections: list[Part] = [{"facts": facts}, {"note": grid.about.strip()}]
    if results:
        axis, _ = score_axis(results[0]["score_name"])
        alt = f"Score and ε against {grid.label}, a line for each series; numbers are below."
        scores = score_table(grid, results)
        told = "mean and range" if len(seeds) > 1 else "one seed"
        sections += [
            {"title": grid.label, "plot": plot, "alt": alt},
            {"title": f"{axis.capitalize()}, {told}", "table": scores},
            {"title": "What each run did", "note": _EVERY_PAIR, "table": plan_table(grid, results)},
            {"title": "What ε holds for", "table": _coverage_table(results)},
        ]
    there = {point.key for point, _ in finished}
    missing = [str(point) for point in points if point.key not in there]
    for title, lines in (
        ("Runs that failed", [f"{name}: {reason}" for name, reason in failed.items()]),
        ("Runs that are missing", [name for name in missing if name not in failed]),
        ("Where the numbers come from", list(_origins(results))),
    ):
        if lines:
            sections.append({"title": title, "lines": lines})
    return sections


def _plain_words(grid: Grid, points: list[Point], results: list[Result]) -> dict[str, Any]:
    """What the first page of a grid says; it explains the largest ε for every pair."""
    configs = [point.config.model_dump(exclude_none=True) for point in points]
    config, name = configs[0], results[0]["score_name"]
    trained = [what_trained(each) for each in configs]
    ours = [each for each in results if each["accountant"] in ACCOUNTANTS and each["delta"]]
    halting = sorted({each["accountant"] for each in ours})
    pairs = enumerate(_first_epsilons([result])[1] for result in ours)
    told = sorted((math.inf if given is None else given, text, at) for at, (given, text) in pairs)
    said: dict[str, Any] = config.get("about", {})
    if told:
        epsilon, largest, at = told[-1]
        by = for_every_pair(ours[at]["epsilon"]) or "local"
        said = stated(config, by, epsilon, ours[at]["delta"], ours[at]["adjacency"])
        claim = " to ".join(dict.fromkeys((told[0][1], largest)))
        said["claims"] = [("ε for every person", claim)]
    special = [{"name": by} for by in halting if ACCOUNTANTS[by].holds_for != "every pair"]
    constant = [each["constant"] for each in results if each["constant"] is not None]
    return said | {
        "runs": len(results), "others": len(results) - len(ours), "seeded": True,
        **{key: "; ".join({each[key]: None for each in trained}) for key in ("model", "data")},
        "dealt": any(each["data"].get("partition") != "natural" for each in configs),
        "own_noise": all(each["noise_multiplier"] > 0 for each in ours),
        "central": any(each["central_noise"] > 0 for each in ours),
        "special": special, "least_present": "all",
        "score": f"test {name}", "scores": list(_scores(grid, results)),
        "constant": _between(name, constant) if constant else "",
    }  # fmt: skip


_WITHOUT = {
    "plain": "without privacy", "plain-users": "without privacy",
    "central": "a server that everybody trusts", "central-users": "a server that everybody trusts",
}  # fmt: skip


def _scores(grid: Grid, results: list[Result]) -> Iterator[tuple[str, str]]:
    """The range of each series' mean scores."""
    for series in grid.series:
        made = [_made(grid, results, series, value) for value in grid.values]
        means = [statistics.fmean(each["score"] for each in runs) for runs in made if runs]
        if means:
            label = ", ".join(filter(None, (series.name, _WITHOUT.get(series.trainer))))
            yield label, _between(results[0]["score_name"], means)


def _between(name: str, scores: list[float]) -> str:
    """The least and the largest of some scores."""
    return " to ".join(dict.fromkeys(score_text(name, end(scores)) for end in (min, max)))


def score_table(grid: Grid, results: list[Result]) -> Table:
    """Mean and range of each series at each value."""
    rows = [[grid.label, *map(shown, grid.values)]]
    for series in grid.series:
        cells = [_cell(_made(grid, results, series, value)) for value in grid.values]
        rows.append([series.name, *cells])
    return rows


def plan_table(grid: Grid, results: list[Result]) -> Table:
    """The largest ε of the runs that differ in their seed alone, their privacy plan and code."""
    alike: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        alike.setdefault((result["series"], shown(result["value"])), []).append(result)
    given = {name for result in results for name in result["epsilon"]}
    names = [name for name in ACCOUNTANTS if name in given] + sorted(given.difference(ACCOUNTANTS))
    numbers = dict(_NUMBERS)
    if not any(result.get("central_noise") for result in results):
        del numbers["σ"]
    heads = (grid.label, *_FIRST, *numbers, "neighbours")
    rows = [["series", *heads, *(f"ε {name}" for name in names), "code"]]
    for (series, value), made in alike.items():
        rows.append([
            series,
            value,
            *(text for _, text in _first_epsilons(made)),
            *(_plan_number(key, made[0][key]) for key in numbers.values()),
            made[0]["adjacency"],
            *(epsilon_text(_largest_epsilon(made, name)) for name in names),
            ", ".join(dict.fromkeys(map(_code, made))),
        ])  # fmt: skip
    return rows


def _code(result: Result) -> str:
    """The commit of the code that made a result; outside a checkout, its version."""
    return result["commit"] or f"shufl {result['versions']['shufl']}"


def _plan_number(key: str, value: float | None) -> str:
    """Rounds a value of a plan so that the true value's ε is no larger."""
    rounded = rounded_down if key in ("check_in_rate", "rounds") else rounded_up
    return "–" if value is None else rounded(value)


def _head_facts(results: list[Result]) -> Iterator[tuple[str, str]]:
    """The most important numbers, each from the least to the largest of all runs."""
    runs = [
        (*_first_epsilons([result]), (score, score_text(name, score)))
        for result in results
        for name, score in ((result["score_name"], result["score"]),)
    ]
    name = f"test {results[0]['score_name']}" if results else "score"
    for head, values in zip((*_FIRST, name), zip(*runs, strict=True), strict=False):
        given = [each for each in values if each[0] is not None]
        ends = [end(given)[1] for end in (min, max)] if given else ["none"]
        yield head, " to ".join(dict.fromkeys(ends))


_FIRST = ("halting ε", "ε for every pair")
_EVERY_PAIR = (
    "The halting ε is by the accountant that ends the run. The ε for every pair is the least by an "
    "accountant that holds for every pair of neighbours. The accountant is in brackets; what it "
    "assumes stands below. Of several seeds the largest ε counts."
)


def _first_epsilons(results: list[Result]) -> list[tuple[float | None, str]]:
    """The two ε of `_FIRST`, of runs that differ in their seed alone: each as number and as text.

    An accountant that does not price all of these runs has no number.
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
    """The largest ε by an accountant; None if it has none for a result that asks for it."""
    given = [each["epsilon"][accountant] for each in results if accountant in each["epsilon"]]
    return None if None in given else max(given, default=None)


def _coverage_table(results: list[Result]) -> Table:
    """What ε holds for, by each accountant that priced a result."""
    priced = {name for result in results for name in result["epsilon"]}
    covers = {name: each.covers for name, each in ACCOUNTANTS.items()} | _TRUSTED
    rows = [[name, text] for name, text in covers.items() if name in priced]
    return [["accountant", "its ε holds for"], *rows]


_TRUSTED = {
    name: f"every pair of datasets, one with a {whose} more; assumes that the server, which sees "
    f"every {what}, is trusted"
    for name, whose, what in (("opacus", "record", "gradient"), ("central", "user", "update"))
}
_NUMBERS = {
    "γ": "check_in_rate", "z": "noise_multiplier", "λ": "shuffler_blankets", "σ": "central_noise",
    "rounds": "rounds", "δ": "delta",
}  # fmt: skip


def _origins(results: list[Result]) -> Iterator[str]:
    """Command, commit and versions, each with how many runs they made and in how many hours."""
    made: dict[str, list[float]] = {}
    for result in results:
        commit = f" at commit {result['commit']}" if result["commit"] else ""
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        made.setdefault(f"{result['command']}{commit}, {versions}", []).append(result["seconds"])
    for by, seconds in made.items():
        yield f"{by}: {len(seconds)} runs, {sum(seconds) / 3600:.2f} hours of rounds"


def _made(grid: Grid, results: list[Result], series: Series, value: float | str) -> list[Result]:
    """The results of a series that stand for a value."""
    own = [result for result in results if result["series"] == series.name]
    return [each for each in own if each["value"] == value] if grid.varies(series) else own


def _summary(results: list[Result]) -> tuple[float, float, float, float]:
    """Mean, lowest and highest score, as plots show them; the largest ε, or NaN without one."""
    _, unit = score_axis(results[0]["score_name"])
    scores = [unit * result["score"] for result in results]
    epsilon = _largest_epsilon(results, results[0]["accountant"])
    lowest, highest = min(scores), max(scores)
    return statistics.fmean(scores), lowest, highest, math.nan if epsilon is None else epsilon


def _cell(results: list[Result]) -> str:
    if not results:
        return "–"
    mean, lowest, highest, _ = _summary(results)
    digits = 2 if score_axis(results[0]["score_name"])[1] == 100.0 else 4
    between = f" ({lowest:.{digits}f} to {highest:.{digits}f})" if len(results) > 1 else ""
    return f"{mean:.{digits}f}{between}"
