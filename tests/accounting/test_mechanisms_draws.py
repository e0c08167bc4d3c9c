"""Words that stand for draws: every decision has the probability of real numbers, to the last bit.

The oracles are mpmath's inverse at 100 digits, fractions, and real draws of the missing bits.
"""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nights import by_night
from shufl.protocol.mechanisms import (
    GaussianMechanism,
    LdpSgd,
    RandomisedResponse,
    clip,
    to_normals,
)
from shufl.protocol.mechanisms.gaussian import _decide, rounded
from shufl.protocol.mechanisms.report_draws import Normal, coins, place_of

MECHANISMS = [
    GaussianMechanism(clip_norm=0.7, noise_multiplier=z) for z in (1e-12, 0.2, 1.0, 3.3, 1e6)
]


def normals_of(word: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The least and the largest draw that a word may turn out to be, by 100 digits."""
    magnitude, positive = divmod(word, 2)
    ends = [
        mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.ldexp(mpmath.mpf(magnitude + more), -63))
        for more in (0, 1)
        if magnitude + more
    ]
    ends = ends if magnitude else [*ends, mpmath.inf]
    return min(ends) if positive else -max(ends), max(ends) if positive else -min(ends)


def integers_of(mechanism: GaussianMechanism, entry: float, word: int) -> set[int]:
    """What a report of one entry may be, by 100 digits."""
    with mpmath.workdps(100):
        deviation = mpmath.mpf(mechanism.noise_multiplier) * mpmath.mpf(mechanism.clip_norm)
        values = [
            (mpmath.mpf(entry) + deviation * normal) / mpmath.mpf(mechanism.unit(1))
            for normal in normals_of(word)
        ]
        return {int(max(-32767, min(32767, mpmath.nint(value)))) for value in values}


def words_near(mechanism: GaussianMechanism, entry: float, integer: int) -> tuple[int, float]:
    """The word that the upper end of an integer's interval falls in, and how far up in it."""
    with mpmath.workdps(100):
        end = (mpmath.mpf(integer) + 0.5) * mpmath.mpf(mechanism.unit(1)) - mpmath.mpf(entry)
        end /= mpmath.mpf(mechanism.noise_multiplier) * mpmath.mpf(mechanism.clip_norm)
        beyond = mpmath.ldexp(mpmath.erfc(abs(end) / mpmath.sqrt(2)) / 2, 64)
        magnitude = int(mpmath.floor(beyond))
        return 2 * magnitude + (end > 0), float(beyond - magnitude)


@pytest.mark.parametrize("mechanism", MECHANISMS[1:], ids=str)
@pytest.mark.parametrize("entry", [0.0, 0.61, -0.69])
def test_words_next_to_the_end_of_an_integers_interval_go_to_its_two_sides(mechanism, entry):
    """Floats cannot tell them apart: some of them are one and the same float64."""
    start = entry / mechanism.unit(1)
    scale = mechanism.noise_deviation(1) / mechanism.unit(1)
    for away in (-6.9, -3.0, -0.7, 0.01, 1.3, 6.1):
        integer = round(start + away * scale)
        word, _ = words_near(mechanism, entry, integer)
        # the larger the word, the nearer is the draw to 0
        words = [word - 2, word + 2] if word & 1 else [word + 2, word - 2]
        reports = [
            int(mechanism.report(np.array([entry]), np.array([each], dtype=np.uint64))[0])
            for each in words
        ]
        assert reports == [integer + 1, integer]
        assert [integers_of(mechanism, entry, each) for each in words] == [
            {report} for report in reports
        ]
        if abs(away) < 4:
            assert np.ptp(to_normals(np.array(words, dtype=np.uint64))) < 1e-15


@pytest.mark.parametrize("away", [-7.2, 2.0, *by_night(-0.3, 8.0)])
def test_a_word_at_the_end_of_an_interval_is_decided_by_fresh_bits(away):
    mechanism, update = GaussianMechanism(noise_multiplier=1.0), np.array([0.25])
    integer = round((0.25 + away) / mechanism.unit(1))
    word, share = words_near(mechanism, 0.25, integer)
    drawn = np.full(1, word, dtype=np.uint64)
    reports = [int(mechanism.report(update, drawn)[0]) for _ in range(200)]
    assert set(reports) <= {integer, integer + 1}
    farther = reports.count(integer + 1 if word & 1 else integer)
    assert stats.binomtest(farther, 200, share).pvalue > 1e-7


@given(
    st.sampled_from(MECHANISMS),
    st.floats(-0.69, 0.69),
    st.integers(0, 2**64 - 1) | st.integers(0, 62).map(lambda bits: 3 << bits),
)
def test_a_report_is_what_a_hundred_digits_make_of_its_word(mechanism, entry, word):
    drawn = np.array([word], dtype=np.uint64)
    possible = integers_of(mechanism, entry, word)
    report = int(mechanism.report(np.array([entry]), drawn)[0])
    assert min(possible) <= report <= max(possible)


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.slow
def test_the_outermost_words_have_the_tail_of_the_law(word):
    """Beyond 9 deviations, where the 63 bits are all 0."""
    sign = 1 if word else -1
    for beyond in (9.2, 9.4):
        chance = float(stats.norm.sf(beyond) * 2**64)
        drawn = [Normal(word).exceeds(Fraction(sign * beyond)) == bool(word) for _ in range(400)]
        assert stats.binomtest(sum(drawn), 400, chance).pvalue > 1e-7
    assert Normal(word).exceeds(Fraction(0)) == bool(word)
    assert not Normal(word).exceeds(Fraction(10) ** 13)
    assert Normal(word).exceeds(-(Fraction(10) ** 13))


def test_what_more_digits_decide_saturates():
    for word in (0, 1, 2**64 - 1):
        drawn, about = np.array([word], dtype=np.uint64), (Fraction(1), 1e-3, 32767)
        assert abs(rounded(np.array([1e6]), drawn, *about)[0]) >= 32767
        assert _decide(Fraction(10**6), Normal(word), *map(Fraction, about[:2]), 32767) == 32767
        assert _decide(Fraction(-(10**6)), Normal(word), *map(Fraction, about[:2]), 32767) == -32767


def test_floats_err_a_thousand_times_less_than_the_margin_that_they_get():
    """5e-13 of 1 + |N|, from the words on that floats are asked to decide."""
    words = np.unique(np.geomspace(2**37, 2**64 - 2**12, 200).astype(np.uint64) | np.uint64(1))
    with mpmath.workdps(40):
        for word, normal in zip(words.tolist(), to_normals(words).tolist(), strict=True):
            uniform = (mpmath.mpf(word >> 1) + 0.5) / mpmath.mpf(2) ** 64
            exact = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * uniform)
            assert abs(normal - exact) < 5e-16 * (1 + exact)
            (opposite,) = to_normals(np.array([word - 1], dtype=np.uint64)).tolist()
            assert opposite == -normal


