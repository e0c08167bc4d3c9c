"""One round's sum: masked vectors are added up as they arrive, and none of them is kept.

A node's message is its vector, d numbers modulo 2^32, hidden by the key stream of a seed, and
behind it that seed, sealed to the server. A vector means nothing without its seed, which only the
server can open, and the server sees no vector: only their sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from shufl.shuffler.store.batch import Batch

_Pieces = Iterator[tuple[slice, np.ndarray]]
"""Consecutive pieces of a vector: which places, and their whole numbers."""


class SummedBatch(Batch):
    """The sum of one round. Any thread may use it.

    `senders` counts users whose nodes have sent, `count` these nodes.
    """

    def begin(self, dimension: int, noise: Callable[[], _Pieces]) -> None:
        """Says how long vectors are, and what draws the shuffler's own noise, int64.

        It is called once, before the first message. The slots are for messages that come in pieces.
        """
        self._total = np.zeros(dimension, dtype=np.uint32)
        self._seeds: list[bytes] = []
        self._noise: Callable[[], _Pieces] | None = noise
        self._drawing = threading.Lock()  # held for seconds, and never inside the other one

    def chunks(self, limit: int) -> Iterator[tuple[list[bytes], bool]]:
        """The sum with the shuffler's noise, and the sealed seeds, sorted; see `Batch.chunks`."""
        with self._drawing:
            self._add_noise()
        total, seeds = self._total.astype("<u4", copy=False).view(np.uint8), self._seeds
        for start in range(0, len(total), limit):
            self._check_there()
            yield [total[start : start + limit].tobytes()], start + limit < len(total)
        together = limit // len(seeds[0]) if seeds else 1
        for first in range(0, len(seeds), together):
            yield seeds[first : first + together], False

    def _add_noise(self) -> None:
        """Adds the shuffler's noise once, however often it is asked; in pieces, to save memory."""
        for places, drawn in self._noise() if self._noise is not None else ():
            with self._lock:
                self._check_there()
                self._total[places] += drawn.astype(np.uint32)
        with self._lock:
            self._check_there()
            if self._noise is not None:
                self._noise = None
                self._seeds.sort()

    def _take(self, content: bytes) -> None:
        """Adds a vector, and keeps its sealed seed."""
        length = self._total.size
        self._total += np.frombuffer(content, dtype="<u4", count=length)
        self._seeds.append(content[4 * length :])

    def _take_slot(self, slot: int) -> None:
        """Adds a message that came in pieces."""
        cipher = self._cipher(slot)
        self._give_back(slot)  # which nobody else can have before this returns
        self._take(self._plain(cipher, slot, 0, self.report_bytes))
