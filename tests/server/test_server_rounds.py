"""What nodes say of themselves before the first round is checked, and decides what is released."""

import pytest

from rounds import make_plan
from shufl.protocol import AgreedNode
from shufl.server.connected_nodes import NodeState, check_agreed, read_node
from shufl.server.rounds import errors_told

PLAN = make_plan(users=100, check_in_rate=0.5, noise_multiplier=1.0, least_present=30)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "for how many users"),
        ({"number": 0, "users": 5}, "for how many users"),
        ({"number": 0, "users": 0, "shuffler": 0}, "for how many users"),
        ({"number": 0, "users": -3, "shuffler": 0}, "for how many users"),
        ({"number": 0, "users": 5.0, "shuffler": 0}, "for how many users"),
        ({"number": 0, "users": True, "shuffler": 0}, "for how many users"),
        ({"number": 0, "users": 5, "shuffler": 2}, "must report to shuffler 0 of 2, it said 2"),
        ({"number": 3, "users": 5, "shuffler": 0}, "must report to shuffler 1 of 2, it said 0"),
    ],
)
def test_a_node_that_says_no_sensible_number_is_refused_in_one_line(said, message):
    with pytest.raises(ValueError, match=message):
        read_node(said, 2, "shuffle")


def test_a_node_that_says_another_thing_than_agreed_is_refused_in_one_line():
    agreed = {
        0: AgreedNode("ward-1", 300, 11),
        1: AgreedNode("ward-2", 20, None),
        2: AgreedNode("ward-3", 20, 33),
    }
    for node, number, users in ((11, 0, 300), (33, 2, 20)):
        check_agreed(node, NodeState(number, users, 0), agreed)
    for node, number, users, message in (
        (33, 2, 21, "^it says that it speaks for 21 users, 20 were agreed$"),
        (11, 0, 299, "^it says that it speaks for 299 users, 300 were agreed$"),
        (11, 3, 20, "^it says that it is number 3, no such node was agreed$"),
        (11, 2, 20, "^it says that it is ward-3, which is number 33 at Flower$"),
        (22, 1, 20, r"^it says that it is ward-2, which is not registered \(shufl register\) at"),
    ):
        with pytest.raises(ValueError, match=message):
            check_agreed(node, NodeState(number, users, 0), agreed)


def test_a_reason_is_one_line_however_many_nodes_have_it():
    errors = dict.fromkeys(range(300), "round 3, no answer within 20 s") | {7: "it failed"}
    names = ", ".join(f"ward-{node}" for node in range(5))
    assert errors_told(3, errors, lambda node: f"ward-{node}") == [
        f"round 3, {names} and 294 more: no answer within 20 s",
        "round 3, ward-7: it failed",
    ]


def test_enough_is_what_the_halting_accountant_counts_on():
    assert [PLAN.enough_present(users) for users in (0, 29, 30, 100)] == [False, False, True, True]
    alone = PLAN.replace(accountant="local")
    assert [alone.enough_present(users) for users in (0, 1, 29)] == [False, True, True]
