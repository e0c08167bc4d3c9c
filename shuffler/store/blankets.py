"""Blankets: reports of the zero update that the shuffler adds to a round and seals itself.

A blanket comes from the same mechanism and the same source of randomness as a user's report, and is
sealed in the same way, so that nothing in it tells the two apart. docs/theory-blanket.md proves
what Poisson many of them hide.
"""

from __future__ import annotations

import numpy as np

from accounting.mechanisms import Randomness
from shuffler.store.rounds import Round, Run
from shuffler.wire.reports import encode_report, report_length
from shuffler.wire.sealing import payload_length, seal

_BYTES_AT_ONCE = 2**22
_MOST_AT_ONCE = 256


def make_blankets(run: Run, round: Round, randomness: Randomness, numbers: range) -> list[bytes]:
    """The first of a round's blankets with these numbers, sealed, as many as memory is given to.

    It may run in any thread.
    """
    assert run.mechanism is not None
    dimension = payload_length(run.report_bytes, round.public_key) // report_length(1)
    count = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // report_length(dimension)))
    zero, header, sealed = np.zeros(dimension), run.header(round), []
    for number in numbers[:count]:
        (noise,) = randomness.blanket_noise(round.number, np.array([number]), dimension)
        report = encode_report(run.mechanism.report(zero, noise))
        sealed.append(seal(report, round.public_key, header))
    return sealed
