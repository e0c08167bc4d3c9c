"""How long the accountants take, beside dp_accounting and the published algorithm for Theorem 1.

Each row of the table is measured in a process of its own: every accountant of the registry at n
users and at 10⁹ users (the first answer, and the guard's question before each later round);
dp_accounting's Rényi and PLD accountants of the central subsampled Gaussian; and, order by order,
the published algorithm, which enumerates integer partitions in exponential time, beside ours.
Imports are counted in peak memory only.

    python benchmarks/accounting_speed.py
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import dp_accounting
from rich.table import Table

from shufl import accounting, protocol
from shufl.accounting.numerics import moments
from shufl.accounting.numerics import renyi_divergence as rdp_bounds
from shufl.protocol.console import Console
from shufl.results.tables import epsilon_text

RATE, NOISE, SIGMA = 0.1, 5.0, 5.0
MANY = 10**9


def an_event(accountant: Any, users: int) -> Any:
    """A check-in round the accountant prices: without blankets, or one for five reports.

    None if it prices no check-in round.
    """
    for blankets in (0.0, min(0.2 * RATE * users, 1e7)):
        mechanism = protocol.GaussianMechanism(noise_multiplier=NOISE)
        event = protocol.Shuffled(users, protocol.CheckIn(RATE), mechanism, blankets)
        if accountant.supports(event):
            return event
    return None


def accountant_row(name: str, users: int, rounds: int, guarded: int) -> dict[str, Any]:
    """The first ε after `rounds`, then a guard in a training loop of `guarded` rounds."""
    adjacency = "zero-out"
    accountant = accounting.make_accountant(name, adjacency)
    event = an_event(accountant, users)
    delta = 1.0 / users
    started = time.perf_counter()
    epsilon = accountant.epsilon_after(event, delta, rounds)
    first = time.perf_counter() - started
    plan = accounting.PrivacyPlan(
        users=users,
        check_in_rate=RATE,
        mechanism=event.mechanism,
        rounds=guarded + 1,
        delta=delta,
        target_epsilon=1e300,
        minimum_batch=1,
        adjacency=adjacency,
        shuffler_blankets=event.blankets,
        accountant=name,
    )
    budget = accounting.PrivacyBudget(plan)
    budget.spend()
    times = []
    for _ in range(guarded):
        started = time.perf_counter()
        budget.spend()
        times.append(time.perf_counter() - started)
    return {
        "epsilon": epsilon,
        "seconds": first,
        "mean": sum(times) / len(times),
        "worst": max(times),
    }


def peer_row(kind: str, users: int, rounds: int) -> dict[str, Any]:
    """dp_accounting on the central subsampled Gaussian of the same rate and noise."""
    event = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(NOISE))
    accountants: dict[str, Any] = {
        "dp_accounting RDP": dp_accounting.rdp.RdpAccountant,
        "dp_accounting PLD": dp_accounting.pld.PLDAccountant,
    }
    started = time.perf_counter()
    accountant = accountants[kind]().compose(event, rounds)
    epsilon = accountant.get_epsilon(1.0 / users)
    return {"epsilon": epsilon, "seconds": time.perf_counter() - started}


def partitions(total: int) -> Iterator[list[int]]:
    """The integer partitions of `total`, parts falling."""
    parts = [total]
    while parts:
        yield parts
        ones = 0
        while parts and parts[-1] == 1:
            parts.pop()
            ones += 1
        if not parts:
            return
        part = parts.pop() - 1
        left = ones + 1
        parts.append(part)
        while left > part:
            parts.append(part)
            left -= part
        if left:
            parts.append(left)


def enumerated_log_moment(users: int, sigma: float, order: int) -> float:
    """log E[Ȳ_n^λ], n >= λ, as published: over partitions of λ, each with its multinomials."""
    log_fact = [math.lgamma(k + 1) for k in range(order + 1)]
    falling = [0.0]
    for k in range(order):
        falling.append(falling[-1] + math.log1p(-k / users))
    excess = []
    for parts in partitions(order):
        term = log_fact[order] + falling[len(parts)] - (order - len(parts)) * math.log(users)
        run = 0
        for at, size in enumerate(parts):
            term += size * (size - 1) / (2 * sigma * sigma) - log_fact[size]
            run += 1
            if at + 1 == len(parts) or parts[at + 1] != size:
                term -= log_fact[run]
                run = 0
        excess.append(math.exp(term))
    return math.log1p(math.fsum([*excess, -1.0]))


def partition_row(order: int, users: int) -> dict[str, Any]:
    """Theorem 1 at one order by enumeration, and by us (every order up to it)."""
    theirs = best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        published = enumerated_log_moment(users, SIGMA, order)
        theirs = min(theirs, time.perf_counter() - started)
    for _ in range(5):
        moments.log_cumulants.cache_clear()
        started = time.perf_counter()
        ours = float(rdp_bounds.forward_moments(users, users, 1.0, SIGMA, order)[order])
        best = min(best, time.perf_counter() - started)
    if not math.isclose(published, ours, rel_tol=1e-9, abs_tol=1e-13):
        raise ArithmeticError(f"order {order}: {published!r} published, {ours!r} here")
    return {"epsilon": ours / (order - 1), "seconds": best, "published": theirs}


def measure(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    kind, _, value = row.rpartition(":")
    if kind == "import":
        result: dict[str, Any] = {}
    elif kind == "partitions":
        result = partition_row(int(value), arguments.users)
    elif kind.startswith("dp_accounting"):
        result = peer_row(kind, int(value), arguments.rounds)
    else:
        result = accountant_row(kind, int(value), arguments.rounds, arguments.guarded)
    # Kibibytes on Linux, bytes on macOS.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return result | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}


def all_rows(arguments: argparse.Namespace) -> list[str]:
    """The rows asked for, by name."""
    sizes = (arguments.users, MANY)
    rows = ["import:0"]
    for name in accounting.ACCOUNTANTS:
        if an_event(accounting.make_accountant(name, "zero-out"), MANY) is not None:
            rows += [f"{name}:{users}" for users in sizes]
    rows += [f"dp_accounting {kind}:{arguments.users}" for kind in ("RDP", "PLD")]
    rows += [f"partitions:{order}" for order in range(10, arguments.order + 1, 10)]
    chosen = arguments.only.split(",") if arguments.only else None
    return [row for row in rows if chosen is None or row.rpartition(":")[0] in chosen]


def shown(name: str, result: dict[str, Any]) -> list[str]:
    """A row's cells."""

    def time_of(key: str) -> str:
        return f"{1e3 * result[key]:.3g} ms" if key in result else ""

    kind, _, value = name.rpartition(":")
    label = {"import": "import shufl.accounting", "partitions": f"Theorem 1, order {value}"}.get(
        kind, f"{kind}, n = {int(value):.6g}"
    )
    ratio = f"{result['published'] / result['seconds']:.3g}" if "published" in result else ""
    epsilon = epsilon_text(result["epsilon"]) if "epsilon" in result else ""
    cells = [time_of(key) for key in ("seconds", "mean", "worst", "published")]
    return [label, epsilon, *cells, ratio, f"{result['mib']:.0f}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5540, help="T of the first answer")
    parser.add_argument("--guarded", type=int, default=3000, help="rounds of the training loop")
    parser.add_argument("--order", type=int, default=40, help="highest order to enumerate")
    parser.add_argument("--only", help="rows, by name: theorem3,partitions")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(arguments.row, arguments)))
        return
    table = Table(
        title=f"γ = {RATE}, z = {NOISE:g}, T = {arguments.rounds}, δ = 1/n; a guard's check over "
        f"{arguments.guarded} rounds"
    )
    for column in (
        "", "ε (or ε(λ))", "first answer", "check, mean", "check, worst", "by partitions",
        "ratio", "peak MiB",
    ):  # fmt: skip
        table.add_column(column, justify="right" if column else "left")
    options = [
        f"--{key}={getattr(arguments, key)}" for key in ("users", "rounds", "guarded", "order")
    ]
    for row in all_rows(arguments):
        command = [sys.executable, __file__, f"--row={row}", *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        table.add_row(*shown(row, json.loads(done.stdout)))
    Console().print(table)


if __name__ == "__main__":
    main()
