"""What a run's configuration is made of: its sections, and names that may be the reader's own."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from accounting.validation import Record


class ConfigError(ValueError):
    """The configuration cannot be run; one line says which value, and what is allowed."""


class Section(Record):
    """A table of the configuration."""


def find(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """What a configuration means by `name`: an entry of `known`, or `module:callable`, imported.

    An entry is the thing itself, or again `module:callable`.

    Raises:
        ConfigError: it is neither.
    """
    meant = known.get(name, name)
    if not isinstance(meant, str):
        return meant
    if ":" not in meant:
        raise ConfigError(
            f"{kind} must be one of {', '.join(known)}, or module:callable, got {name}"
        )
    try:
        return pkgutil.resolve_name(meant)
    except Exception as error:  # whatever the reader's module raises
        raise ConfigError(f"{kind} {name} could not be imported: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an exception says, without its line breaks; its kind if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