@pytest.mark.parametrize("rate", [1.0, 5e-324, 1 - 2.0**-53, *by_night(0.3, 1e-9, 1.5 * 2.0**-64)])
def test_a_coin_has_exactly_the_rate(rate):
    edge = math.floor(Fraction(rate) * 2**64)
    words = [edge + step for step in (-2, -1, 1, 2) if 0 <= edge + step < 2**64]
    heads = coins(np.array(words, dtype=np.uint64), rate).tolist()
    assert heads == [word < edge for word in words]
    if edge < 2**64:
        share = float(Fraction(rate) * 2**64 - edge)
        drawn = int(coins(np.full(400, edge, dtype=np.uint64), rate).sum())
        assert stats.binomtest(drawn, 400, share).pvalue > 1e-7


@pytest.mark.parametrize("places", [2, 3, 10, 2**15 - 1])
def test_categories_are_equally_likely_to_the_last_bit(places):
    for place in (1, places // 2, places - 1):
        word, rest = divmod(place * 2**64, places)
        assert place_of(np.uint64(word + 1), places) == place
        assert place_of(np.uint64(word - 1), places) == place - 1
        below = sum(place_of(np.uint64(word), places) < place for _ in range(1000))
        assert stats.binomtest(below, 1000, rest / places).pvalue > 1e-7


@pytest.mark.parametrize("categories", [2, 3, 1000, 2**15])
def test_no_answer_is_truer_than_its_local_epsilon_allows(categories):
    with mpmath.workdps(60):
        for local in np.geomspace(1e-9, 20.0, 100).tolist():
            truth = mpmath.mpf(RandomisedResponse(categories=categories, local_epsilon=local).truth)
            odds = mpmath.log(1 + truth * categories / (1 - truth))
            assert local * (1 - 1e-7) < odds <= local


@pytest.mark.parametrize("noise", [1.2533141386, 1.3, 1e6])
def test_the_coin_of_a_unit_vector_has_exactly_its_chance(noise):
    """A word is one side's or the other's up to exactly (1 + t)/2, t the bias that ε₀ states."""
    mechanism = LdpSgd(noise_multiplier=noise)
    edge = (1 + Fraction(mechanism.bias)) / 2 * 2**64
    direction = np.uint64(2**62 + 1)  # above 0, as the update
    for word in (math.ceil(edge) - 2, math.ceil(edge) - 1, math.ceil(edge) + 1):
        draws = np.array([direction, word], dtype=np.uint64)
        for update in (3.0, 1e300):  # clipped: its share is 1 but for the margin of the norm
            right = mechanism.report(np.array([update]), draws)[0] > 0
            assert not (right and word >= edge)
    draws = np.array([direction, int(edge * (1 - Fraction(1, 2**40)))], dtype=np.uint64)
    assert mechanism.report(np.array([3.0]), draws)[0] > 0


def exact_norm_squared(vector: np.ndarray) -> Fraction:
    return sum((Fraction(each) ** 2 for each in vector.tolist()), Fraction(0))


@pytest.mark.parametrize("dimension", [1, 2, 3, 50, 1000])
def test_no_clipped_update_is_longer_than_the_clip_norm_in_exact_arithmetic(dimension):
    random = np.random.default_rng(dimension)
    for clip_norm in (1e-18, 0.1, 1.0, 7e14):
        for _ in range(10 if dimension < 100 else 1):
            update = random.standard_normal(dimension) * 10.0 ** random.integers(-3, 3, dimension)
            update *= clip_norm / np.linalg.norm(update)  # as near C as floats say
            for each in (update, 3 * update, 1e200 * update, np.nextafter(update, np.inf)):
                clipped = clip(each, clip_norm)
                assert exact_norm_squared(clipped) <= Fraction(clip_norm) ** 2
                assert np.linalg.norm(clipped) > 0.9 * clip_norm
    assert (clip(update / 2, clip_norm) == update / 2).all()
