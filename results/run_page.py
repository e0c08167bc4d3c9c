"""The page of a run, for `shufl report`, and the parts that pages of grids have too."""

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
from shufl.protocol.text import rounded_down, rounded_up
from shufl.protocol.validation import read_toml
from shufl.results.plain_words import Row, name_of_data, plain_words
from shufl.results.plots import plot_rounds, plot_score_epsilon
from shufl.results.run_folder import check_ledger, read_run, read_starts, rounds_told
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
"""A part of a page, with any of these keys.

`title`; `page`, whether a print begins a new page; `note`, a paragraph; `facts`, names and values;
`plot`, the address of an image, and `alt`, what it shows; `table`; `lines` of a list; `files`,
names and contents, which are folded.
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
"""What the docs call these keys of a plan; in all others underscores become spaces."""


def page_of_run(folder: Path) -> str:
    """The page of a run folder.

    Raises:
        ValueError: something in it is damaged; one line.
        LedgerError: the ledger is damaged.
    """
    plan = PrivacyPlan.from_json((folder / "plan.json").read_bytes())
    config = (folder / "config.toml").read_text(encoding="utf-8")
    rows: list[Row] = []
    spent = 0
    if (folder / "ledger.jsonl").exists():
        ledger, rows = read_run(folder)
        spent = len(ledger.entries)
    else:  # before its first round
        check_ledger(folder, 0, rounds_told(folder))
    path = folder / "summary.json"
    summary: Row = json.loads(path.read_bytes()) if path.exists() else {}
    if summary.get("rounds") != spent:
        summary = {}  # of an earlier end: the run goes on, or was resumed and killed
    epsilons = summary.get("epsilon") or epsilon_rows(
        epsilon_table(plan, spent, too_few_present(plan, rows, spent))
    )
    settings, scored = read_toml(folder / "config.toml"), _scored(rows, summary)
    facts = _facts(plan, settings, scored, epsilons, summary)
    rounds = {"rounds spent": spent, **Counter(row["outcome"] for row in rows)}
    if without := spent - len(rows):
        rounds["spent, without a row"] = without
    note = AS_PLANNED if any("planned" in row for row in epsilons.values()) else ""
    heads, *cells = epsilon_cells(epsilons)
    halting = cells.pop(list(epsilons).index(plan.accountant))
    versions = [f"{name} {version}" for name, version in summary.get("versions", {}).items()]
    if summary:
        versions.insert(0, f"engine {summary['engine']}")
    numbers = [*facts, ("versions", ", ".join(versions)), *origin(read_starts(folder))]
    sections: list[Part] = [
        {"title": "The run in numbers", "page": True, "facts": numbers},
        {"title": "The ε that ends the run", "note": note, "table": [heads, halting]},
        {"title": "Other accountants", "note": _OTHERS, "table": [heads, *cells]},
        *_plots(plan, rows),
        {"title": "Ledger", "note": _SPENT, "facts": list(rounds.items())},
        {"title": "Plan", "facts": list(_in_words(json.loads(plan.to_json())))},
        {"title": "Configuration", "files": [("config.toml", config)]},
    ]
    plain = plain_words(plan, settings, epsilons, summary, spent, scored)
    return render("page.html", folder.resolve().name, _SUBTITLE, sections, plain)


_OTHERS = (
    "Each computes an ε of the same rounds on assumptions of its own, and ends no run. Of the two "
    "sets of data that the homogeneous pair compares, one has the same record for every person. "
    "Real data are not like that: an ε for this pair only promises nothing to real people."
)
_SUBTITLE = "Report of a training run with differential privacy: first in plain words, then in full"
_SPENT = (
    "A round counts as spent from the moment before anybody is asked for a report, whatever "
    "becomes of it."
)


def _facts(
    plan: PrivacyPlan,
    settings: dict[str, Any],
    scored: tuple[str, str],
    epsilons: dict[str, Row],
    summary: Row,
) -> Iterator[tuple[str, str]]:
    """The most important facts of a run first; `summary` is empty if the run has not ended."""
    yield "halting ε", _told(epsilons, plan.accountant)
    least = for_every_pair({name: row["epsilon"] for name, row in epsilons.items()})
    if least is not None and least != plan.accountant:
        yield "least ε for every pair", _told(epsilons, least)
    yield scored
    yield "budget", f"ε ≤ {plan.target_epsilon:g}"
    yield "δ, neighbours", f"{rounded_up(plan.delta)}, {plan.adjacency}"
    yield "end", STOPPED[summary["stopped_by"]] if summary else "not finished when this was made"
    source = f"seed {settings['seed']}: a simulation, which protects nobody"
    if settings["seed"] == "system":
        source = "the operating system"
        if settings["simulation"]["engine"] == "vectorised":
            source += " (the vectorised engine is for experiments: no proof covers its rounding)"
    yield "coins and noise", f"from {source}"
    yield from what_trained(settings).items()


def _scored(rows: list[Row], summary: Row) -> tuple[str, str]:
    """The name of the test score, and the last one as text."""
    evaluated = scores_of(rows)
    score = rows[0]["score"] if rows else "score"
    scored = score_text(score, evaluated[-1][1]) if evaluated else "not evaluated yet"
    if summary and summary[summary["score"]] is None:
        scored = "not a number"
    return f"test {score}", scored


def _plots(plan: PrivacyPlan, rows: list[Row]) -> Iterator[Part]:
    """Plots of the score against ε and of reports and score by round, if there are rounds."""
    if not rows:
        return
    score = rows[0]["score"]
    if scores_of(rows):
        plot = image(plot_score_epsilon, rows, plan)
        alt = f"Test {score} against ε, a line for each accountant, which ends at the ε above."
        yield {"title": f"{score.capitalize()} and ε", "plot": plot, "alt": alt}
    alt = f"Reports and test {score} of {len(rows)} rounds."
    yield {"title": "Round by round", "plot": image(plot_rounds, rows), "alt": alt}


def _told(epsilons: dict[str, dict[str, Any]], accountant: str) -> str:
    """An accountant's ε of `epsilon_rows`: so far, as planned if that differs, for which pairs."""
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
    given = model.get("options", {}).items()
    options = ", ".join(f"{name} = {_plain(value)}" for name, value in given)
    mapped = f"{data['features']} of " if "features" in data else ""
    users = f", {data['users']:,} users" if "users" in data else ""
    ours = ", ".join(
        filter(None, (training["algorithm"], training["optimiser"], _OF_USERS.get(trainer)))
    )
    dealt = f", {data['partition']}" if "partition" in data else ""
    return {
        "data": f"{mapped}{name_of_data(data)}{users}{dealt}",
        "model": model["name"] + (f" ({options})" if options else ""),
        "algorithm": _REFERENCES.get(trainer, ours),
    }


