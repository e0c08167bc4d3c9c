"""A server that asks for less privacy than the shuffler's operator allows."""

import pytest

import shuffler_world
from shuffler_world import PUBLIC_KEY, ShufflerHere, refusal
from shufl.shuffler import ControlClient, Refusal, ShufflerRefused, sealed_length
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority

FLOOR = {"least_blankets": 5.0, "least_batch": 20, "most_rounds": 3}
LENGTH = sealed_length(20)


def plan(**changes):
    """One that is exactly at the floor."""
    at_the_floor = {"minimum_batch": 20, "shuffler_blankets": 5.0, "rounds": 3}
    return shuffler_world.plan(50, **at_the_floor | changes)


@pytest.fixture(scope="module")
def control():
    with (
        ShufflerHere(floor=FLOOR) as process,
        ControlClient(process.address, process.control) as client,
    ):
        yield client


def words_of_refusal(call, *arguments):
    with pytest.raises(ShufflerRefused) as refused:
        call(*arguments)
    assert refused.value.reason is Refusal.BELOW_FLOOR
    return refused.value.detail


@pytest.mark.parametrize(
    ("less", "words"),
    [
        ({"shuffler_blankets": 4.9}, "has least_blankets = 5, the plan has 4.9"),
        ({"shuffler_blankets": 0.0}, "has least_blankets = 5, the plan has 0"),
        ({"minimum_batch": 19}, "has least_batch = 20, the plan's minimum batch is 19"),
        ({"rounds": 4}, "has most_rounds = 3, the plan has 4"),
    ],
)
def test_a_plan_below_the_operator_s_floor_makes_no_run(control, less, words):
    assert words_of_refusal(control.create_run, "less", plan(**less), LENGTH).endswith(words)
    assert refusal(control.open_round, "less", 1, "m", PUBLIC_KEY) is Refusal.UNKNOWN_RUN


def test_a_run_has_no_more_rounds_than_the_floor_allows(control):
    run = "rounds"
    control.create_run(run, plan(), LENGTH)
    for beyond in (0, 4, 2**62):
        words = words_of_refusal(control.open_round, run, beyond, "m", PUBLIC_KEY)
        assert words.endswith(f"rounds count from 1, this one is {beyond}")
    for round in (1, 2, 3):
        control.open_round(run, round, "m", PUBLIC_KEY)
        control.end_round(run, round)
    words_of_refusal(control.open_round, run, 4, "m", PUBLIC_KEY)


def test_a_run_that_is_older_than_the_floor_opens_no_more_rounds(tmp_path):
    authority = Authority.create()
    server = authority.issue(Role.SERVER, "server")
    directory = tmp_path / "directory"
    with (
        ShufflerHere(directory, authority=authority) as process,
        ControlClient(process.address, server) as client,
    ):
        client.create_run("run", plan(minimum_batch=1), LENGTH)
        client.open_round("run", 1, "m", PUBLIC_KEY)
    with (
        ShufflerHere(directory, authority=authority, floor=FLOOR) as process,
        ControlClient(process.address, server) as client,
    ):
        words = words_of_refusal(client.open_round, "run", 2, "m", PUBLIC_KEY)
        assert "least_batch = 20" in words
        assert "least_batch = 20" in words_of_refusal(
            client.create_run, "run", plan(minimum_batch=1), LENGTH
        )
