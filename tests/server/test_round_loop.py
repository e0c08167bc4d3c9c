"""The loop over rounds and shufflers: what it releases, spends, destroys, and when it ends.

Faults on real machines are in test_server_faults.py.
"""

import pytest

from server_world import NODES, PLAN, USERS, Here, Run, SimulatedRun, events
from shufl.protocol.outcomes import RoundOutcome
from shufl.server import NodeFailed
from shufl.shuffler import ShufflerUnavailable


@pytest.fixture
def shufflers():
    with Here() as one, Here() as other:
        yield one, other


def test_a_simulation_releases_every_round_and_ends_the_run_at_the_shuffler(tmp_path, shufflers):
    run = SimulatedRun(tmp_path, shufflers[:1], PLAN.replace(rounds=2))
    ended = run.play(3)
    assert (ended.stopped_by, ended.rounds, run.spent) == ("rounds", 2, [1, 2])
    assert [(row.outcome, row.users_present) for row in run.rows] == [("released", USERS)] * 2
    assert run.steps_are_whole()
    assert events(shufflers[0]) == ["opened", "released"] * 2 + ["ended"]


def test_a_simulated_node_that_does_not_answer_ends_the_run_and_its_round_is_destroyed(
    tmp_path, shufflers
):
    """The others have sent: a mean without the silent node's users would be wrong."""
    run = SimulatedRun(tmp_path, shufflers[:1])
    run.network.train = lambda node, deliver: None if node == 2 else deliver()
    with pytest.raises(NodeFailed, match=r"^round 1, node 1: no answer within 0\.2 s$"):
        run.play(1, round_timeout=0.2)
    assert (run.spent, run.rows) == ([1], [])
    assert events(shufflers[0]) == ["opened", "discarded"]


@pytest.mark.parametrize(("answered", "outcome"), [(False, "discarded"), (True, "released")])
def test_an_interrupt_destroys_the_round_that_it_cuts_short_and_no_other(
    tmp_path, shufflers, answered, outcome
):
    """It comes when the last node was asked, before or after that one has answered."""
    run, asked = SimulatedRun(tmp_path, shufflers[:1]), []

    def train(node, deliver):
        asked.append(node)
        return deliver() if answered or node < NODES else None

    run.network.train, run.is_over = train, lambda rounds: len(asked) == NODES
    assert run.play(1).stopped_by == "interrupt"
    assert [row.outcome for row in run.rows] == [outcome]
    assert (run.rows[0].reports > 0) is answered
    assert events(shufflers[0]) == ["opened", outcome]


def test_a_simulation_whose_shuffler_is_gone_waits_for_no_node(tmp_path):
    with Here() as gone:
        run = SimulatedRun(tmp_path, [gone])
    run.network.here.clear()
    with pytest.raises(ShufflerUnavailable):
        run.play(1, shufflers_gone=lambda: True)
    assert run.spent == []


@pytest.mark.parametrize(
    ("silent", "dies", "outcome", "present"),
    [
        (set(), True, RoundOutcome.RELEASED, 8),
        ({2}, False, RoundOutcome.RELEASED, 8),
        ({2}, True, RoundOutcome.RELEASED, 8),
        ({1, 3}, False, RoundOutcome.RELEASED, 4),
        ({1, 3}, True, RoundOutcome.LOST, 0),
        ({1, 2, 3}, False, RoundOutcome.BELOW_MINIMUM, 0),
    ],
)
def test_a_round_is_released_if_one_shuffler_releases_its_batch(
    tmp_path, shufflers, silent, dies, outcome, present
):
    """Nodes 1 and 3 report to the first of two shufflers, node 2 to the other, which may die."""
    run = Run(tmp_path, shufflers)

    def train(node, deliver):
        reply = None if node in silent else deliver()
        if dies and node == NODES:
            shufflers[1].__exit__()
        return reply

    run.network.train = train
    run.play(1, shuffler_seconds=0.1)
    (row,) = run.rows
    assert (row.outcome, row.users_present, row.silent_nodes) == (outcome, present, len(silent))
    assert run.steps_are_whole() and run.spent == [1]
    assert ("released" in events(shufflers[0])) is (outcome == "released" and 1 not in silent)
