"""How a run goes on or ends where a Ray worker dies or the user breaks in: real faults."""

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from run_world import (
    LIMIT,
    USERS,
    LongRun,
    json_lines,
    left_behind,
    model_of,
    only_folder,
    ray_of_its_own,
    running,
    set_options,
    shufl,
    shufl_command,
    tiny_config,
    wait_until,
)
from shufl.accounting import Ledger, price, rounds_within_budget
from shufl.learning.config import load
from shufl.results.experiment import prepare

pytestmark = pytest.mark.slow
ALONE = [
    "privacy.accountant=blanket", "privacy.shuffler_blankets=20", "privacy.target_epsilon=1e9",
    "privacy.rounds=4",
]  # fmt: skip
"""An accountant under which nobody counts on others, so that a round could do without them."""


def with_model(tmp_path, name, *more, options=""):
    """`shufl run` of a model that has side effects."""
    options = f"model.options={{folder='{tmp_path}'{options}}}"
    chosen = [f"model.name=odd_models:{name}", options, *more]
    return shufl(
        "run", tiny_config(tmp_path, 4), "--runs", tmp_path / "runs",
        *set_options(*chosen), cwd=Path(__file__).parent,
    )  # fmt: skip


@pytest.fixture(scope="module")
def worker_killed(tmp_path_factory):
    """A run whose Ray worker is killed in the third round; the folder of what its model wrote.

    Workers have interpreters of their own, so that it shows what they import.
    """
    folder = tmp_path_factory.mktemp("killed")
    local_work = "training.algorithm=fedavg", "training.local_epochs=2"
    more = *ALONE, *local_work, "training.optimiser=adam", "training.optimiser_options={}"
    with ray_of_its_own(warm=False, num_cpus=1) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", address)
        return with_model(folder, "kills_its_worker", *more, options=", times=1, first=3"), folder


def test_a_round_is_in_the_ledger_before_any_client_works_on_it(worker_killed):
    """The model reads the ledger from disk in every forward pass."""
    _, folder = worker_killed
    seen = [line.split(maxsplit=2) for line in (folder / "seen").read_text().splitlines()]
    assert {int(rounds) for rounds, *_ in seen} == {1, 2, 3}
    assert {watching for _, watching, _ in seen} == {"1"}  # in every worker, whatever the rounds
    assert {slow for *_, slow in seen} == {"0"}  # neither accountants nor the server are imported
    rows = json_lines(only_folder(folder / "runs") / "metrics.jsonl")
    assert [row["round"] for row in rows] == [1, 2] and all(row["reports"] > 0 for row in rows)


def test_a_killed_ray_worker_ends_the_run_in_one_line(worker_killed):
    result, folder = worker_killed
    run = only_folder(folder / "runs")
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: round 3, node [012](, node [012])*: a Ray worker died \(killed, or out of memory; "
        r"a higher simulation\.cpus_per_node has fewer nodes at work at once\); "
        rf"shufl run --resume {run} goes on\n",
        result.stderr,
    )
    assert "ended early: 3 rounds spent" in result.stdout
    assert "A worker died" not in result.stdout  # in Ray's words
    assert "A worker died" in (run / "ray.log").read_text()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, shared_ray):
    """A run none of whose batches is large enough, ended by Ctrl-C."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = LongRun(folder, "--set", f"privacy.minimum_batch={USERS}")
    try:
        run.wait_for_rounds(2)
        run.process.send_signal(signal.SIGINT)
        return run, run.finish()
    finally:
        run.clean_up()


def test_an_interrupt_ends_the_run_in_order(interrupted):
    run, (code, out, err) = interrupted
    assert (code, err.strip()) == (130, "")
    assert "interrupted" in out
    assert (run.folder / "model.pt").exists()
    assert math.isfinite(json_lines(run.folder / "metrics.jsonl")[-1]["epsilon"])
    summary = json.loads((run.folder / "summary.json").read_text())
    plan = Ledger.read(run.folder / "ledger.jsonl").plan
    assert summary["stopped_by"] == "interrupt"
    assert plan.rounds > summary["rounds"] and "ε as planned" in out
    for row in price(plan.event(), rounds_within_budget(plan), plan.adjacency, plan.delta):
        assert summary["epsilon"][row.name].get("planned") == row.epsilon
    wait_until(lambda: not any(map(running, run.spawned)), 30, "children to end")


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


def mistaken(folder, *overrides):
    """The arguments of a run."""
    runs = str(folder / "runs")
    return ["run", str(tiny_config(folder, 2)), "--runs", runs, *set_options(*overrides)]


def test_a_mistake_ends_the_command_itself_in_one_line(tmp_path):
    """After all imports, so that no library writes there either."""
    command = shufl_command(*mistaken(tmp_path, "simulation.cpus_per_node=1e6"))
    alone = os.environ | {"RAY_ADDRESS": "", "TEST_FOLDER": str(tmp_path)}  # a Ray of its own
    result = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: simulation.cpus_per_node must be at most")
    wait_until(lambda: not left_behind(tmp_path), LIMIT, "the Ray that had begun to start to end")
    assert not (tmp_path / "runs").exists()
