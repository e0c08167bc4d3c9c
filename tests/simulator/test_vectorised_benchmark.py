"""The benchmark of the vectorised engine still runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vectorised.py"


@pytest.mark.parametrize(
    "model",
    [
        [],
        ["--set=model.name=transformer:vision", "--set=model.options={width=32,depth=1}"],
    ],
)
def test_the_script_prints_a_row_for_each_path(model):
    command = [sys.executable, str(SCRIPT), "quickstart", "--rounds=1", "--flower-rounds=0"]
    command += [
        "--set=data.users=60",
        "--set=privacy.minimum_batch=1",
        "--only=vectorised, aggregate",
        *model,
    ]
    wide = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=wide)
    for label in ("plain, a batch a core", "vectorised, aggregate noise"):
        (row,) = [line for line in done.stdout.splitlines() if label in line]
        median, share, megabytes = (float(row.split("│")[column]) for column in (3, 6, 7))
        assert median > 0
        assert 0 < share < 100
        assert 50 < megabytes < 50_000
