"""Independent oracles: sums in 50 digits, quadrature, exact likelihoods. No package code."""

import itertools
import math

import mpmath as mp
import numpy as np
from scipy import special, stats

mp.mp.dps = 50


def partitions(total, largest=None):
    largest = total if largest is None else largest
    if total == 0:
        yield ()
        return
    for part in range(min(total, largest), 0, -1):
        for rest in partitions(total - part, part):
            yield (part, *rest)


def moment(n, sigma, order, rate=1.0):
    """E[W̄_n^λ] by enumerating partitions of λ: W = 1 w.p. 1-γ, the lognormal w.p. γ."""
    s, rate = 1 / mp.mpf(sigma) ** 2, mp.mpf(rate)
    total = mp.mpf(0)
    for parts in partitions(order):
        if len(parts) > n:
            continue
        ways = mp.factorial(order) * mp.ff(n, len(parts))
        value = mp.mpf(1)
        for size, group in itertools.groupby(parts):
            count = len(list(group))
            ways /= mp.factorial(size) ** count * mp.factorial(count)
            value *= ((1 - rate) + rate * mp.exp(s * size * (size - 1) / 2)) ** count
        total += ways * value
    return total / mp.mpf(n) ** order


def series_moments(n, sigma, max_order, rate=1.0):
    """E[W̄_n^λ] for λ = 0..L by the textbook power-of-a-series recurrence."""
    s, rate = 1 / mp.mpf(sigma) ** 2, mp.mpf(rate)
    w = [
        ((1 - rate) + rate * mp.exp(s * k * (k - 1) / 2)) / mp.factorial(k)
        for k in range(max_order + 1)
    ]
    c = [mp.mpf(1)]
    for m in range(1, max_order + 1):
        c.append(mp.fsum((k * (n + 1) - m) * w[k] * c[m - k] for k in range(1, m + 1)) / m)
    return [mp.factorial(k) * c[k] / mp.mpf(n) ** k for k in range(max_order + 1)]


def theorem2(rate, m, sigma, order):
    """e^{(λ-1) ε_SSG(γ, m)} as printed, with ε(∞) = ∞."""
    rate = mp.mpf(rate)
    second = moment(m, sigma, 2)
    total = 1 + rate**2 * mp.binomial(order, 2) * min(4 * (second - 1), 2 * second)
    for j in range(3, order + 1):
        total += 2 * rate**j * mp.binomial(order, j) * moment(m, sigma, j)
    return total


def theorem3(n, rate, sigma, order):
    """(λ-1) ε_SCI(λ) as printed, the least over every m."""
    mean = mp.mpf(n) * mp.mpf(rate)
    one, best = theorem2(rate, 1, sigma, order), mp.inf
    for m in range(1, min(int(mp.floor(mean)) + 1, n) + 1):
        split = max(1 - (m - 1) / mean, 0)
        value = one * mp.exp(-(split**2) * mean / 2) + theorem2(rate, m, sigma, order)
        best = min(best, value)
    return mp.log(best)


