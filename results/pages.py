"""Pages of runs: `shufl report` of a run folder, and what pages of grids have in common with it."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.resources
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2

from shufl.accounting import ACCOUNTANTS, PrivacyPlan, epsilon_table
from shufl.learning.config import flat
from shufl.protocol.rounding import rounded_down, rounded_up
from shufl.protocol.validation import read_toml
from shufl.results.plots import plot_rounds, plot_score_epsilon
from shufl.results.rows import check_ledger, read_run, read_starts, rounds_told
from shufl.results.tables import (
    AS_PLANNED,
    STOPPED,
    epsilon_cells,
    epsilon_rows,
    epsilon_text,
    for_every_pair,
    score_text,
    scores_of,
    too_few_present,
)

Table = list[list[str]]
"""Rows of cells, the heads first."""

Part = dict[str, Any]
"""A part of a page.

It has any of `title`; `note`, a paragraph; `facts`, names and values; `plot`, the address of an
image, and `alt`, what it shows; `table`; `lines` of a list; `files`, names and contents, folded.
"""

_WORDS = {
    "name": "mechanism",
    "users": "users n",
    "check_in_rate": "check-in rate γ",
    "clip_norm": "clip norm C",
    "noise_multiplier": "noise multiplier z",
    "local_epsilon": "ε₀ of a report",
    "rounds": "most rounds",
    "delta": "δ",
    "target_epsilon": "budget for ε",
    "adjacency": "neighbours",
    "shuffler_blankets": "expected blankets λ",
    "central_noise": "noise σ of shuffler and server",
    "least_present": "fewest users present",
    "accountant": "halting accountant",
}
"""What the docs call the keys of a plan; in others underscores become spaces."""


def page_of_run(folder: Path) -> str:
    """The page of a run folder.

    Raises:
        ValueError: something in it is damaged; one line.
        LedgerError: the ledger is damaged.
    """
    plan = PrivacyPlan.from_json((folder / "plan.json").read_bytes())
    config = (folder / "config.toml").read_text(encoding="utf-8")
    if (folder / "ledger.jsonl").exists():
        ledger, rows = read_run(folder)
        entries = ledger.entries
    else:  # before its first round
        check_ledger(folder, 0, rounds_told(folder))
        rows, entries = [], []
    path = folder / "summary.json"
    summary = json.loads(path.read_bytes()) if path.exists() else None
    if summary is not None and summary["rounds"] != len(entries):
        summary = None  # of an earlier end: the run goes on, or was killed after it was resumed
    if summary is None:
        too_few = too_few_present(plan, rows, len(entries))
        epsilons = epsilon_rows(epsilon_table(plan, len(entries), too_few))
    else:
        epsilons = summary["epsilon"]
    evaluated = scores_of(rows)
    score = rows[0]["score"] if rows else "score"
    scored = score_text(score, evaluated[-1][1]) if evaluated else "not evaluated yet"
    if summary is not None and summary[summary["score"]] is None:
        scored = "not a number"
    settings = read_toml(folder / "config.toml")
    least = for_every_pair({name: row["epsilon"] for name, row in epsilons.items()})
    stopped = STOPPED[summary["stopped_by"]] if summary else "not finished when this was made"
    seed = settings["seed"]
    simulated = f"seed {seed}: a simulation, which protects nobody"
    entropy = "the operating system" if seed == "system" else simulated
    if settings["simulation"]["engine"] == "vectorised" and seed == "system":
        entropy += " (the vectorised engine is for experiments: no proof covers its rounding)"
    facts = [("halting ε", _told(epsilons, plan.accountant))]
    if least is not None and least != plan.accountant:
        facts.append(("least ε for every pair", _told(epsilons, least)))
    facts += [
        (f"test {score}", scored),
        ("budget", f"ε ≤ {plan.target_epsilon:g}"),
        ("δ, neighbours", f"{rounded_up(plan.delta)}, {plan.adjacency}"),
        ("end", stopped),
        ("coins and noise", f"from {entropy}"),
        *what_trained(settings).items(),
        *origin(read_starts(folder)),
    ]
    note = AS_PLANNED if any("planned" in row for row in epsilons.values()) else ""
    cells = epsilon_cells(epsilons, plan.accountant)
    sections: list[Part] = [
        {"facts": facts},
        {"title": "What ε holds for", "note": note, "table": cells},
    ]
    if evaluated:
        plot = image(plot_score_epsilon, rows, plan)
        alt = f"Test {score} against ε, a line for each accountant, which ends at the ε above."
        sections.append({"title": f"{score.capitalize()} and ε", "plot": plot, "alt": alt})
    if rows:
        plot = image(plot_rounds, rows)
        alt = f"Reports and test {score} of {len(rows)} rounds."
        sections.append({"title": "Round by round", "plot": plot, "alt": alt})
    spent = [("rounds spent", len(entries)), *Counter(row["outcome"] for row in rows).items()]
    if without := len(entries) - len(rows):
        spent.append(("spent, without a row", without))
    note = (
        "A round counts as spent from the moment before anybody is asked for a report, whatever "
        "becomes of it."
    )
    sections += [
        {"title": "Ledger", "note": note, "facts": spent},
        {"title": "Plan", "facts": list(_in_words(json.loads(plan.to_json())))},
        {"title": "Configuration", "files": [("config.toml", config)]},
    ]
    versions = (summary or {}).get("versions", {})
    about = [f"{name} {version}" for name, version in versions.items()]
    if summary is not None:
        about.insert(0, f"engine {summary['engine']}")
    return render("page.html", folder.resolve().name, ", ".join(about), sections)


def _told(epsilons: dict[str, dict[str, Any]], accountant: str) -> str:
    """One accountant's ε of `epsilon_rows`, as planned too where that differs, and for whom."""
    row = epsilons[accountant]
    told = epsilon_text(row["epsilon"])
    if "planned" in row:
        told += f" so far, {epsilon_text(row['planned'])} as planned"
    return f"{told} by {accountant}, {ACCOUNTANTS[accountant].holds_for}"


