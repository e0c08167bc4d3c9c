"""Independent oracles: the defining sums in 50 digits, and quadrature. No package code."""

import itertools
import math

import mpmath as mp
import numpy as np

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
