"""The public record: which rounds there were, and what each of them was, as a hash chain.

The shuffler appends an entry when a round opens and when it ends. Each entry holds the hash of the
one before, so that nobody can change, drop or insert one without changing all hashes after it, and
whoever has kept a hash can tell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

START = "0" * 64
"""What stands for the hash of the entry before the first."""

_KINDS = {"run": str, "round": int, "event": str, "commitment": str}


def entry_hash(entry: str) -> str:
    """SHA-256 of an entry's JSON, hexadecimal."""
    return hashlib.sha256(entry.encode()).hexdigest()


def make_entry(index: int, previous: str, about: dict[str, Any]) -> str:
    """The JSON of an entry, on one line.

    `index` counts from 0, and `previous` is the hash of the entry before, or `START`. `about` holds
    run, round, event, plan, commitment, and the number of reports, blankets among them, where the
    batch was released.
    """
    return json.dumps({"index": index, **about, "previous": previous}, separators=(",", ":"))


def verify(entries: Iterable[str]) -> list[dict[str, Any]]:
    """Checks a whole record.

    The entries are given as JSON, from the first on. Returns their values, each with its `hash`
    added.

    Raises:
        ValueError: an entry is none, or not the one that belongs there; names its index.
    """
    found, previous = [], START
    for index, entry in enumerate(entries):
        try:
            values = json.loads(entry)
            good = values["index"] == index and values["previous"] == previous
            good = good and all(isinstance(values[name], kind) for name, kind in _KINDS.items())
            # In ASCII and on one line: an entry is written to a file, and shown on a terminal.
            good = good and entry == json.dumps(values, separators=(",", ":"))
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            raise ValueError(
                f"entry {index} of the record is damaged, or does not follow the one before it"
            )
        previous = entry_hash(entry)
        found.append(values | {"hash": previous})
    return found
