"""A deployment on loopback whose processes are killed one after the other."""

import re

import pytest

from deployment_world import SUMS, World
from run_world import LIMIT
from shufl.accounting import rounds_within_budget

PRIVACY = {  # allows eight rounds
    "target_epsilon": 1.25,
    "check_in_rate": 0.5,
    "noise_multiplier": 0.8,
    "shuffler_blankets": 200.0,
}


OF_SUMS = SUMS | {"target_epsilon": 1.25, "check_in_rate": 0.5, "central_noise": 8.9}


@pytest.mark.nightly
@pytest.mark.parametrize("privacy", [PRIVACY, OF_SUMS], ids=["reports", "sums"])
def test_a_deployment_survives_kills_and_ends_with_the_ledger_that_its_plan_predicts(
    tmp_path, privacy
):
    """A node, a shuffler, the ServerApp and the SuperLink are killed, one after the other."""
    with World(
        tmp_path, nodes=2, rounds=1000, shufflers=2, users=200, round_timeout=LIMIT, privacy=privacy
    ) as world:
        world.run()
        world.wait_until(lambda: len(world.rounds_offered("ward-2")) >= 1, "ward-2 to take part")
        world.kill("ward-2")
        last = world.rounds_offered("ward-2")[-1]
        world.kill_process("shuffler-1", "shuffler")
        world.wait_for_round(last + 2)
        assert all(row["users_present"] <= 200 for row in world.rows if row["round"] > last)
        before = len(world.rounds_spent)
        status = world.status()
        assert (status["state"], status["allowed"], status["seconds_left"] > 0) == (
            ("running", rounds_within_budget(world.plan), True)
        )
        assert before <= status["rounds"] <= len(world.rounds_spent)
        silent = {node["name"]: node["silent_seconds"] for node in status["nodes"]}
        assert silent["ward-2"] > 0
        assert set(status["shufflers"].values()) == {""}
        world.start_node("ward-2")

        world.kill_server_app()
        code, _, err = world.finish()
        assert code == 1
        assert re.fullmatch(r"error: .*--resume .* goes on with it\n", err), err
        world.resume()

        world.wait_for_round(last + 3)
        world.kill_process("server", "superlink")
        code, _, err = world.finish()
        assert (code, len(err.splitlines())) == (1, 1), err
        world.wait_for_superlink()
        world.resume()
        code, out, err = world.finish()
        assert (code, err) == (0, ""), world.tell()

        plan, rounds = world.plan, rounds_within_budget(world.plan)
        assert world.rounds_spent == list(range(1, rounds + 1))
        ended = [row["round"] for row in world.rows if row["outcome"] != "lost"]
        assert len(ended) == len(set(ended)) >= rounds - 4  # what was under way was lost
        assert world.rows[-1]["epsilon"] <= plan.target_epsilon
        assert "privacy budget: one more round would exceed it" in out
        status = world.status()
        assert (status["state"], status["why"], status["rounds"]) == ("ended", "budget", rounds)