def origin(starts: list[dict[str, str]]) -> list[tuple[str, str]]:
    """The commands, commits and dates of runs or results; "unknown" if none of them has any."""
    command, commit, dates = (
        sorted({each[key] for each in starts} - {""}) for key in ("command", "commit", "date")
    )
    span = " to ".join(dict.fromkeys((*dates[:1], *dates[-1:])))
    told = {"command": "; ".join(command), "commit": "; ".join(commit), "date": span}
    return [(name, text or "unknown") for name, text in told.items()]


def _in_words(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of a plan's keys, and their values, rounded as `protocol.text` says."""
    for key, value in flat(plan).items():
        if value is None:
            continue
        name = key.removeprefix("mechanism.")
        rounded = rounded_down if name == "check_in_rate" else rounded_up
        shown = rounded(value, 6) if isinstance(value, float) else _plain(value)
        yield _WORDS.get(name, name.replace("_", " ")), shown


def _plain(value: Any) -> str:
    """A value of a configuration, without Python's words and signs."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def render(
    template: str, title: str, subtitle: str, sections: list[Part], plain: Row | None = None
) -> str:
    """The page; in HTML, whatever comes from files is escaped. `plain` is for plain_words.html."""
    folder = importlib.resources.files("shufl.results")
    environment = jinja2.Environment(
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
    )
    environment.filters["joined"] = lambda text: re.sub(r"\n(?![-\n])", " ", text)
    version = importlib.metadata.version("shufl")
    return environment.get_template(template).render(
        title=title, subtitle=subtitle, sections=sections, version=version, plain=plain
    )


def image(plot: Callable[..., Any], *drawn: Any) -> str:
    """A plot as a data URL of SVG; `plot` gets the objects to draw, and last a file's path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.svg"
        plot(*drawn, path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
