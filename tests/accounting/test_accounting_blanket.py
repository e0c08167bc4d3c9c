"""`blanket`: its identity, its worst pair, the whole mechanism, and what must hold in general."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, privacy_accountant_test
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import accounting
from accounting.blanket_accountant import (
    BlanketAccountant,
    _against_zero,
    _opposite,
    _zero_against,
    divergence,
)

REPLACE, ZERO_OUT = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
EVENT = accounting.ShuffledCheckInBlanketGaussianDpEvent
SETTINGS = [
    (1, 0.5, 1.0, 0.5, 1.3),
    (2, 0.4, 0.7, 0.6, 2.0),
    (3, 0.7, 1.0, 0.3, 1.1),
    (4, 1.0, 2.0, 0.5, 1.2),
    (4, 0.9, 0.6, 0.2, 4.0),
]


class TestDpAccountingsOwnClaims(privacy_accountant_test.PrivacyAccountantTest):
    def _make_test_accountants(self):
        return [BlanketAccountant(REPLACE), BlanketAccountant(ZERO_OUT)]


def spent(event, rounds=1, relation=REPLACE):
    accountant = BlanketAccountant(relation)
    accountant.compose(event, rounds)
    return accountant


def handed_over(setting, x, other, rng, draws=150_000):
    """H_α when the others' data is given away, from the densities of what is left.

    Section 1 of docs/theory-blanket.md, before any identity: given D others who sent data, each of
    N = n-1-D may be a blanket, and the k reports left are in random order. Mean, and five errors.
    """
    n, rate, z, beta, alpha = setting
    x, other = np.array(x, dtype=float), np.array(other, dtype=float)
    rho = rate * beta / (1 - rate * (1 - beta))
    mean = variance = 0.0
    for d in range(n):
        chance = stats.binom.pmf(d, n - 1, rate * (1 - beta))
        left = n - 1 - d
        for k in range(left + 2):
            y = rng.standard_normal((draws, k, x.size)) * z

            def density(v, y=y, k=k, left=left):
                total = np.full(draws, (1 - rate) * stats.binom.pmf(k, left, rho))
                if k:
                    ratio = np.exp(y @ v / z**2 - v @ v / 2 / z**2)
                    mixed = (beta + (1 - beta) * ratio).mean(axis=1)
                    total = total + rate * stats.binom.pmf(k - 1, left, rho) * mixed
                return total

            sample = np.maximum(density(x) - alpha * density(other), 0.0)
            mean += chance * sample.mean()
            variance += chance**2 * sample.var() / draws
    return mean, 5 * math.sqrt(variance)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("pair", "x", "other"),
    [(_opposite, [1.0], [-1.0]), (_against_zero, [1.0], [0.0]), (_zero_against, [0.0], [1.0])],
)
def test_the_identity(setting, pair, x, other):
    n, rate, z, beta, alpha = setting
    value = divergence(EVENT(n, rate, z, beta), alpha, pair)
    truth, error = handed_over(setting, x, other, np.random.default_rng(3))
    assert truth - error <= value <= truth * 1.002 + error + 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_no_pair_in_the_ball_exceeds_opposite_ones(setting, dimension):
    n, rate, z, beta, alpha = setting
    worst = divergence(EVENT(n, rate, z, beta), alpha, _opposite)
    rng = np.random.default_rng(dimension)
    for _ in range(6):
        pair = rng.standard_normal((2, dimension))
        pair *= rng.random((2, 1)) ** (1 / 4) / np.linalg.norm(pair, axis=1, keepdims=True)
        truth, error = handed_over(setting, pair[0], pair[1], rng, 30_000)
        assert truth - error <= worst


def test_nearly_the_worst_pair_is_nearly_as_bad():
    """The comparison above can fail: a pair close to the worst comes close to the bound."""
    setting = SETTINGS[2]
    n, rate, z, beta, alpha = setting
    worst = divergence(EVENT(n, rate, z, beta), alpha, _opposite)
    truth, error = handed_over(setting, [0.99, 0.0], [-0.98, 0.05], np.random.default_rng(1))
    assert 0.95 * worst - error < truth < worst + error


def mechanism_divergence(setting, x, other, rest, rng, draws=40_000):
    """H_α of the real mechanism: what the server sees with the others' records in `rest`."""
    n, rate, z, beta, alpha = setting

    def report_density(record, y):
        d = y.shape[-1]
        scale = (2 * math.pi * z * z) ** (-d / 2)
        blank = np.exp(-np.sum(y**2, -1) / 2 / z**2)
        data = np.exp(-np.sum((y - record) ** 2, -1) / 2 / z**2)
        return scale * (beta * blank + (1 - beta) * data)

    def density(records, y):
        """Of k reports in random order, k = y.shape[1]: all who may have sent them."""
        k = y.shape[1]
        total = np.zeros(len(y))
        each = [[report_density(r, y[:, i]) for i in range(k)] for r in records]
        for senders in itertools.permutations(range(n), k):
            term = np.ones(len(y))
            for place, sender in enumerate(senders):
                term = term * each[sender][place]
            total += term / math.factorial(k)
        return rate**k * (1 - rate) ** (n - k) * total

    left, right = [np.array([v, *rest]) for v in (x, other)]
    mean = variance = 0.0
    for k in range(n + 1):
        chance = stats.binom.pmf(k, n, rate)
        if chance == 0.0:
            continue
        # k reports under the right-hand records, in random order.
        senders = np.argsort(rng.random((draws, n)), axis=1)[:, :k]
        kept = rng.random((draws, k)) >= beta
        y = right[senders] * kept[..., None] + z * rng.standard_normal((draws, k, right.shape[1]))
        sample = np.maximum(density(left, y) / density(right, y) - alpha, 0.0)
        mean += chance * sample.mean()
        variance += chance**2 * sample.var() / draws
    return mean, 5 * math.sqrt(variance)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_real_mechanism_with_others_anywhere_stays_below(setting):
    n, rate, z, beta, alpha = setting
    bound = divergence(EVENT(n, rate, z, beta), alpha, _opposite)
    rng = np.random.default_rng(11)
    x, other = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
    angles = np.linspace(0, 2 * math.pi, n, endpoint=False)[1:]
    placements = {
        "at x": np.tile(x, (n - 1, 1)),
        "at the other": np.tile(other, (n - 1, 1)),
        "at zero": np.zeros((n - 1, 2)),
        "across": np.tile([0.0, 1.0], (n - 1, 1)),
        "around": np.stack([np.cos(angles), np.sin(angles)], axis=1),
    }
    for rest in placements.values():
        truth, error = mechanism_divergence(setting, x, other, list(rest), rng)
        assert truth - error <= bound


