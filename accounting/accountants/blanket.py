"""`blanket`: reports that the shuffler adds hide a user's own, for every pair of neighbours.

The shuffler adds M ~ Poisson(λ) reports of noise alone to each round. `docs/theory/blanket.md`
proves: if every other user's report is handed to the adversary, a round's hockey-stick divergence
between records x and x' of user 1 is *exactly*

    H_α = (γ/λ) E[(b + X_1 + ... + X_K)_+],   K ~ Poisson(λ),   b = (λ/γ) (1-γ) (1-α),

X = E - αE', E the density ratio of a report of x to a blanket at a blanket; and it is largest for
the pairs of `shufl.accounting.numerics.worst_pairs`.
"""

import functools

from dp_accounting import DpEvent

from shufl.accounting.accountants.base import UNPROTECTED
from shufl.accounting.accountants.local import AmplifiedAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.jump_counts import PoissonCount
from shufl.accounting.numerics.jump_sum import positive_part
from shufl.accounting.numerics.worst_pairs import LEAST_NOISE, Pair, upper_profile
from shufl.protocol.events import Allocation, CheckIn, Shuffled
from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse

# Below `_LEAST` expected blankets count as none; above `_MOST` as `_MOST`.
_LEAST, _MOST = 1e-6, 1e12


class BlanketAccountant(AmplifiedAccountant):
    """(ε, δ) of rounds with shuffler blankets: tight once the others' reports are handed over.

    Prices rounds with λ > 0 only. Source: docs/theory/blanket.md.

    Guarantee:
        ε holds for every pair of neighbouring datasets, in any dimension, whoever else takes part,
        against all but the shuffler; assumes that the user's own device follows the protocol, that
        the shuffler adds its blankets, and that the server gets nothing of the round but the
        shuffled reports.
    """

    name = "blanket"
    covers = (
        "every pair of neighbouring datasets, in any dimension, whoever else takes part, against "
        "all but the shuffler; assumes that the user's own device follows the protocol, that the "
        "shuffler adds its blankets, and that the server gets nothing of the round but the "
        "shuffled reports"
    )
    holds_for = "every pair"
    counts_on_others = False
    counts_on_blankets = True
    least_noise = LEAST_NOISE
    participations = (CheckIn, Allocation)
    mechanisms = (GaussianMechanism, LdpSgd, RandomisedResponse)

    def _refusal(self, event: DpEvent) -> str | None:
        if isinstance(event, Shuffled) and event != UNPROTECTED and event.blankets == 0.0:
            return "blanket prices rounds with shuffler blankets only"
        return super()._refusal(event)

    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        rate, relation = event.chance, self.neighboring_relation
        if isinstance(event.mechanism, LdpSgd | RandomisedResponse):
            from shufl.accounting.numerics.sign_pairs import (
                Response,
                among_blankets,
                sign_profile,
            )

            response, blankets = Response.of(event.mechanism), min(event.blankets, _MOST)
            hiding = among_blankets(response, rate, blankets) if blankets >= _LEAST else None
            return sign_profile(response, rate, relation, hiding, least)
        divergence = functools.partial(divergence_of, event)
        return upper_profile(divergence, rate, event.mechanism.noise_multiplier, relation, least)


def divergence_of(event: Shuffled, alpha: float, pair: Pair) -> float:
    """Returns an upper bound of H_α for one direction of a pair.

    α is at least 1; the event is a round of users who check in, with λ > 0 and z > 0.
    """
    rate, blankets = event.chance, min(event.blankets, _MOST)  # more hide more
    if blankets < _LEAST:
        return float(rate)
    count = PoissonCount(blankets, -blankets / rate * (1.0 - rate) * (alpha - 1.0))
    jumps = pair.jumps(1.0 / event.mechanism.noise_multiplier, alpha)
    return float(rate / blankets) * positive_part(jumps, count)
