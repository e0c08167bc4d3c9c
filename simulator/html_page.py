"""`shufl report`: a run folder or the results of a grid as one self-contained HTML page."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.resources
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from pydantic import ValidationError

from shufl.accounting import PrivacyPlan, epsilon_table
from shufl.accounting.validation import first_mistake, read_toml
from shufl.simulator.plots import plot_accuracy_epsilon, plot_rounds
from shufl.simulator.records import check_ledger, read_run, rounds_told
from shufl.simulator.tables import (
    AS_PLANNED,
    STOPPED,
    epsilon_cells,
    epsilon_rows,
    epsilon_text,
    too_few_present,
)

Table = list[list[str]]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading, or nothing.
        text: a paragraph.
        facts: pairs of a name and a value.
        plot: a data URL of an image.
        table: rows of cells, the heads first.
        lines: of a list.
        files: names and contents, folded.
    """

    title: str = ""
    text: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    plot: str = ""
    table: Table = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)


def page_of(folder: Path) -> str:
    """The page of a run folder, or of the results folder of a grid.

    Args:
        folder: what `shufl run` left below `runs`, or `shufl experiment` below `results`.

    Raises:
        ValueError: it is neither, or something in it is damaged; one line.
        LedgerError: a run's ledger is damaged.
        ConfigError: a grid's configurations are not there any more.
        OSError: something cannot be read.
    """
    try:
        if (folder / "plan.json").is_file():
            return _of_run(folder)
        if (folder / "grid.json").is_file():
            return _of_grid(folder)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} has a damaged file: {error}") from error
    raise ValueError(
        f"{folder} must be a run folder, which has a plan.json, or the folder of an experiment, "
        "which has a grid.json"
    )


def _of_run(folder: Path) -> str:
    plan = PrivacyPlan.from_json((folder / "plan.json").read_bytes())
    config = (folder / "config.toml").read_text(encoding="utf-8")
    if (folder / "ledger.jsonl").exists():
        ledger, rows = read_run(folder)
        entries = ledger.entries
    else:  # before its first round
        check_ledger(folder, 0, rounds_told(folder))
        rows, entries = [], []
    summary = _json(folder / "summary.json")
    if summary is not None and summary["rounds"] != len(entries):
        summary = None  # of an earlier end: the run goes on, or was killed after it was resumed
    if summary is None:
        too_few = too_few_present(plan, rows, len(entries))
        epsilons = epsilon_rows(epsilon_table(plan, len(entries), too_few))
    else:
        epsilons = summary["epsilon"]
    evaluated = [row for row in rows if row["accuracy"] is not None]
    accuracy = f"{evaluated[-1]['accuracy']:.2%}" if evaluated else "not evaluated yet"
    halting = epsilons[plan.accountant]
    spent = epsilon_text(halting["epsilon"])
    if "planned" in halting:
        spent += f" so far, {epsilon_text(halting['planned'])} as planned"
    stopped = STOPPED[summary["stopped_by"]] if summary else "not finished when this was made"
    sections = [
        Section(
            facts=[
                ("test accuracy", accuracy),
                (f"ε by {plan.accountant}", spent),
                ("budget", f"ε ≤ {plan.target_epsilon:g}"),
                ("δ, neighbours", f"{plan.delta:.3g}, {plan.adjacency}"),
                ("users", f"{plan.users:,}"),
                ("ended by", stopped),
                ("coins and noise", _randomness(read_toml(folder / "config.toml")["seed"])),
            ]
        ),
        Section(
            "What ε holds for",
            AS_PLANNED if any("planned" in row for row in epsilons.values()) else "",
            table=epsilon_cells(epsilons, plan.accountant),
        ),
    ]
    if evaluated:
        plot = _image(lambda path: plot_accuracy_epsilon(rows, plan, path))
        sections.append(Section("Accuracy and ε", plot=plot))
    if rows:
        plot = _image(lambda path: plot_rounds(rows, path))
        sections.append(Section("Round by round", plot=plot))
    outcomes = Counter(row["outcome"] for row in rows)
    facts = [("rounds spent", str(len(entries)))]
    facts += [(name, str(count)) for name, count in outcomes.items()]
    if without := len(entries) - len(rows):
        facts.append(("spent, without a row", str(without)))
    sections += [
        Section(
            "Ledger",
            "A round counts as spent from the moment before anybody is asked for a report, "
            "whatever becomes of it.",
            facts,
        ),
        Section("Plan", facts=list(_flat(json.loads(plan.to_json())))),
        Section("Configuration", files=[("config.toml", config)]),
    ]
    versions = (summary or {}).get("versions", {})
    about = [f"{name} {version}" for name, version in versions.items()]
    if summary is not None:
        about.insert(0, f"engine {summary['engine']}")
    return _render(folder.resolve().name, ", ".join(about), sections)


