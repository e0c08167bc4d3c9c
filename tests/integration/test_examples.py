"""The scripts in examples/ run as they stand, from any folder."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "score", "least", "most"),
    [("visits", "accuracy", 0.75, 1.0), ("own_algorithm", "coverage", 0.75, 0.98)],
)
def test_an_example_learns_and_keeps_its_budget(name, score, least, most, tmp_path):
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = re.search(rf"^{score} (0\.\d+), ε = (\d[\d.]*)", ended.stdout, re.MULTILINE)
    assert told and least < float(told[1]) < most and float(told[2]) <= 4.0
