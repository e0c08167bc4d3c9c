"""Several shufflers behind one round: an exactly uniform merge of permuted parts.

Each of k shufflers takes some of the users' reports and permutes its part uniformly. `merge`
interleaves the parts: with r_i reports left in part i, the next comes from part i with probability
r_i / (r_1 + … + r_k), by a draw from the operating system's entropy.

The result is a uniformly random permutation of all n = n_1 + … + n_k reports. *Proof.* A given
interleaving (a word in which i occurs n_i times) is drawn with probability: product over the steps
of (what is left of the chosen part) / (what is left in all). The denominators multiply to n!, the
numerators of part i to n_i!, in whatever order they come. So each of the n!/(n_1!…n_k!) words has
probability n_1!…n_k!/n!, and with it each of the n_i! orders of each part independently
probability 1/n_i!: every order of all reports has probability 1/n!. ∎

It holds however the reports were divided, by user, by time or by load: an adversary may know the
division. The merge must not be the server's: who sees which part a report comes from hides its
sender among that part only.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["merge"]

_T = TypeVar("_T")


def merge(parts: Sequence[Iterable[_T]], lengths: Sequence[int]) -> Iterator[_T]:
    """Interleaves the parts, each in its own order; all interleavings are equally likely.

    Memory does not grow with the parts. One draw and at most k comparisons for each report; for
    many parts merge merges, as a tree: the proof holds at every node.

    Args:
        parts: each in an order that is uniformly random.
        lengths: how many there are in each part.

    Yields:
        All of them.

    Raises:
        ValueError: if there are not as many lengths as parts, or a part is not as long as it says.
    """
    left = list(lengths)
    if len(left) != len(parts) or min(left, default=0) < 0:
        raise ValueError(f"{len(parts)} parts need as many lengths of at least 0, got {lengths}")
    iterators = [iter(part) for part in parts]
    for total in range(sum(left), 0, -1):
        draw = secrets.randbelow(total)
        chosen = 0
        while draw >= left[chosen]:
            draw -= left[chosen]
            chosen += 1
        left[chosen] -= 1
        for each in iterators[chosen]:
            yield each
            break
        else:
            raise ValueError(f"part {chosen} is {left[chosen] + 1} shorter than it said")
    if any(True for iterator in iterators for _ in iterator):
        raise ValueError("a part is longer than it said")
