"""How a run goes on or ends where nodes, the shuffler or the user break in: real faults."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from run_world import (
    USERS,
    LongRun,
    json_lines,
    model_of,
    only_folder,
    running,
    shufl,
    tiny_config,
    wait_until,
)
from typer.testing import CliRunner

from accounting import Ledger, price, rounds_within_budget
from simulator.cli.__main__ import app
from simulator.config import load
from simulator.experiment import prepare


@pytest.mark.slow
def test_a_round_is_in_the_ledger_before_any_client_works_on_it(tmp_path):
    """The model reads the ledger from disk in every forward pass."""
    result = shufl(
        "run", tiny_config(tmp_path, 3), "--runs", tmp_path / "runs",
        "--set", "model.name=odd_models:reads_ledger", "--set", "model.options={}",
        "--set", "training.algorithm=fedavg", "--set", "training.local_epochs=2",
        "--set", "training.optimiser=adam", "--set", "seed=system",
        cwd=Path(__file__).parent, env={**os.environ, "TEST_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    rows = json_lines(only_folder(tmp_path / "runs") / "metrics.jsonl")
    assert {int(rounds) for rounds, _ in seen} == {row["round"] for row in rows}
    assert {watching for _, watching in seen} == {"1"}  # in every worker, whatever the rounds
    assert len(rows) == 3 and all(row["reports"] > 0 for row in rows)


@pytest.mark.slow
def test_a_round_with_a_silent_node_is_spent_and_its_batch_destroyed(tmp_path):
    """Epsilon is that of all users mixing; with fewer nothing is released."""
    result = shufl(
        "run", tiny_config(tmp_path, 4), "--runs", tmp_path / "runs",
        "--set", "model.name=odd_models:first_call_hangs", "--set", "model.options={}",
        "--set", "simulation.round_timeout=6.0",
        cwd=Path(__file__).parent, env={**os.environ, "TEST_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json_lines(only_folder(tmp_path / "runs") / "metrics.jsonl")
    assert len(rows) == 4
    first, last = rows[0], rows[-1]
    assert (first["outcome"], first["reports"]) == ("discarded", 0)
    assert first["silent_nodes"] >= 1
    assert (last["outcome"], last["silent_nodes"]) == ("released", 0)


@pytest.mark.slow
def test_nodes_that_never_answer_end_the_run_in_one_clear_error(tmp_path):
    result = shufl(
        "run", tiny_config(tmp_path, 3), "--runs", tmp_path / "runs",
        "--set", "model.name=odd_models:always_hangs", "--set", "model.options={}",
        "--set", "simulation.round_timeout=1.0",
        cwd=Path(__file__).parent, env={**os.environ, "TEST_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: 3 rounds in a row lacked nodes and could not be released")
    assert "in round 3 3 of 3: no answer within 1 s" in line
    assert "ended early: 3 rounds spent" in result.stdout


@pytest.mark.slow
def test_a_shuffler_killed_mid_run_ends_it_in_one_clear_error(long_run):
    long_run.wait_for_rounds(3)
    os.kill(long_run.shuffler_pid, signal.SIGKILL)
    code, out, err = long_run.finish()
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert "rounds spent" in out
    assert line.startswith("error: shuffler at 127.0.0.1:")
    assert "does not answer" in line
    done = len(json_lines(long_run.folder / "metrics.jsonl"))
    spent = Ledger.read(long_run.folder / "ledger.jsonl").entries
    assert [entry.round for entry in spent] == list(range(1, len(spent) + 1))
    assert done <= len(spent) <= done + 1
    wait_until(lambda: not any(map(running, long_run.spawned)), 30, "children to end")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run none of whose batches is large enough, ended by Ctrl-C."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = LongRun(folder, "--set", f"privacy.minimum_batch={USERS}")
    try:
        run.wait_for_rounds(2)
        run.process.send_signal(signal.SIGINT)
        return run, run.finish()
    finally:
        run.clean_up()


@pytest.mark.slow
def test_an_interrupt_ends_the_run_in_order(interrupted):
    run, (code, out, err) = interrupted
    assert (code, err.strip()) == (130, "")
    assert "interrupted" in out
    assert (run.folder / "model.pt").exists()
    assert math.isfinite(json_lines(run.folder / "metrics.jsonl")[-1]["epsilon"])
    wait_until(lambda: not any(map(running, run.spawned)), 30, "children to end")


@pytest.mark.slow
def test_rounds_below_the_minimum_batch_are_spent_and_training_goes_on(interrupted):
    folder = interrupted[0].folder
    rows = json_lines(folder / "metrics.jsonl")
    *whole, last = [(row["outcome"], row["reports"]) for row in rows]
    assert len(whole) >= 1 and set(whole) == {("below-minimum", 0)}
    assert last[1] == 0  # the interrupt may have cut it short
    assert len(Ledger.read(folder / "ledger.jsonl").entries) == len(rows)
    start = prepare(load(str(folder / "config.toml"))).make_model().state_dict()
    final = model_of(folder)
    assert all(torch.equal(start[name], final[name]) for name in start)


@pytest.mark.slow
def test_an_interrupt_ends_a_vectorised_run_in_order(long_vectorised_run):
    run = long_vectorised_run
    run.wait_for_rounds(2)
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert (code, err.strip()) == (130, "")
    assert "interrupted" in out
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt" and (run.folder / "model.pt").exists()
    plan = Ledger.read(run.folder / "ledger.jsonl").plan
    assert plan.rounds > summary["rounds"] and "ε as planned" in out
    for row in price(plan.event(), rounds_within_budget(plan), plan.adjacency, plan.delta):
        assert summary["epsilon"][row.name].get("planned") == row.epsilon
    rounds = [row["round"] for row in json_lines(run.folder / "metrics.jsonl")]
    assert rounds == [entry.round for entry in Ledger.read(run.folder / "ledger.jsonl").entries]
    assert rounds == list(range(1, summary["rounds"] + 1))


def mistaken(folder, *overrides):
    """The arguments of a run."""
    settings = [part for override in overrides for part in ("--set", override)]
    return ["run", str(tiny_config(folder, 2)), "--runs", str(folder / "runs"), *settings]


@pytest.mark.slow
def test_a_mistake_ends_the_command_itself_in_one_line(tmp_path):
    """After all imports, so that no library writes there either."""
    result = shufl(*mistaken(tmp_path, "simulation.cpus_per_node=1e6"))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: simulation.cpus_per_node must be at most")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.users=5000"], r"data.users must lie in [1, 1437]"),
        (
            ["simulation.nodes=61"],
            "simulation.nodes must be at most the number of users, 60, got 61",
        ),
        (["privacy.minimum_batch=61"], "got 61"),
        (["privacy.target_epsilon=1e-6"], "privacy.target_epsilon must be at least"),
        (["model.name=nothing:here"], "model nothing:here could not be imported"),
        (["privacy.check_in_rat=0.1"], "unknown key privacy.check_in_rat; did you mean"),
        *(
            (
                [
                    "model.name=odd_models:in_float64",
                    "model.options={}",
                    f"simulation.engine={engine}",
                ],
                "model odd_models:in_float64 keeps linear.weight as torch.float64: keep",
            )
            for engine in ("flower", "vectorised")
        ),
        (["privacy.clip_norm=9e-19"], "privacy.clip_norm must be a number in [1e-18, 1e15]"),
        (["privacy.clip_norm=1e308"], "privacy.clip_norm must be a number in [1e-18, 1e15]"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_before_any_work(tmp_path, overrides, message):
    result = CliRunner().invoke(app, mistaken(tmp_path, *overrides))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "runs").exists()
