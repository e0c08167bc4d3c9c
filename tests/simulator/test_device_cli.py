"""`shufl device status` on a real ledger."""

import math

from rounds import make_plan
from run_world import invoke, refused, told
from shufl.clients import load_device
from shufl.results.tables import epsilon_text
from shufl.shuffler import RoundHeader

OWNER = 'ledger = "device.db"\nmost_epsilon = 50.0\ndelta = 1e-5\n'


def offer(path, plan, run_id, rounds):
    for number in range(1, rounds + 1):
        header = RoundHeader(run_id, number, "model", plan.digest(), "key")
        load_device(path).offer(header, plan, 10)


def test_the_status_tells_what_was_spent_and_for_whom(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    plan = make_plan(
        users=1000, check_in_rate=0.5, noise_multiplier=1.0, delta=1e-5, rounds=50,
        target_epsilon=50.0, minimum_batch=1, shuffler_blankets=500.0, accountant="blanket",
    )  # fmt: skip
    offer(path, plan, "first", 3)
    offer(path, plan, "second", 2)
    found = told("device status", path)
    runs = [(each["run"], each["rounds"], each["allotted"]) for each in found["runs"]]
    assert runs == [("first", 3, 10), ("second", 2, 10)]
    assert {each["plan"] for each in found["runs"]} == {plan.digest()}
    charges = [
        plan.make_accountant("blanket")
        .compose(plan.event(), 10)
        .get_epsilon(1e-5 * 6 / (math.pi * number) ** 2)
        for number in (1, 2)
    ]
    assert [each["epsilon"] for each in found["runs"]] == charges
    assert found["epsilon"] == sum(charges)
    text = invoke("device status", path).stdout
    assert "first" in text
    assert f"all runs together: {epsilon_text(sum(charges))} of at most 50" in text


def test_a_ledger_that_is_not_there_is_one_line_and_is_not_made(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    assert "cannot be used: unable to open" in refused("device status", path)
    assert not (tmp_path / "device.db").exists()
