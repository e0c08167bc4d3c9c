"""What nodes say of themselves before the first round is checked, and decides what is released."""

import pytest
from rounds import make_plan

from server import RoundFailed
from server.rounds import NodeUsers, enough_users, users_of_node, users_present

PLAN = make_plan(
    users=100, check_in_rate=0.5, clip_norm=1.0, noise_multiplier=1.0, rounds=10, delta=1e-3,
    target_epsilon=10.0, minimum_batch=1, least_present=30,
)  # fmt: skip


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
def test_a_node_that_says_no_sensible_number_ends_the_run_in_one_line(said, message):
    with pytest.raises(RoundFailed, match=message):
        users_of_node(said, shufflers=2)


def test_users_are_present_where_their_nodes_answered():
    first, _, third = (NodeUsers(40, 0), NodeUsers(29, 1), NodeUsers(31, 1))
    assert users_present([first, third], 2) == {0: 40, 1: 31}
    assert users_present([], 2) == {0: 0, 1: 0}


def test_enough_is_what_the_halting_accountant_counts_on():
    assert [enough_users(users, PLAN) for users in (0, 29, 30, 100)] == [False, False, True, True]
    alone = PLAN.replace(accountant="local")
    assert [enough_users(users, alone) for users in (0, 1, 29)] == [False, True, True]
