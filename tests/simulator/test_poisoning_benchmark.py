"""The benchmark of poisoned reports still runs, and each attack does what its name says."""

import pytest

import poisoning
from nights import by_night

SMALL = [
    "privacy.rounds=2", "data.users=200", "privacy.minimum_batch=1",
    "privacy.target_epsilon=1000", "privacy.shuffler_blankets=10",
]  # fmt: skip


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
def test_a_poisoned_run_leaves_out_what_it_should(attack, aggregator, least, most):
    """A fifth of the users attack, of whom half report: a fifth of the reports, blankets aside."""
    case = poisoning.Case(attack, 0.2, aggregator, seed=1)
    of, accuracy, left_out = poisoning.run_case("quickstart", SMALL, case)
    assert of == case and 0 <= accuracy <= 1
    assert least <= left_out <= most
