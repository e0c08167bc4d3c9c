"""Whole deployments on loopback: real SuperLink, SuperNodes, shufflers, nodes; TLS everywhere."""

import ctypes
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import tomli_w

from deployment_world import NAME, SUMS, World, deployment_of, window_here
from run_world import LIMIT, children, shufl_command, wait_until
from shufl.accounting import Ledger
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.server_site import OUTCOME_FILE, STOP_FILE
from shufl.shuffler import Credentials
from warm import Warm


@pytest.mark.nightly  # by day tests/attacks/test_strangers.py has a deployment whose run goes on
def test_an_operator_sees_who_is_waited_for_and_a_run_outlives_its_commands_and_processes(tmp_path):
    """A node overstates its users; Flower's command is killed; then the node tells the truth.

    Then the ServerApp is killed, then `shufl run`, and the terminal is closed; the command of the
    service goes on each time, until there is nothing to do. The shuffler hands over sums.
    """
    everybody = SUMS | {"minimum_batch": 6, "central_noise": 5.0}
    with World(tmp_path, nodes=2, rounds=8, round_timeout=LIMIT, privacy=everybody) as world:
        said = world.folder / "ward-1" / "node.toml"
        truth = said.read_text()
        said.write_text(truth.replace("users = 3", "users = 4"))
        world.kill_process("ward-1", "node")
        world.run()
        refusal = "it says that it speaks for 4 users, 3 were agreed"
        (shuffler,) = world.deployment.shufflers
        lacking = f"too few for a round (3 of 6 users at {shuffler.address})"
        waiting = f"waiting for nodes: 1 are there, {lacking}; refused: ward-1: {refusal}\n"
        wait_until(lambda: waiting in world.shown, LIMIT, "the line that says who is waited for")
        status = world.status()
        assert f"{status['waits_for']}\n" == waiting and status["waits_seconds"] > 0
        nodes = status["nodes"]
        found = [(node["name"], node["trouble"]) for node in nodes]
        assert found == [("ward-1", refusal), ("ward-2", "")]
        listed = json.loads(world.flwr("supernode", "list", NAME, "--format", "json"))["nodes"]
        assert {str(node["flower"]) for node in nodes} == {node["node-id"] for node in listed}
        keys = world.folder / "ward-2/keys"
        assert nodes[1]["certificate"] == Credentials.read(keys, "ward-2").fingerprint

        (flwr,) = children(world.command.pid)
        os.kill(flwr, signal.SIGKILL)
        said.write_text(truth)
        world.kill_process("ward-1", "node")
        world.wait_for_round(1)

        world.kill_server_app()
        code, out, err = world.finish()
        assert code == 1
        assert waiting in out
        assert re.fullmatch(r"error: .*--resume .* goes on with it\n", err), err

        service = "run.toml", "--continue"
        world.run(*service)
        world.wait_until(lambda: Ledger.is_held(world.run_folder / "ledger.jsonl"), "the ServerApp")
        world.command.kill()
        world.command.communicate()
        world.run(*service)
        world.wait_until(lambda: handles(world.command.pid, signal.SIGHUP), "the command")
        for _ in range(2):
            world.command.send_signal(signal.SIGHUP)
        code, out, err = world.finish()
        assert (code, err) == (130, ""), world.tell()
        assert out.startswith(f"{world.run_folder} is under way\n")
        assert len(world.rounds_spent) < 8
        world.run(*service)
        code, _, err = world.finish()
        assert (code, err) == (0, ""), world.tell()
        assert world.rounds_spent == [*range(1, 9)]
        assert {row["users_present"] for row in world.rows} <= {0, 3, 6}
        world.run(*service)
        assert world.finish() == (
            0,
            f"{world.run_folder} has ended: rounds; a further run needs another name\n",
            "",
        )
        outcome = world.run_folder / OUTCOME_FILE
        outcome.write_text(json.dumps({"error": "nothing is well", "attempt": "1"}))
        world.run(*service)
        code, out, err = world.finish()
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {world.run_folder} ended early: nothing is well. When that")


def threads_that_take(number, pid):
    """Ids of a process's threads, but for the main one, that do not block a signal."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        (mask,) = re.findall(r"^SigBlk:\t(\w+)$", status, re.MULTILINE)
        if int(task.name) != pid and not int(mask, 16) >> (number - 1) & 1:
            yield int(task.name)


def handles(pid, number):
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigCgt:\t(\w+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.nightly
def test_a_node_ends_whichever_of_its_threads_gets_the_signal(tmp_path):
    rehearsal = Rehearsal(deployment_of(tmp_path, nodes=1, rounds=2), tmp_path, tmp_path / "s")
    log = tmp_path / "node.log"
    node = Warm(("node", "--log-file", log), cwd=rehearsal.folder / "ward-1")
    try:
        wait_until(lambda: log.exists() and "listening" in log.read_text(), LIMIT, "the node")
        assert any(  # a thread may have ended
            ctypes.CDLL(None).tgkill(node.pid, thread, signal.SIGTERM) == 0
            for thread in threads_that_take(signal.SIGTERM, node.pid)
        )
        assert node.wait(LIMIT) == 0
    finally:
        node.kill()


@pytest.mark.nightly
def test_a_rehearsal_that_is_ended_twice_leaves_nothing_behind(tmp_path):
    """As `timeout` ends it."""
    about = {"privacy": {"minimum_batch": 1}, "window": window_here()}
    deployment = deployment_of(tmp_path, nodes=2, rounds=1000, **about)
    file = tmp_path / "deployment.toml"
    file.write_text(tomli_w.dumps(deployment.model_dump(mode="json", exclude_none=True)))
    out = tmp_path / "out.txt"
    with out.open("wb") as log:
        command = subprocess.Popen(
            shufl_command("rehearse", file, "--runs", tmp_path / "runs"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def wait_for(condition, what):
        wait_until(lambda: condition() or command.poll() is not None, LIMIT, what)
        assert command.poll() is None, out.read_text()

    try:
        wait_for(lambda: [*(tmp_path / "runs").glob("*/metrics.jsonl")], "a round")
        (rows,) = (tmp_path / "runs").glob("*/metrics.jsonl")
        started = children(command.pid)
        assert len(started) >= 6  # a shuffler, the SuperLink, two nodes of two processes
        command.terminate()
        wait_until(rows.with_name(STOP_FILE).exists, LIMIT, "the first signal to be heard")
        command.terminate()
        assert command.wait(LIMIT) == 130, out.read_text()
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    finally:
        command.kill()
        command.wait()
