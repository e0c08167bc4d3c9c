"""What docstrings guarantee: the very sentences, and that they hold of what is sent."""

import inspect
import math
import re

import numpy as np
import pytest

from rounds import words
from shufl.accounting import ACCOUNTANTS
from shufl.protocol import GaussianMechanism, LdpSgd, RandomisedResponse

REPORTS = 20_000


def guarantee_of(kind):
    """The section of a docstring, in one line."""
    (said,) = re.findall(r"^Guarantee:\n((?: {4}.+\n?)+)", inspect.getdoc(kind), re.M)
    return " ".join(said.split())


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_an_accountant_guarantees_what_tables_print(name):
    assert guarantee_of(ACCOUNTANTS[name]) == f"ε holds for {ACCOUNTANTS[name].covers}."
    every = guarantee_of(ACCOUNTANTS[name]).startswith("ε holds for every pair of")
    assert every == (ACCOUNTANTS[name].holds_for == "every pair")


def reports_of(mechanism, update):
    """Of one user in as many rounds, of shape (REPORTS, d)."""
    draws = words(REPORTS, mechanism.draws(len(update)))
    made = np.stack([mechanism.report(update, each) for each in draws])
    return made * mechanism.unit(len(update))


def check_ratio(one, other, epsilon):
    """That no share of reports is above e^ε times the other, but for five standard deviations."""
    for high, low in ((one, other), (other, one)):
        bound = math.exp(epsilon) * low
        spread = np.sqrt((high + math.exp(2 * epsilon) * low) / REPORTS)
        assert np.all(high <= bound + 5 * spread)


LOCAL = (
    "Whatever two updates a user may have, no report is more than e^ε₀ times as likely with one as "
    "with the other."
)


def test_randomised_response_guarantees_its_local_epsilon():
    mechanism = RandomisedResponse(categories=3, local_epsilon=1.0)
    assert guarantee_of(RandomisedResponse) == LOCAL
    shares = []
    for own in ([1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]):
        update = (1 / 3 - np.array(own)).astype(np.float32)
        chosen = reports_of(mechanism, update).argmin(axis=1)  # the category that is reported
        shares.append(np.bincount(chosen, minlength=3) / REPORTS)
    for one in shares:
        for other in shares:
            check_ratio(one, other, mechanism.local_epsilon)
    assert shares[0][0] / shares[1][0] > 0.9 * math.e  # and no less is stated than is lost


def test_ldp_sgd_guarantees_its_local_epsilon():
    mechanism = LdpSgd(noise_multiplier=2.0)
    assert guarantee_of(LdpSgd) == LOCAL
    along = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    shares = []
    for update in (along, -along, 0.3 * along, 0 * along):
        sides = reports_of(mechanism, update)[:, 0] > 0
        shares.append(np.array([sides.mean(), 1 - sides.mean()]))
    for one in shares:
        for other in shares:
            check_ratio(one, other, mechanism.local_epsilon)
    assert shares[0][0] / shares[1][0] > 0.9 * math.exp(mechanism.local_epsilon)


def test_gaussian_reports_guarantee_their_distance_and_their_noise():
    assert guarantee_of(GaussianMechanism) == (
        "Two updates of a user, whatever they are, give reports of normal law with standard "
        "deviation zC in each entry, rounded, whose means are at most 2C apart."
    )
    mechanism = GaussianMechanism(clip_norm=0.5, noise_multiplier=2.0)
    update = np.array([1e30, 0.0], dtype=np.float32)  # clipped, whatever it is
    one, other = (reports_of(mechanism, each) for each in (update, -update))
    for made in (one, other):
        assert made.std(axis=0) == pytest.approx([1.0, 1.0], rel=0.03)
    apart = np.linalg.norm(one.mean(axis=0) - other.mean(axis=0))
    assert apart <= 2 * 0.5 + 5 * math.sqrt(2 / REPORTS)
