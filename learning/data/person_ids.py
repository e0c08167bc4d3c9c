"""Who is one person: ids are compared by value, and two that only look different are refused."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any
from uuid import UUID

import numpy as np

from shufl.protocol.validation import ConfigError

_IDS = {str, bytes, int, UUID}  # no subclasses of these, which may compare in their own way
_MISSING = {
    *("", "-", ".", "#n/a", "#n/a n/a", "#na", "-1.#ind", "-1.#qnan", "-nan", "1.#ind", "1.#qnan"),
    *("<na>", "n/a", "na", "nan", "nat", "none", "null"),
}
"""Texts that programs read as a missing value, or write for one; capitals make no difference."""

_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\U00016fe4\U0001d159"
_SELECTORS = [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]  # of a variant of a character
_DRAWN: dict[int, str | None] = {
    **dict.fromkeys(map(ord, '"\u201c\u201d\u201e\u201f\u00ab\u00bb\\\r' + _INVISIBLE), None),
    **dict.fromkeys(_SELECTORS, None),
    **dict.fromkeys([*range(0x2010, 0x2016), 0x2D7, 0x2043, 0x2212], "-"),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u02b9\u02bc\u2032\u00b4`"), "'"),
    0x2800: " ",
}
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]?\d{1,2})?", re.ASCII)
_UUID = re.compile(r"(urn:uuid:)?\{?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\}?")
_BINARY = re.compile(r"[\0-\x08\x0e-\x1f\x7f]")


def looks(text: str) -> str:
    """What a person sees of a text: its form NFKC without quotes, spaces at the ends and the like.

    Capitals, leading zeros and letters of other scripts make a difference.
    """
    if text.isascii() and text.isprintable():  # a shortcut for most texts, ten times as fast
        drawn = text.replace('"', "").replace("\\", "").replace("`", "'")
        return " ".join(drawn.split()).strip("'")
    drawn = unicodedata.normalize("NFKC", text.translate(_DRAWN)).translate(_DRAWN)
    seen = "".join(each if each.isprintable() else " " * each.isspace() for each in drawn)
    return " ".join(unicodedata.normalize("NFKC", seen).split()).strip("'")


def spelt(value: object) -> str:
    """A value in at most 100 characters of ASCII, which show what a font may hide."""
    text = ascii(value).replace("  ", " \\x20")
    return text if len(text) <= 100 else f"{text[:97]}..."


def spaced(number: float) -> str:
    """A whole number with a space between thousands."""
    return f"{number:,.0f}".replace(",", " ")


def where(wrong: Any, place: str = "record", first: int = 1) -> str:
    """Says how many of r places are wrong, and which is the first; "" if none is.

    Args:
        wrong: an array or a tensor of bool, shape (r, ...).
        place, first: what a place is called, and the number of the first place.
    """
    rows = np.atleast_1d(np.asarray(wrong))
    at = np.flatnonzero(rows.any(axis=tuple(range(1, rows.ndim))))
    if not len(at):
        return ""
    return f"at {len(at)} of {len(rows)} {place}s, first at {place} {at[0] + first}"


def number_users(
    users: Iterable[Hashable], what: str = "users", place: str = "record", first: int = 1
) -> np.ndarray:
    """Numbers users from 0, in the order of appearance of their ids: int64 of shape (r,).

    Args:
        users: r ids in a list or an array: text, bytes, whole numbers (also of numpy, or tensors
            without an axis), UUIDs, or tuples of these.
        what: what an error calls the ids.
        place, first: what an error calls the place of an id, and the number of the first place.

    Raises:
        ConfigError: an id is none of these, is missing, or looks like another one.
    """
    given = _listed(users)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise ConfigError(
            f"{what} must be a list or an array of ids, one for each record, got {_kind(given)}"
        )
    ids = given if _IDS.issuperset(map(type, given)) else list(map(_plain, given))
    if ids is not given and not all(map(_is_id, ids)):
        wrong = [not _is_id(each) for each in ids]
        raise ConfigError(
            f"{what} must be text, bytes, whole numbers, UUIDs or tuples of these, which are "
            f"compared by value, got {_kind(ids[wrong.index(True)])} {where(wrong, place, first)}"
        )
    numbers: dict[Hashable, int] = {}
    own = np.array([numbers.setdefault(each, len(numbers)) for each in ids], dtype=np.int64)
    seen = {each: _seen(each) for each in numbers}
    if none := [numbers[each] for each, look in seen.items() if look == ""]:
        raise ConfigError(
            f"{what} must say whose each record is, got no id "
            f"{where(np.isin(own, none), place, first)} (blank, or text that stands for a missing "
            "value, such as NA, nan or None)"
        )
    known: dict[Hashable, Hashable] = {}
    if alike := [each for each, look in seen.items() if known.setdefault(look, each) is not each]:
        other = known[seen[alike[0]]]
        here, there = ((own == numbers[each]).argmax() + first for each in (alike[0], other))
        raise ConfigError(
            f"{what} must be spelt alike for one person: {place} {here} has {spelt(alike[0])}, "
            f"which looks like {spelt(other)} at {place} {there} and is another "
            f"({len(alike)} of {len(numbers)} ids look like another)"
        )
    return own


def _listed(thing: Any) -> Any:
    """Turns an array, a tensor or a number of either into Python's lists and numbers.

    Dates stay as they are: numpy would make whole numbers of them.
    """
    a_date = getattr(getattr(thing, "dtype", None), "kind", None) in ("m", "M", "V")
    try:
        return thing if a_date or not hasattr(thing, "tolist") else thing.tolist()
    except RuntimeError:  # a tensor on "meta" has no numbers, and a sparse one no order
        return thing


def _plain(given: Any) -> Any:
    """An id as a value of Python; None if it is missing. Anything else stays as it is."""
    if type(given) is tuple:
        parts = tuple(map(_plain, given))
        return next((each for each in parts if not _is_id(each)), parts)
    value = _listed(given)
    nothing = type(value) is float and value != value
    return None if nothing or type(value).__name__ in ("NAType", "NaTType") else value


def _is_id(value: Any) -> bool:
    return type(value) in _IDS or type(value) in (tuple, NoneType)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {value.dtype}" if hasattr(value, "dtype") else name


def _seen(value: Any) -> Hashable:
    """What a person sees of an id; "" if it is missing."""
    if type(value) is tuple:
        parts = tuple(map(_seen, value))
        return "" if "" in parts else parts[0] if len(parts) == 1 else parts
    if value is None:
        return ""
    if type(value) is bytes:
        value = value.rstrip(b"\0")
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return value
        return value if _BINARY.search(text) else _meant(text)
    return value if type(value) is int else _meant(str(value))


def _meant(text: str) -> Hashable:
    """What a text looks like; of a number or a UUID its value; "" if it stands for a missing one.

    Numbers that begin with 0 are texts: 007 is not 7.
    """
    look = looks(text)
    if look.casefold() in _MISSING:
        return ""
    if _NUMBER.fullmatch(look):
        return int(number) if (number := Decimal(look)) == int(number) else number
    if _UUID.fullmatch(look):
        return UUID(look).hex
    return look
