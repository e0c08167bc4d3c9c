"""δ far below what is usual: no number falls off a cliff, and pure ε₀ reports never exceed ε₀T."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation

from nights import by_night
from rounds import check_in, fixed_size
from shufl import accounting, protocol
from shufl.accounting import (
    BlanketAccountant,
    CheckInRdpAccountant,
    CrowdAccountant,
    LocalAccountant,
    PldAccountant,
)
from shufl.protocol.mechanisms import LdpSgd, RandomisedResponse

pytestmark = pytest.mark.slow

RELATIONS = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
DELTAS = [10.0**-exponent for exponent in (5, 12, 20, 40, 100)]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("accountant", "event", "rounds"),
    [
        (PldAccountant, check_in(10_000, 0.1, 4.0), 100),
        (LocalAccountant, check_in(10, 0.2, 3.0), 50),
        *by_night(
            (BlanketAccountant, check_in(10_000, 0.1, 4.0, 1000.0), 100),
            (PldAccountant, fixed_size(100, 60, 2.0), 10),
            (CrowdAccountant, check_in(10_000, 0.1, 4.0), 100),
        ),
    ],
)
def test_epsilon_rises_evenly_as_delta_falls(accountant, event, rounds, relation):
    spent = accountant(relation).compose(event, rounds)
    found = np.array([spent.get_epsilon(delta) for delta in DELTAS])
    assert np.all(np.diff(found) > 0.0)
    alone = LocalAccountant(relation).compose(event, rounds)
    for delta, epsilon in zip(DELTAS, found, strict=True):
        assert epsilon <= alone.get_epsilon(delta) * (1 + 1e-12)
        assert spent.get_delta(epsilon) <= 2.0 * delta
    if accountant is PldAccountant:
        exact = CheckInRdpAccountant(relation).compose(event, rounds)
        assert np.all(found <= [exact.get_epsilon(delta) for delta in DELTAS])


def test_many_users_keep_their_privacy_at_a_tiny_delta():
    """Numbers of every kind at 1e-40 were 1915, those of one user whom nobody hides."""
    event = check_in(60_000, 0.1, 5.0, 500.0)
    for name in ("pld", "crowd", "blanket"):
        accountant = accounting.ACCOUNTANTS[name]().compose(event, 100)
        assert accountant.get_epsilon(1e-40) < 8.0 * accountant.get_epsilon(1e-5) < 1.0


@pytest.mark.parametrize("rate", [1e-300, 1e-200, 1e-40, 1e-20])
def test_a_user_who_hardly_ever_checks_in_loses_hardly_anything(rate):
    spent = LocalAccountant().compose(check_in(10, rate, 2.0), 3)
    assert 0.0 < spent.get_delta(0.3) <= 3 * max(rate, 1e-290)
    assert spent.get_epsilon(4 * max(rate, 1e-290)) == 0.0


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    "mechanism",
    [RandomisedResponse(categories=10, local_epsilon=2.0), LdpSgd(noise_multiplier=1.5)],
)
def test_pure_reports_lose_at_most_their_own_epsilon_each(mechanism, relation):
    event = protocol.Shuffled(1000, protocol.CheckIn(0.5), mechanism, 100.0)
    most = LocalAccountant(relation).compose(event, 10).get_epsilon(0.0)
    if isinstance(mechanism, RandomisedResponse):
        assert most == pytest.approx(20.0)
    for accountant in (LocalAccountant, BlanketAccountant, CrowdAccountant):
        spent = accountant(relation).compose(event, 10)
        found = [spent.get_epsilon(delta) for delta in (*DELTAS, 1e-200, 0.0)]
        assert found == sorted(found) and found[-1] == most
        assert spent.get_delta(most * 1.0001) == 0.0


def test_no_epsilon_is_known_at_delta_zero_for_gaussian_noise():
    for accountant in (PldAccountant, CrowdAccountant, LocalAccountant):
        for event in (check_in(10, 0.5, 3.0), check_in(10, 1e-300, 2.0)):  # even if δ underflows
            spent = accountant().compose(event, 2)
            assert spent.get_epsilon(0.0) == float("inf")
