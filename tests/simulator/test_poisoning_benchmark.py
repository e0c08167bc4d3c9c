"""The benchmark of poisoned reports still runs, and each attack does what its name says."""

import importlib.util
import sys
from pathlib import Path

import pytest

from nights import by_night

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "poisoning.py"
SMALL = [
    "privacy.rounds=2", "data.users=200", "privacy.minimum_batch=1",
    "privacy.target_epsilon=1000", "privacy.shuffler_blankets=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def poisoning():
    spec = importlib.util.spec_from_file_location("poisoning", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["poisoning"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    yield script
    del sys.modules["poisoning"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "aggregator", "least", "most"),
    [
        ("huge", "mean", 0.1, 0.3),
        ("hidden", "spectral-filter", 0, 0.15),
        ("longest", "spectral-filter", 0.1, 0.3),
        *by_night(
            ("none", "mean", 0, 0),
            ("none", "spectral-filter", 0, 0.02),
            ("flip", "mean", 0, 0),
            ("opposite", "spectral-filter", 0, 0.02),
            ("longest", "mean", 0, 0),
        ),
    ],
)
def test_a_poisoned_run_leaves_out_what_it_should(poisoning, attack, aggregator, least, most):
    """A fifth of the users attack, of whom half report: a fifth of the reports, blankets aside."""
    case = poisoning.Case(attack, 0.2, aggregator, seed=1)
    of, accuracy, left_out = poisoning.run_case("quickstart", SMALL, case)
    assert of == case and 0 <= accuracy <= 1
    assert least <= left_out <= most
