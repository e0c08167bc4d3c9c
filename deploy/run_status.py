"""`shufl status`: how far a run is, which nodes are silent, and whether the shufflers are well."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from shufl.accounting import Ledger, LedgerError, rounds_within_budget
from shufl.deploy.server_site import OUTCOME_FILE, WAITING_FILE, ServerSite, read_json
from shufl.protocol.outcomes import BEGUN, NODES_FILE
from shufl.protocol.validation import ConfigError
from shufl.results.run_folder import read_run
from shufl.results.tables import last_doubt, scores_of
from shufl.shuffler import Credentials
from shufl.shuffler.wire.connection import Connection
from shufl.shuffler.wire.errors import ShufflerError

_LATELY = 5  # rounds whose time says how long the rest will take
_SECONDS = 5.0  # for a shuffler to answer


@dataclass(frozen=True)
class Status:
    """What is known of a run from its folder, while it goes on or later.

    Attributes:
        state: `running`; `ended`; or `interrupted`, and can be resumed.
        why: what stopped it, or the error that ended it; empty: it runs, or was killed.
        rounds: spent, by the ledger.
        allowed: rounds that the budget allows.
        epsilon: spent, by the halting accountant.
        target: the budget.
        accountant: the halting one.
        score_name, score: on the test data, the last that was measured; None: none was.
        seconds_left: by how far apart the last rounds began, mostly; None: it does not run, or has
            no round yet.
        waits_for, waits_seconds: what keeps it from a round, and for how long; empty: nothing.
        nodes: of each node its name, number, Flower's number, users, the fingerprint and the last
            day of its certificate, for how many seconds it has been silent (None: it never came),
            and why.
        doubt: what the operator should look into; empty: nothing.
        shufflers: of each its address, and what is wrong; empty: it is well.
    """

    folder: str
    state: str
    why: str
    rounds: int
    allowed: int
    epsilon: float
    target: float
    accountant: str
    score_name: str
    score: float | None
    seconds_left: float | None
    waits_for: str
    waits_seconds: float
    nodes: list[dict[str, Any]]
    shufflers: dict[str, str]
    doubt: str


def status_of(folder: Path, site: ServerSite | None) -> Status:
    """Looks, and changes nothing. Without the server's file, `site`, no shuffler is asked."""
    try:
        ledger, rows = read_run(folder)
    except LedgerError as error:
        raise ConfigError(str(error)) from error
    plan, spent = ledger.plan, len(ledger.entries)
    allowed, running = rounds_within_budget(plan), Ledger.is_held(folder / "ledger.jsonl")
    end: dict[str, Any] = {}
    for name in () if running else ("summary.json", OUTCOME_FILE):
        end |= read_json(folder / name, {})
    why = str(end.get("error") or end.get("stopped_by", ""))
    state = "ended" if why in ("budget", "rounds") else "interrupted"
    begun = [each.note[BEGUN] for each in ledger.entries[-_LATELY - 1 :] if BEGUN in each.note]
    apart = [after - before for before, after in pairwise(begun)]
    lately = apart or [row["seconds"] for row in rows[-_LATELY:]]
    left = median(lately) * (allowed - spent) if running and lately else None
    now = time.time()
    waits = read_json(folder / WAITING_FILE, {}) if running else {}
    return Status(
        folder=str(folder),
        state="running" if running else state,
        why=why,
        rounds=spent,
        allowed=allowed,
        epsilon=plan.epsilon(rounds=spent),
        target=plan.target_epsilon,
        accountant=plan.accountant,
        score_name=rows[-1]["score"] if rows else "",
        score=next((score for _, score in reversed(scores_of(rows))), None),
        seconds_left=left,
        waits_for=waits.get("for", ""),
        waits_seconds=now - waits["since"] if waits else 0.0,
        nodes=[_node(node, now, site) for node in read_json(folder / NODES_FILE, [])],
        shufflers={each: health_of(each, site.credentials) for each in site.shufflers}
        if site
        else {},
        doubt=last_doubt(rows),
    )


def newest_run(runs: Path) -> Path | None:
    """The run folder that was made last; None: there is none."""
    found = sorted(runs.glob("*/ledger.jsonl"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _node(node: dict[str, Any], now: float, site: ServerSite | None) -> dict[str, Any]:
    silent = None if node["heard"] is None else now - node["heard"]
    told = {key: node[key] for key in ("name", "number", "flower", "users", "trouble")}
    certificates = {each.name: each for each in site.entries} if site else {}
    about = {"certificate": "", "until": ""}
    if node["name"] in certificates:
        about = certificates[node["name"]].model_dump(include={*about})
    return told | about | {"silent_seconds": silent if node["trouble"] else 0.0}


def health_of(address: str, credentials: Credentials) -> str:
    """What is wrong with a shuffler, asked over the network; empty: it serves."""
    try:
        ask_health(address, credentials)
    except ShufflerError as error:
        return str(error)
    return ""


def ask_health(address: str, credentials: Credentials) -> None:
    """Returns if a shuffler serves.

    Raises:
        ShufflerRefused: it takes no calls with this certificate, or its disk is full.
        ShufflerError: it does not answer.
    """
    with Connection(address, credentials, _SECONDS) as there, there.errors():
        stub = health_pb2_grpc.HealthStub(there.connected())
        stub.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