def test_reference_value():
    """Below the 0.099 of a bound that fixes the range of report counts first."""
    accountant = spent(EVENT(60_000, 0.1, 5.0, 0.5), 5540)
    assert accountant.get_epsilon(1 / 60_000) == pytest.approx(0.0784, rel=3e-3)
    assert spent(EVENT(60_000, 0.1, 5.0, 0.2), 5540).get_epsilon(1 / 60_000) < 0.287
    assert spent(EVENT(60_000, 0.1, 5.0, 0.1), 5540).get_epsilon(1 / 60_000) < 0.502


def test_one_user_among_nobody_by_quadrature():
    n, rate, z, beta, alpha = 1, 0.7, 0.8, 0.4, 1.7
    t = np.linspace(-9, 12, 200_001)
    ratio = np.exp(t / z - 0.5 / z**2) - alpha * np.exp(-t / z - 0.5 / z**2)
    inside = np.maximum(beta * (1 - alpha) + (1 - beta) * ratio, 0) * stats.norm.pdf(t)
    truth = rate * float(np.sum(inside)) * (t[1] - t[0])
    value = divergence(EVENT(n, rate, z, beta), alpha, _opposite)
    assert truth * (1 - 1e-6) <= value <= truth * 1.001


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 10**5),
    st.floats(0.01, 0.9),
    st.floats(1.0, 30),
    st.floats(0.05, 0.9),
    st.integers(1, 1000),
    st.sampled_from(["users", "rate", "noise", "beta", "rounds"]),
)
def test_monotone(users, rate, noise, beta, rounds, which):
    event, rounds_of_safer = EVENT(users, rate, noise, beta), rounds
    safer = {
        "users": EVENT(2 * users, rate, noise, beta),
        "rate": EVENT(users, 0.8 * rate, noise, beta),
        "noise": EVENT(users, rate, 1.2 * noise, beta),
        "beta": EVENT(users, rate, noise, min(1.3 * beta, 0.95)),
        "rounds": event,
    }[which]
    if which == "rounds":
        rounds_of_safer = max(rounds // 2, 1)
    worse = spent(event, rounds).get_epsilon(1e-5)
    assert spent(safer, rounds_of_safer).get_epsilon(1e-5) <= worse * 1.01


def test_zero_out_is_easier_than_replace_and_local_is_above_both():
    event, delta = EVENT(500, 0.3, 1.5, 0.4), 1e-6
    replace, zero_out = (spent(event, 20, r).get_epsilon(delta) for r in (REPLACE, ZERO_OUT))
    local = accounting.make_accountant("local", "replace").epsilon_after(event, delta, 20)
    assert 0.0 < zero_out < replace < local


def test_extreme_parameters_give_a_number_or_infinity():
    for event in (
        EVENT(10**9, 1.0, 1.0, 0.999),
        EVENT(3, 1e-6, 50.0, 1e-3),
        EVENT(1, 1.0, 0.2, 0.01),
        EVENT(10**6, 0.01, 1000.0, 0.5),
    ):
        for relation in (REPLACE, ZERO_OUT):
            epsilon = spent(event, 3, relation).get_epsilon(1e-12)
            assert epsilon >= 0.0
            local = accounting.make_accountant(
                "local", "replace" if relation is REPLACE else "zero-out"
            ).epsilon_after(event, 1e-12, 3)
            assert epsilon <= local
    assert spent(EVENT(10, 0.5, 0.0, 0.5)).get_epsilon(1e-5) == math.inf


def test_a_round_of_another_mechanism_is_refused():
    with pytest.raises(Exception, match="blanket prices ShuffledCheckInBlanketGaussianDpEvent"):
        spent(accounting.ShuffledCheckInGaussianDpEvent(10, 0.5, 1.0))
