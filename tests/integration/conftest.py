"""Runs in the background."""

import pytest

from run_world import LongRun


@pytest.fixture
def long_run(tmp_path, shared_ray):
    run = LongRun(tmp_path)
    yield run
    run.clean_up()


@pytest.fixture
def long_vectorised_run(tmp_path):
    run = LongRun(tmp_path, "--engine", "vectorised", "--set", "privacy.rounds=100000")
    yield run
    run.clean_up()
