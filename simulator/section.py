"""What a run's configuration is made of: its sections, and names that may be the reader's own."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accounting import lines
from accounting.validation import Record


class ConfigError(ValueError):
    """The configuration cannot be run; one line says which value, and what is allowed."""


READERS_ERRORS = (Exception, SystemExit)
"""What code of the reader's may raise: `sys.exit()` would end the command without a word."""


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
    with readers_code(f"{kind} {name} could not be imported"):
        return pkgutil.resolve_name(meant)


@contextmanager
def readers_code(failure: str) -> Iterator[None]:
    """Runs code of the reader's, of which every error is one line.

    Raises:
        ConfigError: `failure`, and what the code raised; or a ConfigError that it raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except READERS_ERRORS as error:
        raise ConfigError(f"{failure}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an exception says, in one printable line; its kind if it says nothing."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r})"
    return lines.one_line(str(error)) or type(error).__name__
