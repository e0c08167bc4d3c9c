"""What the first page of a report says; plain_words.html has its words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shufl.accounting import ACCOUNTANTS, PrivacyPlan
from shufl.protocol.events import Summed
from shufl.protocol.text import rounded_down, rounded_up
from shufl.results.tables import epsilon_text, for_every_pair, score_text

Row = dict[str, Any]
"""A row of metrics.jsonl, an accountant's of `epsilon_rows`, or a summary."""


def plain_words(
    plan: PrivacyPlan,
    settings: dict[str, Any],
    epsilons: dict[str, Row],
    summary: Row,
    rounds: int,
    scored: tuple[str, str],
) -> dict[str, Any]:
    """What the first page of a run says.

    Args:
        plan: of the run.
        settings: its configuration.
        epsilons: each accountant's row of `epsilon_rows`.
        summary: of the run; empty before its end.
        rounds: how many are spent.
        scored: the name of the test score, and what it came to.
    """
    # ε of all rounds that plan and budget allow holds whoever stopped the run, and why.
    planned = {name: row.get("planned", row["epsilon"]) for name, row in epsilons.items()}
    halting: str = plan.accountant
    safe = halting
    if ACCOUNTANTS[halting].holds_for != "every pair":
        safe = for_every_pair(planned) or "local"
    constant, records = summary.get("constant"), summary.get("records")
    # Real devices have no seed, and their records are not counted.
    unseeded = settings["seed"] == "system"
    real = unseeded and (records is None if "records" in summary else plan.window is not None)
    name, score = scored
    by_allocation = plan.participation == "allocation"
    ends = {halting: "ε, which ends the run", safe: "ε for every person"}
    if halting == safe:
        ends = {safe: "ε for every person, which ends the run"}
    return stated(settings, safe, planned[safe], plan.delta, plan.adjacency) | {
        "model": settings["model"]["name"],
        "data": name_of_data(settings["data"]),
        "users": f"{plan.users:,}",
        "records": f"{records:,}" if records and not unseeded else "",
        "rounds": f"{rounds:,}",
        "every": plan.every if by_allocation else 0,
        "chance": rounded_down(100 * plan.check_in_rate, 3) if plan.check_in_rate < 1 else "",
        "real": real,
        "machines": plan.window is not None and real,
        "own_noise": plan.mechanism.is_private,
        "central": plan.central_noise > 0,
        "dealt": settings["data"].get("partition") != "natural",
        "claims": [
            (head, f"{epsilon_text(planned[by])} by {by}" + _PLANNED * ("planned" in epsilons[by]))
            for by, head in ends.items()
        ],
        "special": [_claim(halting, planned[halting], plan.delta)] * (halting != safe),
        "least_present": f"{plan.least_present:,}",
        "test_records": f"{summary['test_records']:,}" if "test_records" in summary else "",
        "score": name,
        "scores": [("this model", score)],
        "constant": "" if constant is None else score_text(summary["score"], constant),
    }


_PLANNED = ", for all planned rounds"


def stated(
    settings: dict[str, Any], accountant: str, epsilon: float | None, delta: float, adjacency: str
) -> dict[str, Any]:
    """What runs and grids state alike, of an ε that holds for every pair."""
    about: dict[str, Any] = settings.get("about", {})
    return about | {
        "seeded": settings["seed"] != "system",
        "safe": _claim(accountant, epsilon, delta),
        "trust": ACCOUNTANTS[accountant],
        "sums": ACCOUNTANTS[accountant].round_kinds == (Summed,),
        "delta": f"1 in {math.floor(float(rounded_down(1 / delta, 6))):,}",
        "zero_out": adjacency == "zero-out",
    }


def name_of_data(data: dict[str, Any]) -> str:
    """The dataset's name, or its file's, of a configuration's section `data`."""
    dataset = data["dataset"]
    return Path(dataset["file"]).name if isinstance(dataset, dict) else str(dataset)


def _claim(accountant: str, epsilon: float | None, delta: float) -> dict[str, str]:
    """How likely a guess is if it is true, and how likely it is true, at most.

    A guess has a probability of at most e^ε q + δ if it is true, and of q if it is false. Of two
    possibilities that are equally likely at first, the right one is then guessed with a probability
    of at most (e^ε + δ) / (e^ε + 1). Beyond ε = 7 that may be 99.9 %, and nothing is told.
    """
    if epsilon is None or epsilon > 7:
        return {"name": accountant, "odds": ""}
    odds = math.exp(epsilon)
    sure = math.ceil(1000 * (odds + delta) / (odds + 1)) / 10
    return {"name": accountant, "odds": rounded_up(odds), "sure": f"{sure:g}"}
