"""Blankets: reports of the zero update that the shuffler adds to a round and seals itself.

A blanket comes from the same mechanism and the same source of randomness as a user's report, and is
sealed in the same way, so that nothing in it tells the two apart. docs/theory-blanket.md proves
what Poisson many of them hide.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from accounting.mechanisms import GaussianMechanism, Randomness
from shuffler.wire.reports import encode_report
from shuffler.wire.sealing import RoundHeader, seal

__all__ = ["BlanketMaker"]

_BYTES_AT_ONCE = 2**22
_MOST_AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class BlanketMaker:
    """Makes the blankets of one round that are still to be made.

    Attributes:
        header: the round.
        public_key: the server's, to which users' reports of this round are sealed too.
        mechanism: of the plan.
        dimension: entries of a report.
        randomness: where the noise comes from.
        first, last: numbers of the next one and the one after the last.
    """

    header: RoundHeader
    public_key: bytes
    mechanism: GaussianMechanism
    dimension: int
    randomness: Randomness
    first: int
    last: int

    def next(self) -> list[bytes]:
        """The next of them, sealed, as many as memory is given to; in any thread."""
        zero = np.zeros(self.dimension)
        count = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // (2 * self.dimension)))
        sealed = []
        for number in range(self.first, min(self.first + count, self.last)):
            (noise,) = self.randomness.blanket_noise(
                self.header.round, np.array([number]), self.dimension
            )
            report = encode_report(self.mechanism.report(zero, noise))
            sealed.append(seal(report, self.public_key, self.header))
        return sealed
