"""What nodes say of themselves before the first round is checked, and decides what is released."""

from types import SimpleNamespace

import pytest

from accounting import PrivacyPlan
from server import RoundFailed, RoundLoop
from server.broadcast import Acknowledgements
from server.rounds import _Node


@pytest.fixture
def loop():
    """Two shufflers, and a plan for at least 30 of 100 users at each."""
    loop = RoundLoop.__new__(RoundLoop)
    plan = PrivacyPlan(
        users=100,
        check_in_rate=0.5,
        clip_norm=1.0,
        noise_multiplier=1.0,
        rounds=10,
        delta=1e-3,
        target_epsilon=10.0,
        minimum_batch=1,
        least_present=30,
    )
    loop.settings = SimpleNamespace(plan=plan)
    loop._shufflers = [object(), object()]
    loop._nodes = {7: _Node(40, 0), 8: _Node(29, 1), 9: _Node(31, 1)}
    return loop


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "for how many users"),
        ({"users": 5}, "for how many users"),
        ({"users": 0, "shuffler": 0}, "for how many users"),
        ({"users": -3, "shuffler": 0}, "for how many users"),
        ({"users": 5.0, "shuffler": 0}, "for how many users"),
        ({"users": True, "shuffler": 0}, "for how many users"),
        ({"users": 5, "shuffler": 2}, "shuffler 2 of 2"),
        ({"users": 5, "shuffler": -1}, "shuffler -1 of 2"),
    ],
)
def test_a_node_that_says_no_sensible_number_ends_the_run_in_one_line(loop, said, message):
    with pytest.raises(RoundFailed, match=message):
        loop._node(said)


def test_users_are_present_where_their_nodes_answered(loop):
    answered = Acknowledgements({7: {}, 9: {}}, [])
    assert loop._users_present(answered) == {0: 40, 1: 31}
    assert loop._users_present(Acknowledgements({}, [])) == {0: 0, 1: 0}


def test_enough_is_what_the_halting_accountant_counts_on(loop):
    assert [loop._enough(users) for users in (0, 29, 30, 100)] == [False, False, True, True]
    plan = PrivacyPlan(**{**vars(loop.settings.plan), "accountant": "local"})
    loop.settings.plan = plan
    assert [loop._enough(users) for users in (0, 1, 29)] == [False, True, True]
