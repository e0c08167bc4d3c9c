"""Attacks on privacy claims: lower confidence bounds of δ(ε) and ε(δ) from draws.

Events. For every event S, `δ(ε) >= P(S) - e^ε Q(S)` and `ε(δ) >= log((P(S) - δ)/Q(S))`, so
S = {score above a threshold} gives a bound whatever the score is. Threshold and direction are
chosen on one half of the draws; the other half bounds P(S) from below and Q(S) from above by
Clopper and Pearson, each at half the allowed error.

Ratios. Where the likelihood ratio L = P/Q is known, `δ(ε) = E_P[(1 - e^ε/L)_+]`, a mean of values
in [0, 1]: its empirical Bernstein bound (Maurer and Pontil 2009, Theorem 4) is much closer.

A bound above a claim refutes it; one below proves nothing. A value outside its range is a
ValueError of one line.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence

import attrs
import dp_accounting
import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.accountants.base import ADJACENCIES, ShuffleAccountant, relation_of
from shufl.accounting.audit.adversary import PLACEMENTS, AttackedRound, Placement, make_placement
from shufl.accounting.numerics import FloatArray
from shufl.protocol import validation
from shufl.protocol.events import Shuffled

_MOST_THRESHOLDS = 400


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What the draws show of one round at one placement.

    Attributes:
        delta_lower: δ(ε) is at least this, with the confidence that was asked for.
        delta_estimate: Not a bound: the mean of `(1 - e^ε/L)_+`, or `P(S) - e^ε Q(S)` as observed.
        method: "ratios" or "events": see the module.
    """

    placement: str
    delta_lower: float
    delta_estimate: float
    method: str


@dataclasses.dataclass(frozen=True)
class ClaimCheck:
    """An accountant's δ(ε) of one round against what the draws show.

    A violation at a pair that the accountant does not cover is no error of the accountant, but then
    its δ is no guarantee for every pair of neighbours.

    Attributes:
        accountant: Its name.
        covers: What its ε holds for, and on what assumption.
        holds_for: Which pairs of neighbouring datasets its ε bounds.
        claimed_delta: Its δ(ε).
        results: One for each placement about which the accountant claims something.
    """

    accountant: str
    covers: str
    holds_for: str
    claimed_delta: float
    results: tuple[AuditResult, ...]

    @property
    def violated(self) -> bool:
        """Whether some placement's lower bound is above the claim."""
        return self.worst.delta_lower > self.claimed_delta

    @property
    def worst(self) -> AuditResult:
        """The placement with the largest lower bound."""
        return max(self.results, key=lambda result: result.delta_lower)


def clopper_pearson(
    successes: npt.ArrayLike, trials: int, error: float
) -> tuple[FloatArray, FloatArray]:
    """Returns one-sided lower and upper bounds, each wrong with probability at most `error`.

    `successes` are counts in 0..trials, of any shape.
    """
    k = np.asarray(successes, np.float64)
    lower = np.where(k > 0, special.betaincinv(np.maximum(k, 1), trials - k + 1, error), 0.0)
    inside = special.betaincinv(k + 1, np.maximum(trials - k, 1), 1.0 - error)
    return lower, np.where(k < trials, inside, 1.0)


def _bounds(
    above: FloatArray, below: FloatArray, thresholds: FloatArray, error: float
) -> tuple[FloatArray, FloatArray]:
    """Of the share of scores above each threshold: the least in one world, the most in another."""
    one, two = (
        len(each) - np.searchsorted(np.sort(each), thresholds, "right") for each in (above, below)
    )
    least, _ = clopper_pearson(one, len(above), error / 2.0)
    _, most = clopper_pearson(two, len(below), error / 2.0)
    return least, most


def _choose(
    first: FloatArray, second: FloatArray, error: float, factor: float
) -> tuple[float, float]:
    """The event that shows the largest δ on these draws, among quantiles and both directions.

    Its sign and threshold: {score > threshold} for D, or {-score > threshold} for D′.
    """
    levels = np.linspace(0.0, 1.0, _MOST_THRESHOLDS)
    best, chosen = -math.inf, (1.0, math.inf)
    for sign, above, below in ((1.0, first, second), (-1.0, -second, -first)):
        thresholds = np.unique(np.quantile(np.concatenate([above, below]), levels))
        least, most = _bounds(above, below, thresholds, error)
        values = least - factor * most
        at = int(np.argmax(values))
        if values[at] > best:
            best, chosen = float(values[at]), (sign, float(thresholds[at]))
    return chosen