def _randomness(seed: int | str) -> str:
    """Where coins and noise came from, and what that means."""
    if seed == "system":
        return "from the operating system"
    return f"from seed {seed}: a simulation, which protects nobody"


def _of_grid(folder: Path) -> str:
    from shufl.simulator.grid.page import (
        accuracy_table,
        coverage_table,
        finished,
        origins,
        plan_table,
        plot_results,
    )
    from shufl.simulator.grid.points import configuration_of
    from shufl.simulator.grid.settings import Grid

    stored = json.loads((folder / "grid.json").read_bytes())
    try:
        grid = Grid.model_validate_json(json.dumps(stored["grid"]))
    except ValidationError as error:
        raise ValueError(f"{folder / 'grid.json'}: {first_mistake(error, Grid)}") from None
    points = grid.points()
    results = finished(points, folder)
    plain = [result for _, result in results]
    there = {point.key for point, _ in results}
    missing = [str(point) for point in points if point.key not in there]
    seeds = ", ".join(map(str, sorted({point.seed for point, _ in results})))
    sections = [
        Section(text=re.sub(r"\n(?![-\n])", " ", grid.about.strip())),
        Section(facts=[("runs", f"{len(results)} of {len(points)}"), ("seeds", seeds or "none")]),
    ]
    if results:
        plot = _image(lambda path: plot_results(grid, plain, path))
        sections += [
            Section(grid.label, plot=plot),
            Section("Test accuracy in percent", table=accuracy_table(grid, plain)),
            Section("What each run did", table=plan_table(grid, results)),
        ]
        sections.append(Section("What ε holds for", table=coverage_table(plain)))
    failed = [f"{name}: {reason}" for name, reason in stored["failed"].items()]
    if failed:
        sections.append(Section("Runs that failed", lines=failed))
    if waiting := [name for name in missing if name not in stored["failed"]]:
        sections.append(Section("Runs that are missing", lines=waiting))
    sections.append(
        Section(
            "Where the numbers come from",
            lines=[
                f"{command}{f' at commit {commit}' if commit else ''}, {versions}: "
                f"{runs} runs, {hours:.2f} hours of rounds"
                for command, commit, versions, runs, hours in origins(plain)
            ],
        )
    )
    first = {series.name: None for series in grid.series}
    first |= {point.series: point for point, _ in reversed(results)}
    files = [(name, configuration_of(point)) for name, point in first.items() if point]
    sections.append(Section("Configurations", "Of each series' first run.", files=files))
    return _render(grid.title, folder.resolve().name, sections)


def _render(title: str, subtitle: str, sections: list[Section]) -> str:
    """The page; whatever comes from files is escaped."""
    source = (importlib.resources.files("shufl.simulator") / "page.html").read_text(
        encoding="utf-8"
    )
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(source)
    version = importlib.metadata.version("shufl")
    return template.render(title=title, subtitle=subtitle, sections=sections, version=version)


def _image(plot: Callable[[Path], None]) -> str:
    """What a function draws to a file, as a data URL of an SVG image."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.svg"
        plot(path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_bytes()) if path.exists() else None


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names with dots, and their values, of nested objects."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            pairs.append((prefix + name, shown))
    return pairs
