"""What is recorded of rounds, runs and nodes. Programs that only read it load no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

StoppedBy = Literal["budget", "rounds", "on_round", "interrupt"]

NODES_FILE = "nodes.json"
"""In a run folder: what the server knows of every node, after every round and while it waits."""

BEGUN = "begun"
"""In a round's line of a ledger that no seed reproduces: when it began, by `time.time`."""


class RoundOutcome(StrEnum):
    """How a round ended.

    At one shuffler a round ends in one of these ways; a run's round is released if one shuffler has
    released its batch.

    Attributes:
        RELEASED: the server was given the batch.
        BELOW_MINIMUM: the batch held too few reports and was destroyed unseen.
        DISCARDED: the batch was destroyed unseen: fewer users were present than ε assumes, or the
            server did not want it, or never fetched it.
        LOST: the shuffler was away, or had lost the batch.
    """

    RELEASED = "released"
    BELOW_MINIMUM = "below-minimum"
    DISCARDED = "discarded"
    LOST = "lost"


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
        outcome: released if one shuffler has released its batch; the round is spent in every case.
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
        doubt: what the operator should look into (`server.plausible_counts`); mostly nothing.
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
