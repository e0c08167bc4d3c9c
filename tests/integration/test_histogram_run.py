"""A histogram through Flower, real shuffler processes and sealing."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from run_world import only_folder, set_options, shufl
from shufl.cli.__main__ import app
from shufl.learning.data.datasets import load_dataset


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_run_ends_with_the_shares_of_the_labels(tmp_path):
    """Of 479 users with three records each, by two shufflers."""
    runs = tmp_path / "runs"
    chosen = set_options("data.users=479", "simulation.nodes=4", "shuffler.number=2")
    done = shufl("run", "histogram", *chosen, "--runs", runs)
    assert done.returncode == 0, done.stderr
    folder = only_folder(runs)
    shown = in_process("histogram", folder, "--json")
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)
    labels = load_dataset("digits").train_labels.numpy()
    truth = np.bincount(labels, minlength=10) / len(labels)
    shares = np.array([each["share"] for each in told["histogram"]])
    errors = np.array([each["standard_error"] for each in told["histogram"]])
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    assert (np.abs(shares - truth) < 4 * errors).all()
    assert errors.max() < 0.05
    assert told["epsilon"]["blanket"]["epsilon"] <= 1.0
    assert (folder / "histogram.csv").exists()
    assert (folder / "histogram.png").exists()
    names = in_process("histogram", folder, "--categories", "a,b")
    assert names.exit_code == 2
    assert "--categories must be 10, as the run has, got 2" in names.stderr
    model = folder / "model.pt"
    whole, scores = model.read_bytes(), torch.load(model, weights_only=True)["scores"]
    place = whole.index(scores.numpy().tobytes())
    model.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    damaged = in_process("histogram", folder)
    assert damaged.exit_code == 2
    assert damaged.stderr == f"error: {model} is damaged: BadZipFile\n"
    model.write_bytes(whole)
    (folder / "metrics.jsonl").write_text("")
    unknown = in_process("histogram", folder)
    assert unknown.exit_code == 2
    assert unknown.stderr == (
        f"error: {folder} has released no histogram; its metrics.jsonl has its rounds\n"
    )


def in_process(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("privacy.rounds=2", "privacy.rounds must be 1 with mechanism randomised-response, got 2"),
        ("privacy.categories=9", "privacy.categories must be 10, the classes of digits, got 9"),
        ("privacy.categories=", "privacy.categories must be given with mechanism randomised"),
        ("privacy.noise_multiplier=1", "privacy.noise_multiplier must be left out with mechanism"),
        ("privacy.mechanism=gaussian", "privacy.categories must be left out with mechanism gauss"),
        ("privacy.local_epsilon=21", "local_epsilon must be a number in [1e-9, 20] or left out"),
        ("privacy.accountant=theorem3", "must be 'blanket' or 'crowd' or 'local'"),
        ("training.learning_rate=0.5", "training.learning_rate must be 1.0 with mechanism"),
        ("model.name=mlp", "model.name must be histogram with mechanism randomised-response"),
        ("simulation.engine=vectorised", "simulation.engine must be flower with mechanism"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, setting, message):
    done = in_process("run", "histogram", "--set", setting, "--runs", tmp_path / "runs")
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_what_is_no_histogram_is_refused(tmp_path):
    done = in_process("histogram", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", [("--column", "town"), ("--other",), ("--delta", "1/n")])
def test_a_flag_that_a_run_folder_makes_idle_is_refused(tmp_path, flag):
    done = in_process("histogram", tmp_path, *flag)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {flag[0]} must be left out with a run folder")
    assert done.stderr.count("\n") == 1
