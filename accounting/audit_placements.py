"""What an adversary chooses before a round, draws of that round, and what tells the worlds apart.

Lengths are in units of the clip norm C: records lie in the unit ball, a report is `x + N(0, z² I)`.
User 1 holds `first` under D and `second` under D′; the others hold the same.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from accounting import adjacency as adjacency_lib
from accounting import validation
from accounting.events import EVENTS, FixedSizeShuffledGaussianDpEvent

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

PLACEMENTS = ("homogeneous", "antipodal", "opposite", "equilateral")

_MOST_EXACT_WORK = 40_000  # multiplications for one exact likelihood ratio
_BATCH_NUMBERS = 2_000_000
_LENGTH_SLACK = 1e-9
_LARGEST_SCORE = 1e6


@dataclasses.dataclass(frozen=True)
class Placement:
    """Two neighbouring datasets.

    Attributes:
        name: Its word in tables.
        first: User 1's clipped record under D, shape (d,); kept as an array.
        second: User 1's clipped record under D′, shape (d,).
        others: The other users' clipped records, shape (n - 1, d).

    Raises:
        ValueError: Wrong shapes, or a record that is not finite or outside the unit ball.
    """

    name: str
    first: FloatArray
    second: FloatArray
    others: FloatArray

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
        """n, with user 1."""
        return len(self.others) + 1

    def check_adjacency(self, adjacency: str) -> None:
        """Refuses a pair that is not one of neighbours.

        Raises:
            ValueError: An unknown adjacency, or under "zero-out" a `second` that is not zero.
        """
        adjacency_lib.relation_of(adjacency)
        if adjacency == "zero-out" and np.any(self.second):
            raise ValueError(f"user 1's second record must be 0 for zero-out, got {self.second}")


def make_placement(name: str, adjacency: str, users: int) -> Placement:
    """Returns a placement by name; user 1 holds x, and under D′ -x ("replace") or 0 ("zero-out").

    - homogeneous: the others hold what user 1 holds under D′ (the published pair);
    - opposite: the others hold -x; under "replace" the same as homogeneous;
    - antipodal: one half of the others holds x, the other half -x;
    - equilateral: the others hold the third corner of an equilateral triangle on the unit circle;
      under "replace" user 1 holds the first two, √3 apart. Under "zero-out" two thirds of the
      circle's corners are left, and the others hold one each, by turns.

    Args:
        name: One of `PLACEMENTS`.
        adjacency: "replace" or "zero-out".
        users: n >= 1.

    Raises:
        ValueError: A value outside its range.
    """
    validation.choice("placement", name, PLACEMENTS)
    adjacency_lib.relation_of(adjacency)
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
    if name == "antipodal":
        others = np.where(np.arange(count) % 2, -1.0, 1.0)[:, None]
    return Placement(name, first, second, others)


def placement_by_hand(others: npt.ArrayLike, adjacency: str, name: str = "by hand") -> Placement:
    """Returns a placement of given others; user 1 holds e₁, and under D′ -e₁ or 0.

    Args:
        others: Shape (n - 1, d), in the unit ball.
        adjacency: "replace" or "zero-out".
        name: Its word in tables.

    Raises:
        ValueError: Another shape, or a record outside the unit ball.
    """
    held = np.asarray(others, np.float64)
    if held.ndim != 2 or held.shape[1] == 0:
        raise ValueError(f"the other users' records must have shape (n - 1, d), got {held.shape}")
    first = np.eye(1, held.shape[1])[0]
    adjacency_lib.relation_of(adjacency)
    return Placement(name, first, -first if adjacency == "replace" else 0.0 * first, held)


class AttackedRound:
    """One round of an event at a placement: draws under D and D′, and a score for telling them.

    The score is the logarithm of the likelihood ratio of the unordered reports where that can be
    computed (`exact`), and otherwise a sum over the reports that is close to it for many users.
    """

    def __init__(self, event: Any, placement: Placement) -> None:
        """Prepares both.

        Args:
            event: An event of `accounting.events`.
            placement: For as many users as the event has.

        Raises:
            ValueError: Another event, noise 0, blankets, or a placement for other users.
        """
        if EVENTS.get(type(event).__name__) is not type(event):
            raise ValueError(f"event must be one of {', '.join(sorted(EVENTS))}, got {event!r}")
        if event.users != placement.users:
            raise ValueError(f"placement must be of {event.users} users, got {placement.users}")
        if not event.noise_multiplier > 0.0:
            raise ValueError(f"noise multiplier must be above 0, got {event.noise_multiplier}")
        if getattr(event, "shuffler_blankets", 0.0):
            raise ValueError(f"shuffler blankets must be 0, got {event.shuffler_blankets}")
        self._event, self._placement = event, placement
        if placement.users > 1:
            held, sizes = np.unique(placement.others, axis=0, return_counts=True)
        else:  # nobody, at the place of user 1
            held, sizes = placement.first[None], np.zeros(1, np.int64)
        order = np.argsort(sizes, kind="stable")  # the largest group last: it needs no state
        self._held, self._sizes = held[order], sizes[order]
        states = math.prod(int(size) + 1 for size in self._sizes[:-1])
        work = 3 * placement.users * states * (len(self._sizes) + 1)
        self.exact = work <= _MOST_EXACT_WORK
        widest = max(3 * states if self.exact else 1, len(self._sizes) + 3, placement.first.size)
        self._batch = max(1, _BATCH_NUMBERS // (placement.users * widest))

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
            Reports in random order, shape (samples, n, d), and which of the rows are there, bool of
            shape (samples, n): a row of a user who stayed away tells nothing.
        """
        placement, users = self._placement, self._placement.users
        mine = placement.first if first else placement.second
        order = np.argsort(rng.random((samples, users)), axis=1)
        centers = np.concatenate([mine[None], placement.others])[order]
        noise = rng.standard_normal(centers.shape)
        if isinstance(self._event, FixedSizeShuffledGaussianDpEvent):
            present = np.broadcast_to(np.arange(users) < self._event.reports, (samples, users))
        else:
            present = rng.random((samples, users)) < getattr(self._event, "check_in_rate", 1.0)
        return centers + self._event.noise_multiplier * noise, present

    def score(self, reports: npt.ArrayLike, present: BoolArray | None = None) -> FloatArray:
        """Returns the score of observed rounds, shape (samples,): high speaks for D.

        Args:
            reports: Shape (samples, k, d) with k <= n, in any order, in clip norms.
            present: Which rows are reports, shape (samples, k); all if None.
        """
        y = np.asarray(reports, np.float64)
        there = np.ones(y.shape[:2], np.bool_) if present is None else np.asarray(present)
        others, one, two = self._densities(y)
        compute = self._log_ratio if self.exact else self._sum_score
        with np.errstate(divide="ignore", invalid="ignore"):
            score = compute(others, one, two, there)
        return np.nan_to_num(score, nan=0.0, posinf=_LARGEST_SCORE, neginf=-_LARGEST_SCORE)

    def _densities(self, y: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Densities of each report at the others' groups, at first and second, up to one factor."""
        placement = self._placement
        points = np.concatenate([self._held, placement.first[None], placement.second[None]])
        logs = np.stack([np.sum((y - p) ** 2, axis=2) for p in points], axis=2)
        logs /= -2.0 * self._event.noise_multiplier**2
        values = np.exp(logs - logs.max(axis=2, keepdims=True))
        return values[..., :-2], values[..., -2], values[..., -1]

    def _log_ratio(
        self, others: FloatArray, one: FloatArray, two: FloatArray, present: BoolArray
    ) -> FloatArray:
        """log P/Q: both are sums over all ways to give the reports to different users.

        The sum (a permanent where everyone reports) runs over the reports. The state is how many
        users of each group have a report already, and whether user 1 has: not, with its density
        under D, or with that under D′. How many of the last group have follows from the rest.
        """
        samples, users = present.shape
        shape = tuple(int(size) + 1 for size in self._sizes[:-1])
        used = np.indices(shape) if shape else np.zeros((0,), np.int64)
        mine = np.array([0, 1, 1]).reshape((3,) + (1,) * len(shape))
        elsewhere = mine + (used.sum(axis=0) if shape else 0)
        state = np.zeros((samples, 3, *shape))
        state.reshape(samples, 3, -1)[:, 0, 0] = 1.0  # nobody has a report yet
        seen = np.zeros(samples, np.int64)

        def each(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return values.reshape((samples, 1) + (1,) * len(shape))

        for j in range(users):
            left = (self._sizes[-1] - (each(seen) - elsewhere)) / users
            new = state * left * each(others[:, j, -1])
            for group, size in enumerate(self._sizes[:-1]):
                rest = np.arange(size, 0, -1) / users
                source = np.moveaxis(state * each(others[:, j, group]), 2 + group, -1)
                np.moveaxis(new, 2 + group, -1)[..., 1:] += source[..., :-1] * rest
            new[:, 1] += state[:, 0] * each(one[:, j])[:, 0] / users
            new[:, 2] += state[:, 0] * each(two[:, j])[:, 0] / users
            state = np.where(each(present[:, j]), new, state)
            state /= state.max(axis=tuple(range(1, state.ndim)), keepdims=True)
            seen += present[:, j]
        away, under_d, under_d2 = state.reshape(samples, 3, -1).sum(axis=2).T
        return np.asarray(np.log(away + under_d) - np.log(away + under_d2), np.float64)

    def _sum_score(
        self, others: FloatArray, one: FloatArray, two: FloatArray, present: BoolArray
    ) -> FloatArray:
        """Each report's log ratio as if every report were drawn from all users alike."""
        crowd = others @ self._sizes
        ratios = np.log(crowd + one) - np.log(crowd + two)
        return np.asarray(np.sum(np.where(present, ratios, 0.0), axis=1), np.float64)
