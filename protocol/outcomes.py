"""What is told of rounds, runs and nodes; it needs no torch, as those who only read it do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

RoundOutcome = Literal["released", "below-minimum", "discarded", "lost"]
Schedule = Literal["constant", "linear", "cosine"]
StoppedBy = Literal["budget", "rounds", "on_round", "interrupt"]

NODES_FILE = "nodes.json"
"""In a run folder: what the server knows of every node, after every round and while it waits."""


class AgreedNode(NamedTuple):
    """What was agreed with a node before the run.

    Attributes:
        name: the node's.
        users: for how many it speaks.
        flower: Flower's number of it; None: it is not registered.
    """

    name: str
    users: int
    flower: int | None


@dataclass(frozen=True)
class RoundRecord:
    """What a finished round tells its observers.

    Attributes:
        round: from 1.
        epsilon: spent so far under the halting accountant, this round included.
        outcome: `released`, by one shuffler at least; `below-minimum`: the shufflers held too few
            reports; `discarded`: fewer users were present than epsilon assumes, and the batches
            were destroyed unseen; `lost`: a shuffler was away, or had lost its batch. The round is
            spent in every case.
        users_present: users who sent, where a shuffler's batch was released: to such shufflers. In
            a simulation, users of the nodes that answered.
        smallest_crowd: fewest of them at one shuffler whose batch could be fetched, also where it
            broke off; 0 if none could.
        reports: reports aggregated, blankets among them; 0 when nothing was released.
        rejected: released reports that did not open, or that no honest client could have sent.
        reasons: how many of them for which reason.
        silent_nodes: nodes that did not acknowledge in time or answered with an error.
        score: the name of the metric that stands for the run.
        metrics: numbers of the test data by name; the score and `loss` are None in rounds without
            evaluation.
        seconds: wall-clock time of the round.
        doubt: what the operator should look into, in one line (`server.counts`); mostly nothing.
    """

    round: int
    epsilon: float
    outcome: RoundOutcome
    users_present: int
    smallest_crowd: int
    reports: int
    rejected: int
    reasons: dict[str, int]
    silent_nodes: int
    score: str
    metrics: dict[str, float | None]
    seconds: float
    doubt: str = ""
