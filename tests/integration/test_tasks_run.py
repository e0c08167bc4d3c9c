"""Whole runs of each task on both engines, with users of unequal size."""

import json

import pytest
import torch
from torch import nn

import shufl
from nights import by_night
from shufl.learning.config import load
from shufl.results.experiment import _NO_METRICS
from task_world import SETTINGS, TASKS


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("task", ["own", *by_night("regression", "next-token")])
def test_both_engines_train_alike(task, tmp_path):
    dataset, model, score, more = TASKS[task]
    names = f"data.dataset={dataset}", f"model.name={model}"
    ends = []
    for engine in ("vectorised", "flower"):
        sets = [*SETTINGS, *more, *names, f"simulation.engine={engine}"]
        config = load("quickstart", sets).model_dump(exclude_none=True)
        run = shufl.run(config, runs=tmp_path, progress=False)
        assert run.score_name == score and run.score == run.metrics[-1][score]
        assert {"score", score, "loss"} <= set(run.metrics[0])
        summary = json.loads((run.folder / "summary.json").read_bytes())
        assert summary["score"] == score and summary[score] == run.score
        metrics = {score, "macro_f1", "mae", "worst", "perplexity"}
        assert (set(summary) | set(run.metrics[0])) - metrics <= _NO_METRICS
        assert shufl.load_run(run.folder).score == run.score
        ends.append(run)
    one, other = (nn.utils.parameters_to_vector(run.model.parameters()) for run in ends)
    torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)
