"""The loop over rounds and shufflers: what it releases, spends, destroys, and when it ends.

Faults on real machines are in test_server_faults.py.
"""

import pytest

from client_world import begin_flower_task
from server_world import NODES, PLAN, USERS, Here, Run, SimulatedRun
from shufl.protocol.outcomes import RoundOutcome
from shufl.server import NodeFailed
from shufl.shuffler import ShufflerUnavailable
from shufl.shuffler.record import verify


@pytest.fixture(autouse=True)
def inside_a_task():
    begin_flower_task()


@pytest.fixture
def shufflers():
    with Here() as one, Here() as other:
        yield one, other


def events(shuffler):
    """What the shuffler's public record says, beside how the run was created."""
    return [each["event"] for each in verify(shuffler.store.record(0))[1:]]


def test_a_simulation_releases_every_round_and_ends_the_run_at_the_shuffler(tmp_path, shufflers):
    run = SimulatedRun(tmp_path, shufflers[:1], PLAN.replace(rounds=2))
    ended = run.play(3)
    assert (ended.stopped_by, ended.rounds, run.spent) == ("rounds", 2, [1, 2])
    assert [(row.outcome, row.users_present) for row in run.rows] == [("released", USERS)] * 2
    assert run.steps_are_whole()
    assert events(shufflers[0]) == ["opened", "released"] * 2 + ["ended"]


def test_an_interrupted_run_stays_at_the_shuffler(tmp_path, shufflers):
    run = SimulatedRun(tmp_path, shufflers[:1])
    assert run.play(1).stopped_by == "interrupt"
    assert events(shufflers[0]) == ["opened", "released"]


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


def test_a_round_that_an_interrupt_cuts_short_is_destroyed_as_a_whole(tmp_path, shufflers):
    run, stopped = SimulatedRun(tmp_path, shufflers[:1]), []

    def train(node, deliver):
        stopped.append(node)
        return None if node == NODES else deliver()

    run.network.train, run.is_over = train, lambda rounds: len(stopped) == NODES
    assert run.play(1).stopped_by == "interrupt"
    assert [(row.outcome, row.reports) for row in run.rows] == [("discarded", 0)]
    assert events(shufflers[0]) == ["opened", "discarded"]


def test_an_interrupt_after_all_have_answered_costs_no_round(tmp_path, shufflers):
    run, stopped = SimulatedRun(tmp_path, shufflers[:1]), []

    def train(node, deliver):
        stopped.append(node)
        return deliver()

    run.network.train, run.is_over = train, lambda rounds: len(stopped) == NODES
    assert run.play(1).stopped_by == "interrupt"
    assert [row.outcome for row in run.rows] == ["released"]


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
        if dies and node == NODES:
            shufflers[1].__exit__()
        return None if node in silent else deliver()

    run.network.train = train
    run.play(1, shuffler_seconds=0.1)
    (row,) = run.rows
    assert (row.outcome, row.users_present, row.silent_nodes) == (outcome, present, len(silent))
    assert run.steps_are_whole() and run.spent == [1]
    assert ("released" in events(shufflers[0])) is (outcome == "released" and 1 not in silent)


def test_users_are_counted_on_by_the_shuffler_s_word_on_real_machines_alone(tmp_path, shufflers):
    """A node may have sent and been killed before it answers."""

    def sends_and_is_killed(node, deliver):
        reply = deliver()
        return None if node == 2 else reply

    run = Run(tmp_path, shufflers[:1])
    run.network.train = sends_and_is_killed
    run.play(1)
    assert [(row.users_present, row.silent_nodes) for row in run.rows] == [(USERS, 1)]
