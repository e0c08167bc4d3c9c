"""A histogram through Flower, real shuffler processes and sealing."""

import numpy as np
import pytest
import torch

from run_world import only_folder, refused, set_options, shufl, told
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
    found = told("histogram", folder)
    labels = load_dataset("digits").train_labels.numpy()
    truth = np.bincount(labels, minlength=10) / len(labels)
    shares = np.array([each["share"] for each in found["histogram"]])
    errors = np.array([each["standard_error"] for each in found["histogram"]])
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    assert (np.abs(shares - truth) < 4 * errors).all()
    assert errors.max() < 0.05
    assert found["epsilon"]["blanket"]["epsilon"] <= 1.0
    assert (folder / "histogram.csv").exists()
    assert (folder / "histogram.png").exists()
    said = refused("histogram", folder, "--categories", "a,b")
    assert "--categories must be 10, as the run has, got 2" in said
    model = folder / "model.pt"
    whole, scores = model.read_bytes(), torch.load(model, weights_only=True)["scores"]
    place = whole.index(scores.numpy().tobytes())
    model.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert refused("histogram", folder) == f"{model} is damaged: BadZipFile"
    model.write_bytes(whole)
    (folder / "metrics.jsonl").write_text("")
    said = refused("histogram", folder)
    assert said == f"{folder} has released no histogram; its metrics.jsonl has its rounds"
