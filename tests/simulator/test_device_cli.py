"""`shufl device status` on a real ledger."""

import json

from rounds import make_plan
from typer.testing import CliRunner

from clients import load_device
from shuffler import RoundHeader
from simulator.cli.__main__ import app

OWNER = 'ledger = "device.db"\nmost_epsilon = 5.0\ndelta = 1e-5\n'


def run(*arguments):
    return CliRunner().invoke(app, ["device", "status", *map(str, arguments)])


def offer(path, plan, run_id, rounds):
    for number in range(1, rounds + 1):
        header = RoundHeader(run_id, number, "model", plan.digest(), "key")
        load_device(path).offer(header, plan)


def test_the_status_tells_what_was_spent_and_for_whom(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    plan = make_plan(
        users=1000, check_in_rate=0.5, noise_multiplier=1.0, delta=1e-5, rounds=50,
        target_epsilon=50.0, minimum_batch=1, shuffler_blankets=500.0, accountant="blanket",
    )  # fmt: skip
    offer(path, plan, "first", 3)
    offer(path, plan, "second", 2)
    told = json.loads(run(path, "--json").stdout)
    assert [(each["run"], each["rounds"]) for each in told["runs"]] == [("first", 3), ("second", 2)]
    assert {each["plan"] for each in told["runs"]} == {plan.digest()}
    epsilon = [
        plan.make_accountant("blanket").compose(plan.event(), rounds).get_epsilon(1e-5)
        for rounds in (3, 2, 5)
    ]
    assert [each["epsilon"] for each in told["runs"]] == epsilon[:2]
    assert told["epsilon"] == epsilon[2]
    text = run(path).stdout
    assert "first" in text
    assert f"all runs together: {epsilon[2]:.4g} of at most 5" in text


def test_a_ledger_that_is_not_there_is_one_line_and_is_not_made(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    result = run(path)
    assert result.exit_code == 2
    assert "there is no device's ledger" in result.stderr
    assert not (tmp_path / "device.db").exists()
