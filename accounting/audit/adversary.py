"""What an adversary chooses before a round, draws of that round, and what tells the worlds apart.

Lengths are in units of the clip norm C: records lie in the unit ball, a report is `x + N(0, z² I)`
and each of the shuffler's M ~ Poisson(λ) blankets `N(0, z² I)`. User 1 holds `first` under D and
`second` under D′; the others hold the same.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shufl.accounting.accountants.base import relation_of
from shufl.accounting.numerics import FloatArray
from shufl.protocol import validation
from shufl.protocol.events import FixedSize, Shuffled, Summed
from shufl.protocol.mechanisms import GaussianMechanism

BoolArray = npt.NDArray[np.bool_]

PLACEMENTS = ("homogeneous", "antipodal", "opposite", "equilateral", "absent")

_BATCH_NUMBERS = 125_000  # these fit into a cache
_LENGTH_SLACK = 1e-9
_LARGEST_SCORE = 1e6


@dataclasses.dataclass(frozen=True)
class Placement:
    """Two neighbouring datasets.

    Attributes:
        first: User 1's clipped record under D, shape (d,).
        second: User 1's clipped record under D′, shape (d,).
        others: The other users' clipped records, shape (n - 1, d).
        absent: Whether the other users of a round send nothing; `others` is empty then.

    Raises:
        ValueError: Wrong shapes, or a record that is not finite or outside the unit ball.
    """

    name: str
    first: FloatArray
    second: FloatArray
    others: FloatArray
    absent: bool = False

    def __post_init__(self) -> None:
        for field in ("first", "second", "others"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), np.float64))
        if self.first.ndim != 1 or self.first.size == 0 or self.second.shape != self.first.shape:
            raise ValueError(
                "user 1's records must be two vectors of one length, got shapes "
                f"{self.first.shape} and {self.second.shape}"
            )
        if self.others.ndim != 2 or self.others.shape[1] != self.first.size:
            raise ValueError(
                f"the other users' records must have shape (n - 1, {self.first.size}), "
                f"got {self.others.shape}"
            )
        longest = float(np.max(np.linalg.norm([self.first, self.second, *self.others], axis=1)))
        if not longest <= 1.0 + _LENGTH_SLACK:
            raise ValueError(f"records must lie in the unit ball, got length {longest}")

    @property
    def users(self) -> int:
        """The users who take part, user 1 among them: n, or 1 if the others are absent."""
        return len(self.others) + 1


def make_placement(name: str, adjacency: str, users: int) -> Placement:
    """Returns a placement by name; user 1 holds x, and under D′ -x ("replace") or 0 ("zero-out").

    - homogeneous: the others hold what user 1 holds under D′ (the published pair);
    - opposite: the others hold -x; under "replace" the same as homogeneous;
    - antipodal: one half of the others holds x, the other half -x;
    - equilateral: the others hold the third corner of an equilateral triangle on the unit circle;
      under "replace" user 1 holds the first two, √3 apart. Under "zero-out" two thirds of the
      circle's corners are left, and the others hold one each, by turns;
    - absent: the others send nothing. If they send known reports instead, which the adversary can
      take away, the likelihood ratio is the same.
    """
    validation.choice("placement", name, PLACEMENTS)
    relation_of(adjacency)
    count = validation.integer("users", users, 1) - 1
    corners = np.array([[math.cos(a), math.sin(a)] for a in (0.0, math.tau / 3, -math.tau / 3)])
    if name == "equilateral":
        replace = adjacency == "replace"
        held = corners[2:] if replace else corners[1:]
        second = corners[1] if replace else np.zeros(2)
        return Placement(name, corners[0], second, held[np.arange(count) % len(held)])
    first = np.ones(1)
    second = -first if adjacency == "replace" else np.zeros(1)
    others = np.tile(-first if name == "opposite" else second, (count, 1))
    if name == "absent":
        return Placement(name, first, second, np.zeros((0, 1)), absent=True)
    if name == "antipodal":
        others = np.where(np.arange(count) % 2, -1.0, 1.0)[:, None]
    return Placement(name, first, second, others)


class AttackedRound:
    """One round of an event at a placement: draws under D and D′, and a score for telling them.

    The score is the logarithm of the likelihood ratio of the unordered reports where user 1's lies
    among others of one law (`exact`), and otherwise a sum over the reports that is close to it for
    many users.
    """

    def __init__(self, event: Shuffled, placement: Placement) -> None:
        """Refuses what it cannot draw by a ValueError of one line."""
        if event.users != placement.users and not placement.absent:
            raise ValueError(f"placement must be of {event.users} users, got {placement.users}")
        if isinstance(event, Summed) or not isinstance(event.mechanism, GaussianMechanism):
            mixing = "sum" if isinstance(event, Summed) else "shuffle"
            given = f"{event.mechanism.name} and {mixing}"
            raise ValueError(f"mechanism must be gaussian, and mixing shuffle, got {given}")
        if not event.mechanism.noise_multiplier > 0.0:
            raise ValueError("noise multiplier must be above 0, got 0.0")
        self._placement, self._noise = placement, event.mechanism.noise_multiplier
        self._rate, self._drawn = event.chance, None
        if isinstance(event.participation, FixedSize):
            if event.blankets:
                raise ValueError("a round with blankets must be one of check-ins, got fixed size")
            if not placement.absent:
                self._rate, self._drawn = 1.0, event.participation.reports
        self._blankets = event.blankets
        self._held, self._sizes = np.unique(placement.others, axis=0, return_counts=True)
        groups = len(self._sizes)
        self.exact = groups + (self._blankets > 0.0) <= 1
        ends = np.stack([placement.first, placement.second, 0.0 * placement.first])
        self._points = np.concatenate([self._held, ends])
        rows, widest = math.ceil(placement.users + self._blankets), max(groups + 3, ends.shape[1])
        self._batch = max(1, _BATCH_NUMBERS // (rows * widest))

    def scores(self, first: bool, samples: int, rng: np.random.Generator) -> FloatArray:
        """Returns the scores of independent rounds under D (`first`) or D′, shape (samples,)."""
        parts = []
        for start in range(0, samples, self._batch):
            parts.append(self.score(*self.draw(first, min(self._batch, samples - start), rng)))
        return np.concatenate(parts)

    def draw(
        self, first: bool, samples: int, rng: np.random.Generator
    ) -> tuple[FloatArray, BoolArray]:
        """Draws rounds under D (`first`) or D′.

        Returns:
            Reports, user 1's first, the blankets last (no score depends on the order), shape
            (samples, k, d), and which of the rows are there, bool of shape (samples, k): a row of
            a user who stayed away tells nothing.
        """
        placement, users = self._placement, self._placement.users
        mine = placement.first if first else placement.second
        if self._drawn is not None:
            order = np.argsort(rng.random((samples, users)), axis=1)
            present = order < self._drawn
        else:
            present = rng.random((samples, users)) < self._rate
        counts = rng.poisson(self._blankets, samples)
        blankets = np.arange(counts.max(initial=0)) < counts[:, None]
        present = np.concatenate([present, blankets], axis=1)
        reports = rng.standard_normal((*present.shape, placement.first.size))
        reports *= self._noise
        reports[:, :users] += np.concatenate([mine[None], placement.others])
        return reports, present

    def score(self, reports: npt.ArrayLike, present: BoolArray | None = None) -> FloatArray:
        """Returns the score of observed rounds, shape (samples,): high speaks for D.

        `reports` are in clip norms, of shape (samples, k, d) and in any order; `present`, of shape
        (samples, k), says which rows are reports, all if None.
        """
        y = np.asarray(reports, np.float64)
        there = np.ones(y.shape[:2], np.bool_) if present is None else np.asarray(present)
        compute = self._log_ratio if self.exact else self._sum_score
        with np.errstate(divide="ignore", invalid="ignore"):
            score = compute(y, there)
        return np.nan_to_num(score, nan=0.0, posinf=_LARGEST_SCORE, neginf=-_LARGEST_SCORE)

    def _log_densities(self, y: FloatArray, points: FloatArray) -> FloatArray:
        """Log densities of reports at some points, over a blanket's: `(<x, y> - |x|²/2)/z²`."""
        logs = np.tensordot(points, y, axes=(1, 2))
        logs -= 0.5 * np.sum(points**2, axis=1)[:, None, None]
        logs /= self._noise**2
        return np.asarray(logs, np.float64)

    def _log_ratio(self, y: FloatArray, present: BoolArray) -> FloatArray:
        """log P/Q of user 1's report among others of one law: blankets, or users at one place.

        With E(x, y) the density over theirs, `P/Q = (a + Σ_i E(x, y_i)) / (a + Σ_i E(x′, y_i))`.
        Of k reports of n users a = n - k, since each of them is user 1's with chance 1/n; among
        M ~ Poisson(λ) blankets a = λ(1-γ)/γ. Alone, and without a report, the ratio is 1.
        """
        lone = self._placement.users == 1
        away: Any = self._placement.users - present.sum(axis=1)
        if lone:
            away = self._blankets * (1.0 - self._rate) / self._rate
        logs = self._log_densities(y, self._points)  # of the others, first, second, a blanket
        own = logs[-3:-1] - (logs[-1] if lone else logs[0])
        heard = np.logaddexp.reduce(np.where(present, own, -np.inf), axis=2)
        first, second = np.logaddexp(np.log(away), heard)
        return np.asarray(first - second, np.float64)

    def _sum_score(self, y: FloatArray, present: BoolArray) -> FloatArray:
        """Each report's log ratio as if each were drawn from all users and blankets alike."""
        points, place = np.unique(self._points, axis=0, return_inverse=True)
        weights = np.zeros((2, len(points)))
        for world, own in zip(weights, ((1.0, 0.0), (0.0, 1.0)), strict=True):
            crowd = self._rate * np.concatenate([self._sizes, own])
            np.add.at(world, place.ravel(), np.append(crowd, self._blankets))
        used = weights.any(axis=0)
        logs = self._log_densities(y, points[used])
        logs -= logs.max(axis=0)
        first, second = np.tensordot(weights[:, used], np.exp(logs, out=logs), axes=1)
        first /= second
        return np.asarray(np.sum(np.log(first), axis=1, where=present), np.float64)
