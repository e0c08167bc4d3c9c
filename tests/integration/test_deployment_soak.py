"""Random kills and stalls at every stage of twenty rounds."""

import contextlib
import os
import random
import signal
import time
from collections import Counter

import pytest

from deployment_world import World

SEED = int(os.environ.get("SHUFL_SOAK_SEED", "1"))
STALL_SECONDS = 8.0
PRIVACY = {"target_epsilon": 1e6, "check_in_rate": 0.5, "shuffler_blankets": 200.0}


def hurt(world, chance):
    """Kills, or stalls for a while, one process or a third of the SuperNodes; says which."""
    nodes = [node.name for node in world.deployment.nodes]
    third = chance.sample(nodes, max(1, len(nodes) // 3))
    kills = {
        "SuperNodes": [(name, "supernode") for name in third],
        "node": [(third[0], "node")],
        "shuffler": [("shuffler-1", "shuffler")],
        "SuperLink": [("server", "superlink")],
    }
    what = chance.choice(["kill", "stall"]), chance.choice([*kills, "ServerApp"])
    with contextlib.suppress(ProcessLookupError, ValueError, KeyError):  # it is being started again
        if what[1] == "ServerApp":
            world.kill_server_app()
        elif what[0] == "kill":
            for site, name in kills[what[1]]:
                world.kill_process(site, name)
        else:
            pids = [world.running[each].pid for each in kills[what[1]]]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(STALL_SECONDS)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    return " ".join(what)


@pytest.mark.nightly
@pytest.mark.timeout(7500)
def test_whatever_is_killed_the_ledger_counts_what_was_released(tmp_path):
    nodes, rounds = 4, 20
    chance, done = random.Random(SEED), []
    with World(tmp_path, nodes, rounds, shufflers=2, users=40, privacy=PRIVACY) as world:
        world.run()
        world.wait_for_round(1)
        while True:
            deadline = time.monotonic() + chance.uniform(2, 20)
            while world.command.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if world.command.poll() is None:
                if len(done) < 2 * rounds:
                    done.append(hurt(world, chance))
                continue
            code, _, err = world.finish()
            if code == 0:
                break
            assert (code, len(err.splitlines())) == (1, 1), err  # one line tells what happened
            world.wait_for_superlink()
            world.resume()
        released = sum(row["outcome"] == "released" for row in world.rows)
        print(f"{released} of {rounds} rounds were released;", dict(sorted(Counter(done).items())))
        ended = [row["round"] for row in world.rows]
        assert len(ended) == len(set(ended))
        assert world.rounds_spent == list(range(1, rounds + 1))
        assert set(ended) <= set(world.rounds_spent)
        assert all(row["reports"] <= nodes * 40 + 2 * 900 for row in world.rows)
        for node in world.deployment.nodes:
            offered = world.rounds_offered(node.name)
            assert len(offered) == len(set(offered)) <= rounds
            assert set(offered) <= set(world.rounds_spent)
