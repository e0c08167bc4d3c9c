"""Events, accountants, rdp_bounds."""

import collections
import itertools
import math
import re

import attrs
import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import gaussian_delta, moment
from dp_accounting import privacy_accountant_test
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from nights import by_night
from rounds import check_in, everyone, fixed_size, with_noise
from shufl import accounting, protocol
from shufl.accounting.accountants.renyi import CappedTheorem3Accountant
from shufl.accounting.numerics import renyi_divergence as rdp_bounds
from shufl.protocol.text import rounded_up

RELATION = dp_accounting.NeighboringRelation
CHECK_IN = check_in(60_000, 0.1, 5.0)
EVERYONE = everyone(100, 3.0)
FIXED = fixed_size(100, 30, 3.0)
BLANKETS = check_in(60_000, 0.1, 5.0, 1800.0)
SUM = protocol.Summed(60_000, protocol.CheckIn(0.1), CHECK_IN.mechanism, central_noise=20.0)
ALL_EVENTS = [CHECK_IN, EVERYONE, FIXED, BLANKETS, SUM]
ALL = list(accounting.ACCOUNTANTS)


def priced(name, events=ALL_EVENTS):
    """Those of the events that an accountant prices."""
    return [e for e in events if accounting.make_accountant(name).supports(e)]


class TestDpAccountingsOwnClaims(privacy_accountant_test.PrivacyAccountantTest):
    def _make_test_accountants(self):
        return [
            accounting.make_accountant(name, adjacency)
            for name in accounting.ACCOUNTANTS
            for adjacency in accounting.ADJACENCIES
        ]


@pytest.mark.parametrize("event", ALL_EVENTS)
def test_events_round_trip_through_named_tuples(event):
    assert dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple()) == event
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.users = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: check_in(10, 1.3, 1.0),
         r"check-in rate must lie in \(0, 1\], got 1.3"),
        (lambda: check_in(10, math.nan, 1.0), "got nan"),
        (lambda: check_in(0, 0.5, 1.0),
         "number of users must be at least 1, got 0"),
        (lambda: check_in(True, 0.5, 1.0), "must be an integer"),
        (lambda: everyone(10, -1.0),
         r"noise_multiplier must be a number in \[0, 1e15\], got -1.0"),
        (lambda: everyone(10, "3"), "must be a number"),
        (lambda: fixed_size(10, 11, 1.0),
         r"number of reports must be in 0..10, got 11"),
        (lambda: check_in(10, 0.5, 1.0, -1.0),
         r"shuffler blankets must lie in \[0, inf\), got -1.0"),
        (lambda: check_in(10, 0.5, 1.0, math.nan), "got nan"),
        (lambda: check_in(10, 0.5, 1.0, True), "a number"),
    ],
)  # fmt: skip
def test_an_event_out_of_range_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "crowd" else name for name in ALL],
)
def test_every_accountant_prices_each_of_its_events_nested_or_not(name):
    for event in priced(name):
        nested = dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event, 3), dp_accounting.NoOpDpEvent(), event]
        )
        accountant = accounting.make_accountant(name)
        assert accountant.supports(nested)
        left = accountant.compose(nested).get_epsilon(1e-5)
        assert left == accounting.make_accountant(name).compose(event, 4).get_epsilon(1e-5)
        assert 0 < left < math.inf
        recorded = accounting.make_accountant(name).compose(accountant.ledger)
        assert recorded.get_epsilon(1e-5) == left