def quadrature(n, sigma, rate, function, nodes=90):
    """E[f(W̄_n)] for n <= 3 by Gauss-Hermite, summed over who checks in."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / math.sqrt(2 * math.pi)
    y = np.exp(points / sigma - 0.5 / sigma**2)
    total = 0.0
    for k in range(n + 1):
        chance = math.comb(n, k) * rate**k * (1 - rate) ** (n - k)
        value, weight = np.full(1, float(n - k)), np.ones(1)
        for _ in range(k):
            value = np.add.outer(value, y).ravel()
            weight = np.multiply.outer(weight, weights).ravel()
        total += chance * float(np.sum(weight * function(value / n)))
    return total


def gaussian_delta(shift, epsilon):
    """δ(ε) of one Gaussian whose mean moves by `shift` standard deviations (Balle and Wang)."""
    shift, epsilon = mp.mpf(shift), mp.mpf(epsilon)
    return mp.ncdf(shift / 2 - epsilon / shift) - mp.exp(epsilon) * mp.ncdf(
        -shift / 2 - epsilon / shift
    )


def gaussian_deltas(shift):
    """δ of ε in an array: hardly more, and in doubles."""

    def at(eps):
        near = special.log_ndtr(shift / 2 - eps / shift)
        far = eps + special.log_ndtr(-shift / 2 - eps / shift)
        return np.exp(near) * -np.expm1(np.minimum(far - near, 0.0)) * (1 + 1e-9)

    return at


def density(points, center, noise):
    return np.exp(-((points - center) ** 2).sum(-1) / (2 * noise**2)) / (2 * np.pi * noise**2)


def permanents(matrices):
    """Permanents of a batch of small matrices, by subsets."""
    batch, n, _ = matrices.shape
    found = np.zeros((batch, 1 << n))
    found[:, 0] = 1.0
    for subset in range(1, 1 << n):
        row = subset.bit_count() - 1
        for j in range(n):
            if subset >> j & 1:
                found[:, subset] += found[:, subset ^ (1 << j)] * matrices[:, row, j]
    return found[:, -1]


def lower_bounds(ratios, epsilons):
    """Lower confidence bounds of δ, by 4.5 standard errors, from draws of Q/P under P."""
    gains = np.maximum(1 - np.exp(epsilons)[:, None] * ratios, 0)
    return gains.mean(1) - 4.5 * gains.std(1) / math.sqrt(ratios.size)


def measured_deltas(first, second, others, noise, epsilons, reports=None, rate=1.0, draws=10_000):
    """Lower confidence bounds of δ, the larger direction, by Monte Carlo.

    Of all users so many `reports`, at random; without it each with a chance `rate`.
    """
    rng = np.random.default_rng(7)
    n = len(others) + 1

    def density(y, there, own):  # who is away stands for whatever report; it tells nothing
        held = np.vstack([own, others])
        logs = np.einsum("bid,jd->bij", y, held) - 0.5 * np.sum(held**2, axis=1)
        return permanents(np.where(there[:, :, None], np.exp(logs / noise**2), 1.0))

    results = []
    for here, away in ((first, second), (second, first)):
        coins = rng.random((draws, n))
        there = coins < rate if reports is None else np.argsort(coins, axis=1) < reports
        y = np.vstack([here, others]) + noise * rng.standard_normal((draws, n, len(here)))
        ratios = density(y, there, away) / density(y, there, here)
        results.append(lower_bounds(ratios, epsilons))
    return np.max(results, axis=0)


def measured_among_many(first, second, at, users, rate, noise, epsilons, draws=20_000):
    """The same with all other users at one place, so that there may be many of them.

    k of n users are heard, user 1 with probability k/n. Over the density of k reports of the others
    a round's is `1 - k/n + (1/n) Σ r_i`, r_i that of a report of user 1 over one of another.
    """
    rng = np.random.default_rng(11)
    first, second, at = (np.asarray(each, dtype=float) for each in (first, second, at))

    def density(reports, heard, own):
        shift = own - at
        ratios = np.exp((reports @ shift - (own @ own - at @ at) / 2) / noise**2)
        return 1 - heard.sum(1) / users + (heard * ratios).sum(1) / users

    results = []
    for here, away in ((first, second), (second, first)):
        heard = rng.random((draws, users)) < rate
        drawn = at + noise * rng.normal(size=(draws, users, at.size))
        drawn[:, 0] += here - at
        ratios = density(drawn, heard, away) / density(drawn, heard, here)
        results.append(lower_bounds(ratios, epsilons))
    return np.max(results, axis=0)


def placements(dimension, count):
    """Unit vectors for the other users: antipodal, equilateral, opposite, orthogonal, at zero."""
    e = np.zeros((2, max(dimension, 2)))
    e[0, 0], e[1, 1] = 1, 1
    e = e[:, :dimension]
    yield "antipodal", np.tile(-e[0], (count, 1))
    yield "same", np.tile(e[0], (count, 1))
    yield "zero", np.zeros((count, dimension))
    yield "half each", np.array([e[0] * (-1) ** i for i in range(count)])
    if dimension > 1:
        turn = [-0.5 * e[0] + math.sqrt(0.75) * s * e[1] for s in (1, -1)]
        yield "equilateral", np.array([turn[i % 2] for i in range(count)])
        yield "orthogonal", np.tile(e[1], (count, 1))


def weak_adversary(n, k, local, epsilons):
    """δ(ε) of n shuffled k-ary responses, those that are uniform told apart (Balle et al. 2019)."""
    share, alphas = k / (math.exp(local) + k - 1), np.exp(epsilons)
    total = np.zeros(len(alphas))
    chances = stats.binom.pmf(np.arange(n), n - 1, share)
    for m in np.flatnonzero(chances > 1e-13) + 1:  # the user's own, and the others' uniform ones
        near = stats.binom.pmf(np.arange(m + 1), m, 2 / k)  # at the two candidate values
        signs = np.flatnonzero(near > 1e-13)[:, None]
        heads = np.arange(signs.max() + 1)
        weights = chances[m - 1] * near[signs] * stats.binom.pmf(heads, signs, 0.5)
        for at, alpha in enumerate(alphas):
            gain = k * (signs * (1 - alpha) + (2 * heads - signs) * (1 + alpha)) / (2 * m)
            gain = share * (1 - alpha) + (1 - share) * gain
            total[at] += np.sum(weights * np.maximum(gain, 0))
    return total