def _evaluate(
    first: npt.ArrayLike, second: npt.ArrayLike, confidence: float, factor: float
) -> tuple[float, float]:
    """δ's lower bound on the second halves and as observed there, for e^ε, the factor."""
    validation.real("confidence", confidence, "(0, 1)")
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    for scores in (one, two):
        if scores.ndim != 1 or len(scores) < 2 or not np.isfinite(scores).all():
            raise ValueError(
                f"scores must be at least 2 finite numbers, got an array of shape {scores.shape}"
            )
    error = 1.0 - confidence
    half_one, half_two = len(one) // 2, len(two) // 2
    sign, threshold = _choose(one[:half_one], two[:half_two], error, factor)
    one, two = one[half_one:], two[half_two:]
    above, below = (one, two) if sign > 0.0 else (-two, -one)
    least, most = _bounds(above, below, np.array([threshold]), error)
    observed = np.mean(above > threshold) - factor * np.mean(below > threshold)
    return float(least[0] - factor * most[0]), float(observed)


def _from_ratios(
    first: FloatArray, second: FloatArray, epsilon: float, confidence: float
) -> tuple[float, float]:
    """δ(ε)'s lower bound and estimate from exact log ratios, the worse direction."""
    lower, estimate = 0.0, 0.0
    log_term = math.log(4.0 / (1.0 - confidence))  # half the error for each direction
    for scores in (first, -second):
        values = -np.expm1(np.minimum(epsilon - scores, 0.0))
        count, mean = len(values), float(np.mean(values))
        slack = math.sqrt(2.0 * float(np.var(values, ddof=1)) * log_term / count)
        lower = max(lower, mean - slack - 7.0 * log_term / (3.0 * (count - 1)))
        estimate = max(estimate, mean)
    return lower, estimate


def delta_lower_bound(
    first: npt.ArrayLike, second: npt.ArrayLike, epsilon: float, confidence: float
) -> float:
    """Returns a lower confidence bound of δ(ε) between two worlds, in the worse direction.

    `first` and `second` are scores of independent draws of the two worlds; the first half of each
    chooses the event. ε lies in [0, 700], `confidence` in (0, 1).
    """
    return max(0.0, _evaluate(first, second, confidence, _factor(epsilon))[0])


def _factor(epsilon: float) -> float:
    return math.exp(validation.real("epsilon", epsilon, "[0, 700]"))


def audit_round(
    event: Shuffled,
    adjacency: str,
    placement: Placement,
    epsilon: float,
    samples: int = 100_000,
    confidence: float = 0.99,
    rng: np.random.Generator | None = None,
    method: str = "auto",
) -> AuditResult:
    """Draws one round under D and D′ and bounds its δ(ε) from below.

    Args:
        event: What the round releases.
        adjacency: "replace" or "zero-out".
        placement: The two neighbouring datasets.
        epsilon: ε in [0, 700].
        samples: Rounds to draw in each of the two worlds, at least 2.
        confidence: The probability that the bound holds, in (0, 1).
        rng: Where the draws come from; fresh if None.
        method: "events", or "auto": "ratios" wherever the likelihood ratio can be computed.

    Raises:
        ValueError: The two datasets are no neighbours.
    """
    relation_of(adjacency)
    if adjacency == "zero-out" and np.any(placement.second):
        raise ValueError(f"user 1's second record must be 0 for zero-out, got {placement.second}")
    count = validation.integer("samples", samples, 2)
    factor = _factor(epsilon)
    validation.real("confidence", confidence, "(0, 1)")
    validation.choice("method", method, ("auto", "events"))
    generator = np.random.default_rng() if rng is None else rng
    attacked = AttackedRound(event, placement)
    ratios = attacked.exact and method == "auto"
    first = attacked.scores(True, count, generator)
    second = attacked.scores(False, count, generator)
    if ratios:
        lower, estimate = _from_ratios(first, second, epsilon, confidence)
    else:
        lower, estimate = _evaluate(first, second, confidence, factor)
    used = "ratios" if ratios else "events"
    return AuditResult(placement.name, max(0.0, lower), max(0.0, estimate), used)


