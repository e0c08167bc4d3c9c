"""Blankets, the reports that the shuffler makes of its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shufl.protocol.mechanisms import Mechanism, Randomness
from shufl.shuffler.store.batch import storage_refusal
from shufl.shuffler.store.rounds import Round, Run
from shufl.shuffler.wire.reports import EMPTY_ENTRY, entries_of, report_length
from shufl.shuffler.wire.sealing import ID_BYTES, content_for, payload_length, seal_content

_TOGETHER = 2**21  # draws of blankets that are made before other rounds have their turn


def make_blankets(run: Run, entry: Round, number: int, randomness: Randomness) -> bool:
    """Makes some of the blankets of an open round, and puts them into its batch.

    A blanket comes from the same mechanism and the same source of randomness as a user's report,
    and is sealed in the same way, so that nothing in it tells the two apart. docs/theory/blanket.md
    proves what Poisson many of them hide. The shuffler always makes the most that a round can have.
    Those beyond the number that was drawn become empty reports under a plan with cover, so that the
    length of a batch does not tell that number. Without cover they are discarded.

    Returns:
        Whether more are to be made.

    Raises:
        ShufflerRefused: the disk is full or fails; called again, it goes on.
    """
    batch, header = entry.batch, entry.header
    if batch is None or header is None:
        return False
    plan, mechanism = run.plan, run.plan.mechanism
    most = plan.most_blankets
    if entry.made == most:
        return False
    length = payload_length(run.report_bytes, entry.public_key)
    dimension = length // report_length(1)
    zero, draws = np.broadcast_to(0.0, dimension), mechanism.draws(dimension)
    for own in range(entry.made, min(entry.made + max(_TOGETHER // draws, 1), most)):
        drawn = own < entry.blankets
        content = content_for(length)
        entries = entries_of(memoryview(content)[ID_BYTES:])
        for places, noise in _noise_of(mechanism, number, own, draws, randomness):
            entries[places] = mechanism.report(zero[places], noise)
        if plan.cover and not drawn:
            entries[:] = EMPTY_ENTRY
        sealed = seal_content(content, entry.public_key, header)
        try:
            if not batch.add_own(sealed, keep=drawn or plan.cover):
                return False
        except OSError as error:
            raise storage_refusal(error) from error
        entry.made += 1
    return True


def _noise_of(
    mechanism: Mechanism, round: int, blanket: int, draws: int, randomness: Randomness
) -> Iterable[tuple[slice, np.ndarray]]:
    """The draws of a blanket: in pieces, to save memory, unless every entry needs all draws."""
    if mechanism.by_entry:
        return randomness.blanket_pieces(round, blanket, draws)
    (noise,) = randomness.blanket_noise(round, np.array([blanket]), draws)
    return [(slice(None), noise)]
