"""The variation-ratio framework (Wang et al. 2024, "Privacy amplification via shuffling: unified,
simplified, and tightened"), its pair of distributions summed exactly.

A randomiser is known by three numbers: p, the largest ratio of any two reports' probabilities; β,
their largest total variation; q, the largest ratio to any other user's report. Of the differing
user's report the pair sees one of two places, the right one with probability αp and the wrong one
with α, `α = β/(p-1)`, otherwise nothing; every other user is at either with probability αp/q.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from shufl.accounting import validation
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.sign_sum import ROUND_UP, sign_mean_calls

_DEVIATIONS = 13.0
_AT_ONCE = 2**21  # entries of a table


def variation_ratio_delta(
    reports: int,
    ratio: float,
    variation: float,
    ratio_to_others: float,
    epsilons: npt.ArrayLike,
) -> FloatArray:
    """Returns δ(ε) of the pair, rounded up.

    Args:
        reports: n >= 1.
        ratio: p > 1; e^ε₀ for an ε₀-LDP randomiser.
        variation: β in (0, (p-1)/(p+1)].
        ratio_to_others: q >= 1.
        epsilons: ε >= 0, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    validation.integer("number of reports", reports, 1)
    validation.real("ratio", ratio, "(1, inf)")
    validation.real("variation", variation, f"(0, {(ratio - 1.0) / (ratio + 1.0) * (1 + 1e-12)!r}]")
    validation.real("ratio to others", ratio_to_others, "[1, inf)")
    wrong = variation / (ratio - 1.0)
    seen, t = min(wrong * (ratio + 1.0), 1.0), (ratio - 1.0) / (ratio + 1.0)
    chance = 2.0 * wrong * ratio / ratio_to_others
    validation.real("chance of a clone", chance, "(0, 1]")
    alphas = np.exp(np.asarray(epsilons, dtype=np.float64))
    others = stats.binom(reports - 1, chance)
    reach = _DEVIATIONS * others.std() + 30.0
    first, last = max(others.mean() - reach, 0.0), min(others.mean() + reach, reports - 1.0)
    total = np.zeros(alphas.shape)
    step = max(_AT_ONCE // max(alphas.size, 1), 1)
    for start in np.arange(math.floor(first), math.ceil(last) + 1.0, step):
        among = np.arange(start, min(start + step, math.ceil(last) + 1.0))
        # With the user's own m = C + 1 signs are seen; as many without it, if it is not seen.
        odds = _next(among, reports - 1, chance)
        fall = (alphas - 1.0) * (1.0 + (1.0 - seen) / seen * odds[:, None])
        levels = fall / ((alphas + 1.0) * t)
        calls = sign_mean_calls(among + 1.0, levels)
        total += np.einsum("i,ij->j", others.pmf(among), calls)
    outside = others.cdf(first - 1.0) + others.sf(last)
    result = seen * (1.0 + alphas) * t * total + outside
    return np.asarray(np.where(alphas < ratio, result * (1.0 + ROUND_UP), 0.0))


def _next(count: FloatArray, trials: float, chance: float) -> FloatArray:
    """P[Bin = c + 1] / P[Bin = c]."""
    odds = chance / max(1.0 - chance, 1e-300)
    return np.asarray((trials - count) / (count + 1.0) * odds)


def of_response(categories: int, local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q of k-ary randomised response as Wang et al. state them.

    The pair is no bound for k >= 4: docs/results/literature.md.
    """
    ratio = math.exp(local_epsilon)
    return ratio, math.expm1(local_epsilon) / (ratio + categories - 1.0), ratio


def of_laplace(local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q of the Laplace mechanism on an interval."""
    ratio = math.exp(local_epsilon)
    return ratio, -math.expm1(-0.5 * local_epsilon), ratio


def of_any(local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q with the largest β that an ε₀-LDP randomiser can have.

    The pair is that of the clones of 2022, whose erratum restricts it to some randomisers.
    """
    ratio = math.exp(local_epsilon)
    return ratio, float(special.expit(local_epsilon) * -math.expm1(-local_epsilon)), ratio