@pytest.mark.parametrize("name", ALL)
def test_other_mechanisms_and_add_or_remove_are_refused_by_name(name):
    accountant = accounting.make_accountant(name)
    assert not accountant.supports(dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(dp_accounting.UnsupportedEventError, match="GaussianDpEvent"):
        accountant.epsilon_after(dp_accounting.GaussianDpEvent(1.0), 1e-5)
    with pytest.raises(ValueError, match="ADD_OR_REMOVE_ONE"):
        accounting.ACCOUNTANTS[name](RELATION.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="adjacency must be"):
        accounting.make_accountant(name, "add")
    with pytest.raises(ValueError, match="accountant must be"):
        accounting.make_accountant("moments")


def test_events_of_others_are_refused_in_one_line_that_names_ones_own(fixed_size_only):
    accountant = accounting.make_accountant(fixed_size_only)
    for event in ALL_EVENTS:
        assert accountant.supports(event) == (event is FIXED)
    with pytest.raises(dp_accounting.UnsupportedEventError) as caught:
        accountant.epsilon_after(CHECK_IN, 1e-5)
    mechanisms = "GaussianMechanism, LdpSgd, RandomisedResponse"
    own = f"fixed-size-only prices Shuffled and Summed rounds of FixedSize, {mechanisms} only"
    assert f"{own}, got Shuffled(" in str(caught.value)


def test_an_accountant_is_asked_itself_what_it_prices(fixed_size_only):
    others = ("theorem3", "rdp", "pld"), ("crowd", "local")
    for event, added, has in ((CHECK_IN, (), "without"), (BLANKETS, ("blanket",), "with")):
        able = accounting.accountants_for(event)
        assert able == (*others[0], *added, *others[1])
        assert able[0] == accounting.check_accountant("theorem3", event) == "theorem3"
        with pytest.raises(ValueError, match="'local', got 'fixed-size-only'") as caught:
            accounting.check_accountant(fixed_size_only, event)
        assert f"rounds {has} shuffler blankets must be 'theorem3' or" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert accounting.check_accountant(fixed_size_only, FIXED) == fixed_size_only
    with pytest.raises(ValueError, match="accountant must be 'theorem3' or"):
        accounting.check_accountant("moments", CHECK_IN)


@pytest.mark.parametrize("name", ["theorem3", "rdp", "pld", "crowd", "local"])
def test_these_accountants_do_not_count_on_the_shufflers_blankets(name):
    with_blankets, without = (
        accounting.make_accountant(name).compose(event, 9) for event in (BLANKETS, CHECK_IN)
    )
    assert with_blankets.get_epsilon(1e-5) == without.get_epsilon(1e-5)
    assert with_blankets.get_delta(0.01) == without.get_delta(0.01)


# Where the others matter, zero-out is no rescaled replacement: they are C from zero either way.
@pytest.mark.parametrize("name", ["theorem3", "rdp", "local"])
def test_replacing_a_record_needs_twice_the_noise_of_zeroing_it_out(name):
    for event in priced(name, [each for each in ALL_EVENTS if each != SUM]):  # no such pair there
        doubled = with_noise(event, 2 * event.mechanism.noise_multiplier)
        replace = accounting.make_accountant(name, "replace").compose(doubled, 7)
        zero_out = accounting.make_accountant(name, "zero-out").compose(event, 7)
        assert replace.get_epsilon(1e-5) == zero_out.get_epsilon(1e-5)


def test_reference_values_of_the_published_setting():
    values = {}
    for name in ("theorem3", "rdp"):
        accountant = accounting.make_accountant(name, "zero-out").compose(CHECK_IN, 5540)
        values[name] = accountant.get_epsilon(1 / 60_000)
    assert values["theorem3"] == pytest.approx(9.617, abs=0.001)
    assert values["rdp"] == pytest.approx(0.06079, abs=5e-6)


@pytest.mark.parametrize(
    ("event", "rate"), [(check_in(200, 0.5, 5.0), 0.5), (fixed_size(200, 100, 5.0), None)]
)
def test_a_capped_theorem_3_costs_no_more_than_when_everyone_reports(event, rate):
    def log_moments(kind):
        return kind(RELATION.REPLACE_SPECIAL, 12).compose(event).rdp * np.arange(1, 12)

    everyone = [float(mp.log(moment(200, 5.0, order))) for order in range(2, 13)]
    if rate is not None:  # the theorem that the cap rests on, from the defining sums
        assert all(moment(200, 5.0, k, rate) < moment(200, 5.0, k) for k in range(2, 13))
    capped, printed = map(log_moments, (CappedTheorem3Accountant, accounting.Theorem3Accountant))
    np.testing.assert_allclose(capped[1:], everyone[1:], rtol=3e-10)
    assert capped[0] <= everyone[0] * (1 + 1e-9)
    assert np.all(printed[1:] > 2 * np.array(everyone[1:]))


@given(
    users=st.integers(1, 10**5),
    rate=st.floats(1e-4, 1.0),
    noise=st.floats(0.3, 30.0),
    rounds=st.integers(1, 10**5),
    delta=st.floats(1e-12, 0.5),
)
@example(57, 0.00036, 3.4466, 1, 1e-5)  # the printed form alone is less
def test_theorem_3_never_claims_less_than_the_exact_moments(users, rate, noise, rounds, delta):
    event = check_in(users, rate, noise)
    published = accounting.Theorem3Accountant(max_order=60).compose(event, rounds)
    exact = accounting.CheckInRdpAccountant(max_order=60).compose(event, rounds)
    assert np.all(published.rdp >= exact.rdp)
    assert exact.epsilon_after(event, delta) >= exact.get_epsilon(delta)


@pytest.mark.parametrize("kind", [accounting.Theorem3Accountant, accounting.CheckInRdpAccountant])
@pytest.mark.parametrize("users", [1, 500, 10**6])
def test_certain_participation_is_priced_by_theorem_1(kind, users):
    rounds = everyone(users, 4.0), fixed_size(users, users, 4.0), check_in(users, 1 - 1e-14, 4.0)
    all_report, all_drawn, nearly_all = (kind(max_order=64).compose(each).rdp for each in rounds)
    np.testing.assert_allclose(all_drawn, all_report, rtol=1e-9)
    if kind is accounting.CheckInRdpAccountant:  # just below certainty it is another recurrence
        np.testing.assert_allclose(nearly_all, all_report, rtol=1e-8)


@given(
    # For small divergences r dp_accounting computes 1 - e^-r with few digits (below 1e-16, none).
    rdp=st.lists(st.floats(1e-6, 1e4) | st.just(0.0) | st.just(math.inf), min_size=3, max_size=40),
    delta=st.floats(0, 1) | st.floats(1e-15, 1e-3),
    epsilon=st.floats(0, 1e3),
)
def test_conversion_is_that_of_dp_accounting(rdp, delta, epsilon):
    orders = np.arange(2.0, 2.0 + len(rdp))
    got = rdp_bounds.epsilon_from_rdp(orders, np.array(rdp), delta)[0]
    assert got == pytest.approx(float(compute_epsilon(orders, rdp, delta)[0]), rel=1e-12)
    with np.errstate(all="ignore"):
        got = rdp_bounds.delta_from_rdp(orders, np.array(rdp), epsilon)
        assert got == pytest.approx(float(compute_delta(orders, rdp, epsilon)[0]), rel=1e-8)


@pytest.mark.parametrize("wrong", [-1e-9, math.nan])
def test_conversion_refuses_what_dp_accounting_calls_zero(wrong):
    for convert in (rdp_bounds.epsilon_from_rdp, rdp_bounds.delta_from_rdp):
        with pytest.raises(ValueError, match="non-negative"):
            convert(np.array([2.0]), np.array([wrong]), 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_epsilon_and_delta_undo_each_other(name):
    event = priced(name, [FIXED, BLANKETS, SUM])[0]
    accountant = accounting.make_accountant(name).compose(event, 20)
    epsilon = accountant.get_epsilon(1e-6)
    assert accountant.get_delta(epsilon) == pytest.approx(1e-6, rel=1e-6)
    assert accountant.get_delta(math.inf) == 0


def law_of_shifts(rounds, clip_norms):
    """{μ²: chance} over a device's coins: of each (rate, noise, count) it is in K ~ Bin(T, γ)."""
    law = {mp.mpf(0): mp.mpf(1)}
    for rate, noise, count in rounds:
        step, chance = (clip_norms / mp.mpf(noise)) ** 2, mp.mpf(rate)
        before, law = law, collections.defaultdict(mp.mpf)
        for k in range(count + 1):
            weight = mp.binomial(count, k) * chance**k * (1 - chance) ** (count - k)
            for squared, other in before.items() if weight > mp.mpf("1e-40") else ():
                law[squared + step * k] += weight * other
    return law


def mixed_delta(law, epsilon):
    """E[δ(ε)] of Gaussians whose squared distance is random, given as {μ²: chance}."""
    return mp.fsum(
        chance * gaussian_delta(mp.sqrt(squared), epsilon)
        for squared, chance in law.items()
        if squared
    )


@pytest.mark.parametrize(
    ("rounds", "delta", "adjacency", "printed"),
    [
        *(
            ([(1.0, noise, count)], delta, "zero-out", None)
            for noise, count, delta in itertools.product(
                (0.5, 5.0, 300.0), (1, 50, 5540), (1e-9, 1e-2)
            )
        ),
        ([(1.0, 1.0, 1), (1.0, 2.0, 2)], 1e-5, "zero-out", None),
        *by_night(([(0.1, 5.0, 5540)], 1 / 60_000, "zero-out", "30.18")),
        ([(0.1, 30.0, 1000)], 1e-5, "replace", "2.807"),
        ([(0.01, 1.0, 1)], 1e-6, "replace", None),
        ([(0.3, 0.5, 20)], 1e-12, "zero-out", None),
        ([(0.9, 8.0, 400)], 1e-20, "replace", None),
        ([(0.25, 1.0, 3), (0.5, 2.0, 4), (1.0, 4.0, 2)], 1e-5, "zero-out", None),
    ],
)  # fmt: skip
def test_local_is_the_mean_over_a_devices_own_coins(rounds, delta, adjacency, printed):
    accountant = accounting.make_accountant("local", adjacency)
    for rate, noise, count in rounds:
        accountant.compose(check_in(1000, rate, noise), count)
    clip_norms = 2 if adjacency == "replace" else 1
    law = law_of_shifts(rounds, clip_norms)
    always = all(rate == 1.0 for rate, _, _ in rounds)  # one Gaussian, in closed form
    epsilon, loose = accountant.get_epsilon(delta), 1e-8 if always else 2e-4 * len(rounds) ** 2
    assert mixed_delta(law, epsilon) <= delta
    assert epsilon == 0 or mixed_delta(law, epsilon * (1 - loose) - 1e-11) > delta
    asked = 0.7 if always else 0.7 * epsilon
    truth, found = mixed_delta(law, asked), accountant.get_delta(asked)
    most = truth * (1 + mp.mpf("1e-7" if always else "0.01"))
    assert truth <= found + 1e-300 and found <= most + mp.mpf("1e-300")
    assert printed is None or rounded_up(epsilon) == printed
    if not always:
        said = r"^([\d.e+]+) for a user whose coins all say yes$"
        (most,) = map(mp.mpf, re.findall(said, accountant.note(delta)))
        steps = law_of_shifts([(1.0, noise, count) for _, noise, count in rounds], clip_norms)
        shift = mp.sqrt(max(steps))
        assert gaussian_delta(shift, most) <= delta < gaussian_delta(shift, most * mp.mpf("0.998"))


def test_a_round_of_fixed_size_is_one_with_the_user_and_none_where_nobody_reports():
    certain, drawn = (
        accounting.make_accountant("local").compose(event, 2).compose(fixed_size(50, 0, 1.0), 9)
        for event in (everyone(50, 4.0), fixed_size(50, 1, 4.0))
    )
    assert certain.get_epsilon(1e-5) == drawn.get_epsilon(1e-5) > 0


def test_local_of_a_million_rounds_is_no_less_than_the_mean():
    rounds, rate, noise, delta = 10**6, 1e-3, 50.0, 1e-12
    epsilon = accounting.make_accountant("local").epsilon_after(
        check_in(10, rate, noise), delta, rounds
    )
    coins = stats.binom(rounds, rate)
    counts = np.arange(300, 2000)
    shifts = 2.0 / noise * np.sqrt(counts)

    def below(epsilon):  # what other counts have is at least 0
        near = stats.norm.cdf(shifts / 2 - epsilon / shifts)
        far = np.exp(epsilon + stats.norm.logcdf(-shifts / 2 - epsilon / shifts))
        return float(np.sum(coins.pmf(counts) * (near - far)))

    assert below(epsilon) <= delta < below(epsilon * (1 - 2e-4))


@pytest.mark.parametrize("name", ALL)
def test_no_noise_is_not_private(name):
    for event in priced(name):
        silent = with_noise(event, 0.0)
        accountant = accounting.make_accountant(name).compose(silent)
        assert accountant.get_epsilon(1e-5) == math.inf
        assert accountant.get_delta(10.0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "room"), [("blanket", 1.005), *by_night(("pld", 1.002), ("crowd", 1.02))]
)
@settings(max_examples=settings().max_examples // 4)
@given(
    users=st.integers(2, 10**5),
    rate=st.floats(1e-3, 0.9),
    noise=st.floats(0.9, 30.0),
    log_blankets=st.floats(1.0, 5.0),
    rounds=st.integers(1, 1000),
    log_delta=st.floats(-9.0, -1.5),
    which=st.sampled_from(["users", "rate", "noise", "blankets", "rounds", "delta", "adjacency"]),
)
def test_what_is_safer_costs_no_more_and_nothing_more_than_local(
    name, room, users, rate, noise, log_blankets, rounds, log_delta, which
):
    def epsilon(users, rate, noise, blankets, rounds, delta, adjacency, name=name):
        event = check_in(users, rate, noise, blankets)
        return accounting.make_accountant(name, adjacency).epsilon_after(event, delta, rounds)

    blankets, delta = 10.0**log_blankets, 10.0**log_delta
    about = {"users": users, "rate": rate, "noise": noise, "blankets": blankets}
    about |= {"rounds": rounds, "delta": delta, "adjacency": "replace"}
    safer = {"users": 2 * users, "rate": 0.7 * rate, "noise": 1.2 * noise}
    safer |= {"blankets": 1.5 * blankets, "rounds": max(rounds // 2, 1), "delta": 1.3 * delta}
    found = epsilon(**about)
    assert epsilon(**about | {which: (safer | {"adjacency": "zero-out"})[which]}) <= found * room
    assert found <= epsilon(**about, name="local")


@pytest.mark.parametrize("name", ALL)
def test_asking_before_each_round_changes_nothing(name):
    event = priced(name)[0]
    accountant = accounting.make_accountant(name).compose(event, 3)
    before = accountant.get_epsilon(1e-6), accountant.ledger
    after = {accountant.epsilon_after(event, 1e-6) for _ in range(5)}
    assert len(after) == 1 and after.pop() > before[0]
    assert (accountant.get_epsilon(1e-6), accountant.ledger) == before


@pytest.mark.parametrize("name", ALL)
def test_an_infinite_epsilon_has_a_reason_in_one_line(name):
    accountant = accounting.make_accountant(name)
    assert accountant.note(1e-5) is None
    event = priced(name, [FIXED, BLANKETS, SUM])[0]
    accountant.compose(event)
    assert accountant.get_epsilon(1e-5) < math.inf
    assert accountant.get_epsilon(0.0) == math.inf and "delta 0" in accountant.note(0.0)
    accountant.compose(with_noise(event, 0.0))
    reason = accountant.note(1e-5)
    assert "no noise" in reason and "\n" not in reason
    with pytest.raises(ValueError, match="delta must lie"):
        accountant.note(2.0)


def test_what_limits_a_renyi_accountant_is_said_and_more_orders_help():
    few, many = (
        accounting.CheckInRdpAccountant(max_order=most).compose(CHECK_IN) for most in (20, 200)
    )
    assert "last one computed (20)" in few.note(1e-6)
    assert many.get_epsilon(1e-6) < few.get_epsilon(1e-6)
    assert accounting.CheckInRdpAccountant(max_order=3).get_epsilon(1e-6) == 0
    published = accounting.make_accountant("theorem3", "zero-out").compose(CHECK_IN, 5540)
    assert "order is 2" in published.note(1 / 60_000)
    exact = accounting.make_accountant("rdp", "zero-out").compose(CHECK_IN, 5540)
    assert exact.note(1 / 60_000) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "rounds"), [(0.07, 6 * 10**8), *by_night((1.0, 10**17), (0.07, 2**29))]
)
def test_more_loss_than_floats_hold_is_never_reported_as_none(noise, rounds):
    event = check_in(100, 0.5, noise, 1.0)
    local = accounting.make_accountant("local").epsilon_after(event, 1e-6, rounds)
    assert local > 1e10
    for name in accounting.accountants_for(event):
        assert accounting.make_accountant(name).epsilon_after(event, 1e-6, rounds) > 0.1 * local


@pytest.mark.parametrize("name", ALL)
def test_a_count_that_is_negative_or_not_whole_is_refused(name):
    event = priced(name)[0]
    for count in (-1, 0.5, True):
        with pytest.raises(ValueError, match="count must be"):
            accounting.make_accountant(name).epsilon_after(event, 1e-5, count)
