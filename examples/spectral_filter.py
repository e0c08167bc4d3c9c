"""An aggregator of one's own: the mean without reports that noise does not explain.

A single poisoned report hides in the noise, whose length zC sqrt(d) is many clip norms. But that
noise is independent from report to report and, along any one direction, only zC strong. Many
reports with the same large part make theirs the direction in which reports are longest, and lie
there beyond C + 3zC, the clip norm and three standard deviations. They are left out, and the next
such direction is looked for, until no report lies beyond. This is the filter of Diakonikolas et al.
2017, "Being robust (in high dimensions) can be practical", for noise of known strength.
"""

import math

import numpy as np
from scipy import linalg

import shufl
from shufl.server import Mean

_DEVIATIONS = 3.0  # of the noise, beyond which a report counts as poisoned
_FOLDS = 4  # parts of a block, each measured along directions of the others
_MOST_DIRECTIONS = 32  # looked for in a block
_MOST_REPORTS, _MOST_ENTRIES = 1024, 2**26  # of a block; two are held, in 16 bits an entry
_ENTRIES_AT_ONCE = 2**12  # of each report, as float32


class SpectralFilter(Mean):
    """Of each report it is given, whether it counts; the mean of those that do.

    The direction comes from three quarters of the reports, and those of the other quarter are
    measured, so that no report's own noise counts for it. Where nobody attacks, a report is left
    out with probability at most 0.0027 for each direction that it is measured along.

    The reports' inner products decide, of up to 2048 reports at once: their release in random order
    makes every such block a fair sample. What a block kept is added to the sum of `Mean`, and
    divided as there.
    """

    def __init__(self, plan: shufl.PrivacyPlan, dimension: int):
        super().__init__(plan, dimension)
        self.left_out = 0
        self._block = max(_FOLDS, min(_MOST_REPORTS, _MOST_ENTRIES // dimension))
        self._reports = np.empty((2 * self._block, dimension), dtype=np.int16)
        self._held = 0
        mechanism = plan.mechanism
        longest = mechanism.clip_norm * (1 + _DEVIATIONS * mechanism.noise_multiplier)
        self._limit = (
            longest / mechanism.unit(dimension) + math.sqrt(dimension) / 2
        )  # rounding's own length

    def add(self, report: np.ndarray) -> None:
        """Keeps the report until two blocks are full, then filters the first of them."""
        self._reports[self._held] = report
        self._held += 1
        if self._held == 2 * self._block:
            self._filter(self._reports[: self._block])
            self._reports[: self._block] = self._reports[self._block :]
            self._held = self._block

    def result(self, users: int) -> np.ndarray:
        """The mean of what is kept; the last block is all the rest, never a few reports alone."""
        self._filter(self._reports[: self._held])
        self._held = 0
        return super().result(users)

    def _filter(self, block: np.ndarray) -> None:
        kept = _without_outliers(_inner_products(block), self._limit)
        super().add(block.sum(0, dtype=np.float64, where=kept[:, None]))
        self.left_out += len(block) - int(kept.sum())


def _inner_products(reports: np.ndarray) -> np.ndarray:
    """Of each of k reports, int16 of shape (k, d), with each: float64 of shape (k, k)."""
    count, dimension = reports.shape
    products = np.zeros((count, count))
    for first in range(0, dimension, _ENTRIES_AT_ONCE):
        part = reports[:, first : first + _ENTRIES_AT_ONCE].astype(np.float32)
        products += part @ part.T
    return products


def _without_outliers(products: np.ndarray, limit: float) -> np.ndarray:
    """Which of k reports are kept, by their inner products, of shape (k, k).

    `limit` is how far a report may lie along a direction of others, in the reports' units.
    """
    kept = np.ones(len(products), dtype=bool)
    fold = np.arange(len(products)) % _FOLDS
    for _ in range(_MOST_DIRECTIONS):
        far = np.zeros_like(kept)
        for number in range(_FOLDS):
            measured = np.flatnonzero(kept & (fold == number))
            others = np.flatnonzero(kept & (fold != number))
            if len(others) == 0:
                continue
            last = len(others) - 1
            # v: their longest direction is sum(v_i report_i) / sqrt(eigenvalue).
            (eigenvalue,), v = linalg.eigh(
                products[np.ix_(others, others)], subset_by_index=[last, last]
            )
            along = products[np.ix_(measured, others)] @ v[:, 0]
            far[measured] = np.abs(along) > limit * math.sqrt(max(eigenvalue, 0.0))
        kept &= ~far
        if not far.any():
            break
    return kept


if __name__ == "__main__":
    changes = {
        "privacy.rounds": 3,
        "training.aggregator": "spectral_filter:SpectralFilter",
    }
    run = shufl.run("quickstart", changes)
    left_out = sum(row["reasons"].get("left-out", 0) for row in run.metrics)
    reports = sum(row["reports"] for row in run.metrics)
    print(f"{run.score_name} {run.score:.3f}, {left_out} of {left_out + reports} reports left out")
