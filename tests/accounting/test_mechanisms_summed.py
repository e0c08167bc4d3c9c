"""What a node sends where sums are handed over: whole numbers that are exact, noise, and a mask."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from nights import by_night
from rounds import words
from shufl.accounting.numerics.gaussian_divergence import subsampled_profile
from shufl.protocol.mechanisms import clip
from shufl.protocol.mechanisms.summed_reports import (
    check_sums,
    mask,
    masked,
    signed,
    steps_of_sums,
    unit_of_sums,
    whole_noise,
    whole_update,
)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=30),
    st.sampled_from([1e-15, 0.3, 1.0, 7.5, 1e12]),
)
def test_an_updates_whole_numbers_are_no_longer_than_the_clip_norm_in_integers(entries, clip_norm):
    update = np.array(entries, dtype=np.float32)
    whole = whole_update(update, clip_norm)
    assert whole.dtype == np.int64
    assert sum(x * x for x in whole.tolist()) <= 100 * update.size
    away = whole - clip(update, clip_norm) / unit_of_sums(clip_norm, update.size)
    assert np.abs(away).max() <= 1.0  # a half where nothing was cut off


@pytest.mark.parametrize("size", [1, 3, 100, 26_010])
def test_equal_entries_at_the_edge_keep_their_length(size):
    whole = whole_update(np.full(size, 5.0), 1.0)
    assert set(whole.tolist()) <= {9, 10}
    assert int(whole @ whole) >= 0.99 * 100 * size or size < 100


def test_what_rounding_makes_too_long_is_cut_off_towards_zero():
    update = np.full(1000, 1.0)
    update[0] = 17.0  # 24.5 units of the others, which are 7.98
    whole = whole_update(update, 1.0)
    scaled = clip(update, 1.0) / unit_of_sums(1.0, 1000)
    assert int(np.rint(scaled) @ np.rint(scaled)) > 100_000 >= int(whole @ whole)
    assert (whole == np.trunc(scaled)).all()


def rounded_law(steps: float, most: int) -> np.ndarray:
    """The chances of -most to most for a rounded N(0, steps²)."""
    ends = (np.arange(-most, most + 2) - 0.5) / steps
    return np.where(ends[1:] < 0, np.diff(stats.norm.cdf(ends)), -np.diff(stats.norm.sf(ends)))


def test_the_sum_of_rounded_noises_is_a_kernel_of_the_real_gaussians_sum():
    """P(m) = ∫ g(y) h(m - y) dy, h the density of two uniforms' sum, but for the aliasing."""
    for steps, agrees in ((0.5, False), (2.0, True)):
        one = rounded_law(steps, 60)
        both = np.convolve(one, one)[60:-60]
        law = stats.norm(0, steps * math.sqrt(2))
        away = []
        for m in (-7, -1, 0, 3, 10):
            real, _ = integrate.quad(
                lambda y, m=m, law=law: law.pdf(y) * (1 - abs(m - y)), m - 1, m + 1, points=[m]
            )
            away.append(abs(both[m + 60] - real))
        assert max(away) < 3 * math.exp(-(math.pi**2) * steps**2 / 2)  # of all aliases
        assert (max(away) < 1e-7) == agrees


@pytest.mark.parametrize("relation", ["REPLACE_ONE", "REPLACE_SPECIAL"])
@pytest.mark.parametrize(("nodes", "rate"), [(1, 0.3), (4, 0.1), (9, 1.0)])
def test_whole_sums_leak_no_more_than_the_profile_of_real_ones(relation, nodes, rate):
    """All outcomes of one coordinate, for neighbours 10 units from 0 and nodes' noise of 16."""
    steps, reach = 16.0, 700
    law = one = rounded_law(steps, reach)
    for _ in range(nodes - 1):
        law = np.convolve(law, one)
    of = [np.pad(law, (10 + at, 10 - at)) for at in (10, -10, 0)]
    mixed = [(1 - rate) * of[2] + rate * shifted for shifted in of]
    pair = (mixed[0], mixed[1]) if relation == "REPLACE_ONE" else (mixed[0], of[2])
    noise = steps * math.sqrt(nodes) / 10.0
    about = rate, noise, NeighboringRelation[relation], 1e-12
    epsilons, deltas = subsampled_profile(*about)
    deltas = np.broadcast_to(deltas, (2, epsilons.size))
    for this, (first, second) in zip(deltas, (pair, pair[::-1]), strict=True):
        for epsilon, delta in list(zip(epsilons.tolist(), this.tolist(), strict=True))[::100]:
            real = np.maximum(first - math.exp(epsilon) * second, 0).sum()
            assert real <= delta * (1 + 1e-9) + 1e-13
            if delta > 1e-6:
                assert real > 0.98 * delta  # rounding hides hardly more


