"""What a run's configuration is made of: its sections, and names that may be the reader's own."""

from __future__ import annotations

import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shufl.accounting import lines
from shufl.accounting.validation import Record


class ConfigError(ValueError):
    """The configuration cannot be run; one line says which value, and what is allowed."""


READERS_ERRORS = (Exception, SystemExit)
"""What code of the reader's may raise: `sys.exit()` would end the command without a word."""


class Section(Record):
    """A table of the configuration."""


def make_importable(folders: Iterable[str | Path]) -> None:
    """Lets modules of the reader's in these folders be imported, after all that is installed."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)


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
    """What an exception says, in one printable line; its kind if it says nothing.

    If it comes from code of the reader's, also from which file and line.
    """
    said = lines.one_line(str(error)) or type(error).__name__
    if isinstance(error, SystemExit):
        said = f"it calls sys.exit({error.code!r})"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if path.is_file() and not _is_of_others(path):
            return f"{said} ({path.name}, line {line})"
    return said


def _is_of_others(path: Path) -> bool:
    """Whether a file is Python's, of an installed package or ours, and so none of the reader's."""
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    others = sysconfig.get_path("stdlib"), Path(__file__).parents[1]
    return bool(installed) or any(path.is_relative_to(other) for other in others)
