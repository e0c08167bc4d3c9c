"""The benchmark script: its peer is right, and it still runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mpmath as mp
import pytest
from accounting_oracles import moment
from accounting_oracles import partitions as partitions_of

import accounting_speed
from accounting_speed import enumerated_log_moment, partitions

pytestmark = pytest.mark.slow

SCRIPT = Path(accounting_speed.__file__)


def test_the_published_algorithm_is_enumerated_fully():
    assert [tuple(parts) for parts in partitions(9)] == list(partitions_of(9))
    assert sum(1 for _ in partitions(40)) == 37338
    for order in (2, 7, 12):
        truth = mp.log(moment(50, 2.0, order))
        assert enumerated_log_moment(50, 2.0, order) == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.nightly
def test_the_script_prints_a_row_for_each_thing_asked_for():
    command = [sys.executable, str(SCRIPT), "--users=300", "--rounds=5", "--guarded=4"]
    command += ["--order=10", "--only=theorem3,partitions"]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=wide)
    for label in ("theorem3, n = 300", "theorem3, n = 1e+09", "Theorem 1, order 10"):
        assert label in done.stdout


@pytest.mark.nightly
def test_a_plan_that_is_a_little_safer_is_never_dearer():
    command = [sys.executable, str(SCRIPT.with_name("accounting_order.py")), "--plans=20"]
    command += ["--only", "blanket", "local", "--seed=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rises = re.findall(r"│ (blanket|local) +│ (\w+) +│ ([\d.e-]+) +│", done.stdout)
    assert len(rises) == 7
    assert all(float(rise) <= 1e-3 for _, _, rise in rises), done.stdout
