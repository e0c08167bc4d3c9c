"""What docstrings guarantee: the very sentences; `test_mechanisms_*.py` have what they say."""

import inspect
import re

import pytest

from shufl.accounting import ACCOUNTANTS
from shufl.protocol import GaussianMechanism, LdpSgd, RandomisedResponse


def guarantee_of(kind):
    """The section of a docstring, in one line."""
    (said,) = re.findall(r"^Guarantee:\n((?: {4}.+\n?)+)", inspect.getdoc(kind), re.M)
    return " ".join(said.split())


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_an_accountant_guarantees_what_tables_print(name):
    assert guarantee_of(ACCOUNTANTS[name]) == f"ε holds for {ACCOUNTANTS[name].covers}."
    every = guarantee_of(ACCOUNTANTS[name]).startswith("ε holds for every pair of")
    assert every == (ACCOUNTANTS[name].holds_for == "every pair")


LOCAL = (
    "Whatever two updates a user may have, no report is more than e^ε₀ times as likely with one as "
    "with the other."
)
GAUSSIAN = (
    "The reports of any two updates of a user are rounded normal vectors with standard deviation "
    "zC in each entry, and their means are at most 2C apart."
)


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [(RandomisedResponse, LOCAL), (LdpSgd, LOCAL), (GaussianMechanism, GAUSSIAN)],
)
def test_a_mechanism_guarantees_what_is_measured_of_its_reports(mechanism, said):
    assert guarantee_of(mechanism) == said
