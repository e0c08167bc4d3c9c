"""The scripts in examples/ run as they stand, from any folder."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nights import by_night
from run_world import LIMIT
from warm import play

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = EXAMPLES.parent / "docs"


def printed_by(name, folder, *arguments):
    """What an example prints that is started in its folder."""
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    command = [sys.executable, f"{name}.py", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("name", "score", "least", "most"),
    by_night(("visits", "accuracy", 0.75, 1.0), ("own_algorithm", "coverage", 0.75, 0.98)),
)
def test_an_example_learns_and_keeps_its_budget(name, score, least, most, tmp_path):
    printed = printed_by(name, tmp_path)
    told = re.search(rf"^{score} (0\.\d+), ε = (\d[\d.]*)", printed, re.MULTILINE)
    assert told and least < float(told[1]) < most and float(told[2]) <= 4.0


@pytest.mark.nightly  # tests/simulator/test_spreadsheets.py has each refusal
def test_each_refusal_of_a_spreadsheet_is_on_its_page_with_its_answer(tmp_path):
    shutil.copy(EXAMPLES / "spreadsheet.py", tmp_path)
    code = "import runpy; runpy.run_path('spreadsheet.py', run_name='__main__')"
    ended = play([code], LIMIT, program="python", cwd=tmp_path)
    printed = ended.stdout.replace(f"{tmp_path}/", "…/")
    refused = re.findall(r"^refused: (.*)\nanswer:  \{'(\w+)'", printed, re.MULTILINE)
    page = (DOCS / "spreadsheet.md").read_text(encoding="utf-8")
    shown = re.findall(r"^refused: (.*?)^(\w+) = ", page, re.MULTILINE | re.DOTALL)
    assert refused == [(" ".join(said.split()), key) for said, key in shown]
    told = re.search(r"^accuracy (0\.\d+), ε = (\d[\d.]*)$", printed, re.MULTILINE)
    assert len(refused) == 10 and float(told[1]) > 0.75 and float(told[2]) <= 4.0


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.nightly  # tests/server and test_benchmarks.py have it without Flower
def test_an_aggregator_of_ones_own_gets_every_report(tmp_path):
    printed = printed_by("spectral_filter", tmp_path)
    left_out, reports = re.search(r", (\d+) of (\d+) reports left out$", printed).groups()
    assert int(left_out) < 10 and 2100 < int(reports) < 2500  # of 3 (1437/2 + 50) expected


@pytest.mark.nightly
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_gets_every_round(tracker, tmp_path):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: make nightly installs it")
    printed = printed_by("tracker", tmp_path, tracker)
    assert re.search(r"^5 rounds, the last with ε = \d", printed, re.M)
    if tracker == "wandb":  # nothing has been sent; `wandb sync` sends this file
        (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        assert kept.stat().st_size > 1000
