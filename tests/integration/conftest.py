"""Runs in the background, and shufflers in processes of their own."""

from contextlib import ExitStack

import pytest

from run_world import LongRun, python_path
from shufl.shuffler import ShufflerProcess


@pytest.fixture
def long_vectorised_run(tmp_path):
    run = LongRun(tmp_path, "--engine", "vectorised", "--set", "privacy.rounds=100000")
    yield run
    run.clean_up()


@pytest.fixture
def start_shuffler(memory_path, tmp_path, monkeypatch):
    """Starts a real shuffler, whose process first plays the `code`, which may make it lie."""
    with ExitStack() as stack:

        def start(code=""):
            (tmp_path / "sitecustomize.py").write_text(code)
            monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
            about = {"simulation_seed": 9}
            return stack.enter_context(ShufflerProcess(memory_path / "directory", **about))

        yield start


@pytest.fixture
def shuffler(start_shuffler):
    return start_shuffler()
