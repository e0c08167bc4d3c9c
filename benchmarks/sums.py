"""A round of many users whose shuffler hands over a sum, beside one that hands over reports.

    python benchmarks/sums.py                     # 10⁶ users on 1 000 nodes, beside 20 000 reports

One process plays all nodes, and another one is the shuffler. Messages are made as nodes make them
(noise of all users, mask, sealed seed), but all updates are zero. Both kinds of rounds have cover,
so all users send. All seconds are measured on this machine, which does everything:

    nodes       to make all messages, and hand them in
    server      to fetch what is released, open it and add it up
    bytes       from the nodes, and to the server
    peak        VmHWM of the shuffler's process
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shufl.accounting import PrivacyPlan
from shufl.protocol import GaussianMechanism
from shufl.protocol.mechanisms import SystemRandomness
from shufl.protocol.mechanisms.summed_reports import masked, new_seed, whole_noise
from shufl.server import Mean, aggregate_reports
from shufl.server.aggregate import aggregate_sum
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    RoundHeader,
    ShufflerProcess,
    Verdict,
    empty_report,
    encode_report,
    generate_key_pair,
    key_digest,
    message_length,
    seal,
    usual_sealing,
)
from shufl.shuffler.wire.node_seeds import seal_seed

RANDOMNESS = SystemRandomness()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=10**6)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--reports", type=int, default=20_000, help="of the other round; 0: none")
    parser.add_argument("--parameters", type=int, default=26_010)
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    rows = [play("sum", options.users, options.nodes, options.parameters)]
    if options.reports:
        rows.append(play("shuffle", options.reports, options.reports, options.parameters))
    for row in rows:
        print(
            f"{row['mixing']:8} {row['users']:8} users: nodes {row['nodes_seconds']:7.1f} s, "
            f"server {row['server_seconds']:6.1f} s, from nodes {row['from_nodes'] / 1e6:9.1f} MB, "
            f"to the server {row['to_server'] / 1e6:8.2f} MB, peak {row['peak_mb']:5.0f} MB"
        )
    if len(rows) == 2:
        for name in ("nodes_seconds", "server_seconds", "from_nodes", "to_server"):
            each = [row[name] / row["users"] for row in rows]
            print(f"{name} a user: {each[1] / each[0]:.3g} times as much by reports")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def play(mixing: str, users: int, nodes: int, dimension: int) -> dict:
    """One round of so many users on as many nodes each."""
    of_sums = mixing == "sum"
    plan = PrivacyPlan(
        users=users,
        check_in_rate=0.1,
        mechanism=GaussianMechanism(noise_multiplier=0.1),
        rounds=1,
        delta=1e-9,
        target_epsilon=1e6,
        minimum_batch=users,
        cover=True,
        mixing=mixing,
        accountant="sum-distributed" if of_sums else "local",
    )
    sealing = usual_sealing(mixing)
    private_key, public_key = generate_key_pair(sealing)
    with (
        ShufflerProcess() as process,
        ControlClient(process.address, process.control) as control,
        IntakeClient(process.address, process.submit) as intake,
    ):
        length = message_length(dimension, mixing, sealing)
        digest = control.create_run("run", plan.to_json().encode(), length)
        nonce = control.open_round("run", 1, "model", public_key)
        header = RoundHeader("run", 1, "model", digest, key_digest(public_key), nonce)
        make = messages if of_sums else reports
        begun = time.perf_counter()
        sent = make(plan, nodes, dimension, public_key, header)
        verdicts = list(intake.submit(header, sent))
        nodes_seconds = time.perf_counter() - begun
        assert set(verdicts) == {Verdict.ACCEPTED}
        assert control.close_round("run", 1).senders == users
        begun, taken = time.perf_counter(), [0]

        def counted() -> Iterator[bytes]:
            for part in control.release("run", 1):
                taken[0] += len(part)
                yield part

        about = private_key, plan, dimension
        if of_sums:
            zeros = np.zeros(dimension)
            aggregate_sum((header, counted()), *about, zeros)
        else:
            aggregate_reports([(header, counted())], *about, Mean(plan, dimension), users)
        status = Path(f"/proc/{process.pid}/status").read_text()
        return {
            "mixing": mixing,
            "users": users,
            "nodes": nodes,
            "parameters": dimension,
            "nodes_seconds": nodes_seconds,
            "server_seconds": time.perf_counter() - begun,
            "from_nodes": length * len(verdicts),
            "to_server": taken[0],
            "peak_mb": int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6,
        }


def messages(
    plan: PrivacyPlan, nodes: int, dimension: int, public_key: bytes, header: RoundHeader
) -> Iterator[tuple[range, bytes]]:
    """What nodes send with sums."""
    for node in range(nodes):
        users = range(node, plan.users, nodes)
        (draws,) = RANDOMNESS.standard_normal(1, np.arange(1), dimension)
        whole, seed = whole_noise(draws, plan.mechanism.noise_multiplier, len(users)), new_seed()
        yield users, masked(whole, seed) + seal_seed(seed, len(users), public_key, header)


def reports(
    plan: PrivacyPlan, nodes: int, dimension: int, public_key: bytes, header: RoundHeader
) -> Iterator[tuple[int, bytes]]:
    """What as many users send with cover, each of a node of its own."""
    zero = np.zeros(dimension)
    coins = RANDOMNESS.check_ins(1, np.arange(nodes), plan.check_in_rate)
    for user, coin in enumerate(coins.tolist()):
        (draws,) = RANDOMNESS.standard_normal(1, np.arange(1), dimension)
        report = encode_report(plan.mechanism.report(zero, draws))
        yield user, seal(report if coin else empty_report(dimension), public_key, header)


if __name__ == "__main__":
    main()