def claims_something(accountant: type[ShuffleAccountant], placement: str | Placement) -> bool:
    """Returns whether an accountant claims anything at a placement.

    An accountant that counts on others claims nothing where they are absent.
    """
    absent = placement == "absent" if isinstance(placement, str) else placement.absent
    return not (absent and accountant.counts_on_others)


def check_claims(
    accountants: Sequence[ShuffleAccountant],
    event: Shuffled,
    epsilon: float,
    placements: Sequence[str | Placement] = PLACEMENTS,
    samples: int = 100_000,
    confidence: float = 0.99,
    rng: np.random.Generator | None = None,
) -> list[ClaimCheck]:
    """Attacks the δ(ε) of one round that accountants claim.

    A claim that does not count on blankets holds without them too, and is attacked there, where
    user 1's report is easier to tell. Claims about the same round are attacked by the same draws.

    Args:
        accountants: They have one adjacency, which is attacked, and have composed nothing. They are
            left as they are.
        event: What the round releases.
        epsilon: ε in [0, 700].
        placements: Where to attack: placements, or names of `PLACEMENTS`. Each accountant is
            checked only where it claims something.
        samples: Rounds to draw in each of the two worlds, at least 2.
        confidence: The probability of no false violation in all attacks together, in (0, 1).
        rng: Where the draws come from; fresh if None.

    Returns:
        One check for each accountant.

    Raises:
        ValueError: There is no placement, or none about which an accountant claims anything, or an
            accountant has composed something.
        dp_accounting.UnsupportedEventError: An accountant does not price `event`.
    """
    if not placements:
        raise ValueError("placements must be at least one, got none")
    _factor(epsilon)
    validation.integer("samples", samples, 2)
    validation.real("confidence", confidence, "(0, 1)")
    relations = {accountant.neighboring_relation for accountant in accountants}
    if len(relations) != 1:
        raise ValueError(f"accountants must be of one adjacency, got {len(relations)}")
    adjacency = next(name for name, each in ADJACENCIES.items() if each in relations)
    claims = [_claimed_delta(each, event, epsilon, placements) for each in accountants]
    generator = np.random.default_rng() if rng is None else rng
    places = [
        make_placement(item, adjacency, event.users) if isinstance(item, str) else item
        for item in placements
    ]
    attacks = [
        [(counted, at) for at, place in enumerate(places) if claims_something(type(each), place)]
        for each in accountants
        for counted in [event.blankets if each.counts_on_blankets else 0.0]
    ]
    apart = dict.fromkeys(itertools.chain(*attacks))
    share = 1.0 - (1.0 - confidence) / len(apart)
    results = {
        (blankets, at): audit_round(
            attrs.evolve(event, blankets=blankets),
            *(adjacency, places[at], epsilon, samples, share, generator),
        )
        for blankets, at in apart
    }
    return [
        ClaimCheck(
            accountant=accountant.name,
            covers=accountant.covers,
            holds_for=accountant.holds_for,
            claimed_delta=claimed,
            results=tuple(results[each] for each in own),
        )
        for accountant, claimed, own in zip(accountants, claims, attacks, strict=True)
    ]


def _claimed_delta(
    accountant: ShuffleAccountant,
    event: Shuffled,
    epsilon: float,
    placements: Sequence[str | Placement],
) -> float:
    if not isinstance(accountant.ledger, dp_accounting.NoOpDpEvent):
        raise ValueError(f"accountant must have spent nothing, got {accountant.ledger}")
    if not any(claims_something(type(accountant), item) for item in placements):
        raise ValueError(
            f"placement must not be absent only: {accountant.name} counts on the other users"
        )
    return float(copy.deepcopy(accountant).compose(event).get_delta(epsilon))
