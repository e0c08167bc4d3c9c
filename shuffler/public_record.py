"""The public record: which runs and rounds there were, and what each round was, as a hash chain.

The shuffler appends a line when a server creates or ends a run, and when a round opens and ends.
Whoever has kept a line's check value can tell whether the record was changed up to there
(`shufl.protocol.hash_chain`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shufl.protocol import hash_chain
from shufl.protocol.outcomes import RoundOutcome

EVENTS: dict[str, dict[str, type]] = {
    "created": {"server": str, "plan": str, "report_bytes": int},
    "opened": {"round": int, "commitment": str},
    **{outcome: {"round": int} for outcome in RoundOutcome},
    RoundOutcome.RELEASED: {"round": int, "reports": int},
    "ended": {},
}
"""What a line says beside its event and run: how a round ended, or that a run did.

`reports` counts all of the batch, blankets among them. A round is lost when the process ended
before it did.
"""


def verify(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Checks a whole record, from its first line on.

    Returns what each line says, with its check value as `check`.

    Raises:
        ValueError: a line is none, or not the one that belongs there; names its number, from 1.
    """
    return list(verified(lines))


def verified(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Checks a record as `verify` does, but line by line, and keeps none of it."""
    check = hash_chain.START
    for number, line in enumerate(lines, 1):
        try:
            values, check = hash_chain.decode(line.encode() + b"\n", check)
            wanted = {"event": str, "run": str} | EVENTS[values["event"]]
            if {name: type(value) for name, value in values.items()} != wanted:
                raise ValueError("other values than its event has")
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"line {number} of the record is damaged, or does not follow the one before it"
            ) from None
        yield values | {"check": check}