_REFERENCES = {"central": "DP-SGD by Opacus", "plain": "SGD without privacy"}
_OF_USERS = {"central-users": "one noise by a trusted server", "plain-users": "no privacy"}


def what_trained(settings: dict[str, Any], trainer: str = "shufl") -> dict[str, str]:
    """Data, model and algorithm of a configuration."""
    data, model, training = (settings[key] for key in ("data", "model", "training"))
    options = ", ".join(f"{name} = {value}" for name, value in model.get("options", {}).items())
    mapped = f"{data['features']} of " if "features" in data else ""
    users = f", {data['users']:,} users" if "users" in data else ""
    ours = ", ".join(
        filter(None, (training["algorithm"], training["optimiser"], _OF_USERS.get(trainer)))
    )
    dataset = data["dataset"]
    named = Path(dataset["file"]).name if isinstance(dataset, dict) else dataset
    dealt = f", {data['partition']}" if "partition" in data else ""
    return {
        "data": f"{mapped}{named}{users}{dealt}",
        "model": model["name"] + (f" ({options})" if options else ""),
        "algorithm": _REFERENCES.get(trainer, ours),
    }


def origin(starts: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Command, commit and date of starts or results; older ones lack some."""
    command, commit, dates = (
        sorted({each[key] for each in starts} - {""}) for key in ("command", "commit", "date")
    )
    span = " to ".join(dict.fromkeys((*dates[:1], *dates[-1:])))
    told = {"command": "; ".join(command), "commit": "; ".join(commit), "date": span}
    return [(name, text or "unknown") for name, text in told.items()]


def _in_words(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of a plan's keys, and their values, rounded as `protocol.rounding` says."""
    for key, value in flat(plan).items():
        name = key.removeprefix("mechanism.")
        rounded = rounded_down if name == "check_in_rate" else rounded_up
        shown = rounded(value, 6) if isinstance(value, float) else str(value)
        yield _WORDS.get(name, name.replace("_", " ")), shown


def render(template: str, title: str, subtitle: str, sections: list[Part]) -> str:
    """The page; in HTML, whatever comes from files is escaped."""
    source = importlib.resources.files("shufl.results") / template
    environment = jinja2.Environment(
        autoescape=template.endswith(".html"), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["joined"] = lambda text: re.sub(r"\n(?![-\n])", " ", text)
    version = importlib.metadata.version("shufl")
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        title=title, subtitle=subtitle, sections=sections, version=version
    )


def image(plot: Callable[..., Any], *drawn: Any) -> str:
    """What a function draws to a file, its last argument, as a data URL of an SVG image."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.svg"
        plot(*drawn, path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
