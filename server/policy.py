"""What it means that a node or a shuffler is away: `Simulated` or `Deployed`.

Every run has one of the two. No field has a default: a field that is forgotten weakens nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from shufl.protocol.outcomes import AgreedNode


@dataclass(frozen=True)
class Simulated:
    """Nodes and shufflers that were started for this run, which ends when one of them fails.

    Nodes share the plan's users, and sign nothing.

    Attributes:
        nodes: how many there are; a round begins when all are ready.
        patience: seconds to wait until they are.
        round_timeout: seconds to wait for answers.
        seed: of the server's own noise in sums; None: the operating system's entropy.
        shufflers_gone: polled; once it is true, no shuffler will answer again, and nodes are not
            waited for. The run then ends with the shuffler's error.
    """

    nodes: int
    patience: float
    round_timeout: float
    seed: int | None
    shufflers_gone: Callable[[], bool]

    absence_is_fatal: ClassVar[bool] = True
    shuffler_seconds: ClassVar[float] = 0.0

    def agreed(self) -> dict[int, AgreedNode]:
        """Nothing was agreed with any node."""
        return {}

    def tell(self, line: str) -> None:
        """Nobody is told."""


@dataclass(frozen=True)
class Deployed:
    """Real nodes and shufflers, which come and go: the run waits for them, or goes on without.

    Attributes:
        patience: seconds to wait, before a round, for nodes that are away, refuse or fail, and for
            shufflers that are away.
        round_timeout: seconds to wait for answers.
        shuffler_seconds: seconds for a shuffler that is away to come back within a round.
        agreed: gives what was agreed with each node, by its number; asked whenever a node comes,
            because others may be added.
        tell: takes a line for the operator that says what is waited for; empty: nothing any more.
    """

    patience: float
    round_timeout: float
    shuffler_seconds: float
    agreed: Callable[[], dict[int, AgreedNode]]
    tell: Callable[[str], None]

    absence_is_fatal: ClassVar[bool] = False
    nodes: ClassVar[int] = 1
    seed: ClassVar[None] = None

    def shufflers_gone(self) -> bool:
        """Never: each may come back."""
        return False