@pytest.mark.parametrize("multiplier", [300.0, *by_night(0.01, 0.7)])
def test_noise_is_that_of_real_numbers_at_the_ends_of_a_whole_numbers_interval(multiplier):
    """Where floats cannot tell them apart: by 100 digits."""
    size, users = 400, 3
    steps = mpmath.mpf(steps_of_sums(multiplier * math.sqrt(users), size) * (1 + 2.0**-50))
    words, expected = [], []
    with mpmath.workdps(100):
        for away in np.linspace(-6.3, 6.3, size // 2):
            integer = int(mpmath.nint(away * steps))
            end = (integer + mpmath.mpf(1) / 2) / steps
            beyond = mpmath.ldexp(mpmath.erfc(abs(end) / mpmath.sqrt(2)) / 2, 64)
            word = 2 * int(mpmath.floor(beyond)) + (end > 0)
            # the larger the word, the nearer is the draw to 0
            below, above = (word + 2, word - 2) if end > 0 else (word - 2, word + 2)
            words += [below, above]
            expected += [integer, integer + 1]
    drawn = np.array(words, dtype=np.uint64)
    assert whole_noise(drawn, multiplier, users).tolist() == expected


def test_noise_of_a_node_has_the_variance_of_all_its_users():
    noise = whole_noise(words(100_000), 0.5, 7)
    steps = 0.5 * math.sqrt(7) * 10 * math.sqrt(100_000)
    assert stats.kstest(noise / steps, "norm").pvalue > 1e-6
    assert not whole_noise(words(100_000), 0.0, 7).any()


def test_masks_leave_nothing_but_the_sum():
    random = np.random.default_rng(3)
    vectors = random.integers(-(2**28), 2**28, (7, 50))
    seeds = [random.bytes(32) for _ in vectors]
    hidden = [masked(each, seed) for each, seed in zip(vectors, seeds, strict=True)]
    assert {len(each) for each in hidden} == {200}
    total = sum(np.frombuffer(each, dtype="<u4") for each in hidden)
    total = total - sum(mask(seed, 50) for seed in seeds)
    assert (signed(total) == vectors.sum(0)).all()


@pytest.mark.parametrize("vector", [np.zeros(20_000, dtype=np.int64), np.arange(20_000) * 99_991])
def test_a_masked_vector_is_uniform_whatever_it_hides(vector):
    """By its bytes, and by the correlation with what it hides."""
    hidden = masked(vector, words(4).tobytes())
    counts = np.bincount(np.frombuffer(hidden, dtype=np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-6
    shown = np.frombuffer(hidden, dtype="<u4")
    assert stats.spearmanr(shown, vector + np.arange(vector.size)).pvalue > 1e-6


def test_sums_that_do_not_fit_and_noise_too_little_to_round_are_refused():
    check_sums(6500.0, 0.1, 0.0, 1, 26_010)
    check_sums(6500.0, 0.0, 3.0, 1, 26_010)
    with pytest.raises(ValueError, match="at most 31 bits"):
        check_sums(2.0**25, 0.1, 0.0, 1, 26_010)
    with pytest.raises(
        ValueError, match=r"noise_multiplier .* 0\.00993 .*26010 parameters, got 0\.009"
    ):
        check_sums(6500.0, 0.009, 0.0, 1, 26_010)
    with pytest.raises(ValueError, match=r"central_noise must be 0 or at least 0\.00993"):
        check_sums(6500.0, 1.0, 0.009, 4, 26_010)
    check_sums(6500.0, 0.009, 0.0, 4, 26_010)
    check_sums(6500.0, 0.009, 0.0, None, 26_010)
