"""The whole path, real in every part: what a run does, what it leaves, and how it ends."""

import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from nights import by_night
from run_world import (
    LIMIT,
    NOISE,
    RATE,
    USERS,
    LongRun,
    budget_of,
    epsilon_after,
    invoke,
    json_lines,
    model_of,
    only_folder,
    running,
    same_model,
    set_options,
    shufl,
    shufl_command,
    tiny_config,
    wait_until,
)
from shufl.accounting import Ledger, PrivacyPlan, accountants_of_kind
from shufl.learning.config import load
from shufl.protocol.mechanisms import SeededRandomness, seed_of_shuffler
from shufl.results.experiment import prepare
from shufl.results.run_folder import read_starts

# All of them wait for a run on Flower.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]
ROUNDS, BLANKETS = 6, 3.0
HERE = Path(__file__).parent
WITH_BLANKETS = "--set", f"privacy.shuffler_blankets={BLANKETS}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shared_ray):
    """A run whose budget admits six rounds."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config(folder, ROUNDS)
    result = shufl("run", config, "--runs", folder / "runs", *WITH_BLANKETS)
    assert result.returncode == 0, result.stderr
    return result, only_folder(folder / "runs")


def test_the_run_halts_at_exactly_the_round_the_accountant_predicts(finished):
    result, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], summary["stopped_by"]) == (ROUNDS, "budget")
    assert epsilon_after(ROUNDS) <= summary["target_epsilon"] < epsilon_after(ROUNDS + 1)
    assert summary["epsilon"]["theorem3"]["epsilon"] == pytest.approx(epsilon_after(ROUNDS))
    assert "budget" in result.stdout


def test_every_round_is_in_the_metrics_and_in_the_ledger(finished):
    _, folder = finished
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    event = PrivacyPlan.from_json((folder / "plan.json").read_bytes()).event()
    for row in rows:
        assert row["epsilon"] == pytest.approx(epsilon_after(row["round"]))
        assert (row["outcome"], row["rejected"], row["silent_nodes"]) == ("released", 0, 0)
        assert set(row["epsilons"]) == set(accountants_of_kind(event))
    ledger = Ledger.read(folder / "ledger.jsonl")
    assert [entry.round for entry in ledger.entries] == list(range(1, ROUNDS + 1))
    assert ledger.plan == PrivacyPlan.from_json((folder / "plan.json").read_bytes())


def blankets_of(round):
    """How many the shuffler adds, and their draws of a size."""
    randomness = SeededRandomness(seed_of_shuffler(5, 0))
    added = randomness.number_of_blankets(round, BLANKETS)
    return added, lambda size: randomness.blanket_noise(round, np.arange(added), size)


def test_reports_are_those_of_the_users_whose_coin_came_up_and_blankets(finished):
    _, folder = finished
    for row in json_lines(folder / "metrics.jsonl"):
        coins = SeededRandomness(5).check_ins(row["round"], np.arange(USERS), RATE)
        assert row["reports"] == coins.sum() + blankets_of(row["round"])[0]


def largest_rounding(plan, roundings):
    """Of any parameter after the rounds, of whose sums each has so many terms that are rounded.

    A rounding has a standard deviation of 0.29 units. The round k rounds before the last moves the
    parameters by lr (1 - momentum^(k + 1)) / (1 - momentum) times its estimate: of all six rounds
    that is 4.0 times the standard deviation of one. Later gradients answer to it, so that a quarter
    more was seen. What remains is eight standard deviations.
    """
    return 8 * 4.0 * 0.29 * plan.mechanism.unit(1) * math.sqrt(roundings) / (USERS * RATE)


def check_the_model_by_hand(folder, rounds, roundings):
    """The published algorithm in a few lines: no Flower, no shuffler, no sealing, no rounding."""
    experiment = prepare(load(str(folder / "config.toml")))
    randomness, clip_norm = SeededRandomness(5), 0.8
    model, users = experiment.make_model(), experiment.load_users()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parameters = list(model.parameters())
    for round in range(1, rounds + 1):
        total = torch.zeros(experiment.parameters, dtype=torch.float64)
        checked_in = np.flatnonzero(randomness.check_ins(round, np.arange(USERS), RATE))
        own = randomness.standard_normal(round, checked_in, experiment.parameters)
        for noise in (own, blankets_of(round)[1](experiment.parameters)):
            total += NOISE * clip_norm * torch.from_numpy(noise).double().sum(0)
        for user in checked_in:
            features, labels = users(user)
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
            gradient = gradient.double() * min(1.0, clip_norm / float(gradient.double().norm()))
            total += gradient
        estimate = (total / (USERS * RATE)).float()
        for part, parameter in zip(
            estimate.split([p.numel() for p in parameters]), parameters, strict=True
        ):
            parameter.grad = part.view_as(parameter)
        optimiser.step()
    final = model_of(folder)
    atol = 1e-5 + largest_rounding(experiment.plan, roundings)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(final[name], value, rtol=1e-4, atol=atol)


def test_the_final_model_is_the_one_computed_by_hand(finished):
    _, folder = finished
    check_the_model_by_hand(folder, ROUNDS, USERS * RATE + BLANKETS)


@pytest.fixture(scope="module", params=["shared", *by_night("own")])
def killed(request, tmp_path_factory, shared_ray):
    """The folder of the same run with another number of nodes, killed, and resumed to its end.

    By night it starts a Ray of its own, and goes on with another.
    """
    folder = tmp_path_factory.mktemp("killed")
    overrides = (
        f"privacy.target_epsilon={budget_of(ROUNDS)}",
        "simulation.nodes=4",
        "model.name=odd_models:waits_in_round_4",  # so that it has not ended
        f"model.options={{folder='{folder}'}}",
    )
    options = *set_options(*overrides), *WITH_BLANKETS
    killed = LongRun(folder, *options, ray=request.param, cwd=HERE)
    try:
        killed.wait_for_rounds(3)
        killed.process.kill()
        killed.process.wait()
        done = len(json_lines(killed.folder / "metrics.jsonl"))
        spent = len(Ledger.read(killed.folder / "ledger.jsonl").entries)
        wait_until(lambda: not running(killed.shuffler_pid), 15, "the shuffler to end")
    finally:
        killed.clean_up()
        (folder / "go").touch()
    command = shufl_command("run", "--resume", killed.folder)  # an interpreter of its own
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr
    assert read_starts(killed.folder)[-1]["command"] == f"shufl run --resume {killed.folder}"
    return killed.folder, done, spent


def test_the_same_seed_gives_the_same_model_to_the_bit(finished, killed):
    """Although order, keys and timing differ, as does the number of nodes."""
    (_, one), (other, *_) = finished, killed
    assert same_model(one, other)
    events = [(line["event"], line.get("round")) for line in json_lines(other / "shuffler.log")]
    assert events.count(("batch released", ROUNDS)) == 1
    reports = [[row["reports"] for row in json_lines(f / "metrics.jsonl")] for f in (one, other)]
    assert reports[0] == reports[1]


def test_a_run_killed_with_sigkill_has_only_over_counted_and_resumes_to_the_same_ledger(
    finished, killed
):
    (_, whole), (folder, done, spent) = finished, killed
    assert done == 3 and spent in (3, 4)
    ledgers = [Ledger.read(path / "ledger.jsonl") for path in (whole, folder)]
    assert ledgers[0].entries == ledgers[1].entries
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))


@pytest.fixture(scope="module")
def vectorised(finished, tmp_path_factory):
    """The same run on the vectorised engine."""
    runs = tmp_path_factory.mktemp("vectorised")
    arguments = finished[1] / "config.toml", "--runs", runs, "--engine", "vectorised"
    one_block = "--set", "simulation.records_per_chunk=10000"
    result = invoke("run", *arguments, *one_block)
    assert result.exit_code == 0, result.output
    return result, only_folder(runs)


def test_the_vectorised_engine_trains_the_model_of_the_flower_engine(finished, vectorised):
    (_, on_flower), (_, folder) = finished, vectorised
    check_the_model_by_hand(folder, ROUNDS, 1 + BLANKETS)  # all users are one block
    first, second = model_of(on_flower), model_of(folder)
    plan = PrivacyPlan.from_json((folder / "plan.json").read_bytes())
    atol = 1e-5 + largest_rounding(plan, USERS * RATE + 1)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=atol)


def test_the_vectorised_engine_spends_and_records_what_the_flower_engine_does(finished, vectorised):
    (_, on_flower), (result, folder) = finished, vectorised
    rows = [json_lines(path / "metrics.jsonl") for path in (on_flower, folder)]
    for ours, theirs in zip(*rows, strict=True):
        for row in (ours, theirs):
            del row["seconds"], row["accuracy"], row["macro_f1"]
        # On Flower each report is rounded.
        assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-3)
        assert ours == theirs
    ledgers = [Ledger.read(path / "ledger.jsonl") for path in (on_flower, folder)]
    assert len(ledgers[0].entries) == len(ledgers[1].entries)
    assert ledgers[0].plan == ledgers[1].plan
    summaries = [json.loads((path / "summary.json").read_text()) for path in (on_flower, folder)]
    assert [summary["engine"] for summary in summaries] == ["flower", "vectorised"]
    assert summaries[0]["epsilon"] == summaries[1]["epsilon"]
    assert "vectorised on cpu in float32, noise drawn for each report" in result.stdout
    assert re.search(r"^round 1/6 .* rounds/s, \d:\d\d:\d\d left$", result.stdout, re.MULTILINE)
    missing = {path.name for path in on_flower.iterdir()} - {path.name for path in folder.iterdir()}
    logs = {"flower.log", "ray.log", "server.log", "shuffler.log"}
    assert missing == {"flower", "nodes.json", *logs}


def test_the_run_folder_is_complete_and_names_no_user(finished):
    _, folder = finished
    expected = {
        "config.toml", "plan.json", "ledger.jsonl", "metrics.jsonl", "summary.json", "model.pt",
        "checkpoint.pt", "tensorboard", "score_epsilon.png",
    }  # fmt: skip
    assert expected <= {path.name for path in folder.iterdir()}
    assert (folder / "score_epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    _, *log = (folder / "shuffler.log").read_text().splitlines()  # the first is its configuration
    assert "node" not in "".join(log) and "user" not in "".join(log)
