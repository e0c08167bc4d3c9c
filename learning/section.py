"""What a run's configuration is made of: its sections, and names that may be the reader's own."""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import ValidationError, field_validator

from shufl.learning.isolation import usual_settings
from shufl.learning.names import MOVED
from shufl.protocol import text
from shufl.protocol.validation import ConfigError as ConfigError
from shufl.protocol.validation import Record, first_mistake, read_toml

READERS_ERRORS = (Exception, SystemExit)
"""What code of the reader's may raise: `sys.exit()` would end the command without a word."""


class Section(Record):
    """A table of the configuration; `read` and `checked` answer a mistake by a ConfigError.

    Numpy's numbers are taken as Python's.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a TOML file has."""
        return cls.checked(path, read_file(path))

    @classmethod
    def checked(cls, source: object, content: Any) -> Self:
        """What these values say; a mistake names `source` first."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{source}: {first_mistake(error, cls)}") from None


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def make_importable(folders: Iterable[str | Path]) -> None:
    """Lets modules of the reader's in these folders be imported, after all that is installed."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)


class Carried(str):
    """The name of an object of the reader's program, which it brings along to other processes.

    It stands in a configuration where else a name does. Functions and classes of a notebook go
    with it, by cloudpickle; a process opens it when it is first asked for, because the reader's
    modules may have to be made importable before. `put_in_ray` has it travel as a reference.
    """

    def __new__(cls, name: str, value: Any = None, packed: Any = None) -> Carried:
        """Names an object, given as it is or as `packed`, what `_pack` or Ray made of it."""
        self = super().__new__(cls, name if is_carried(name) else _CARRIED + name)
        self._packed = packed
        if packed is None:
            self.value = value
        return self

    @functools.cached_property
    def value(self) -> Any:
        """The object."""
        import cloudpickle

        if not isinstance(self._packed, bytes):
            import ray

            return cloudpickle.loads(ray.get(self._packed))
        return cloudpickle.loads(self._packed)

    def put_in_ray(self) -> None:
        """Puts the object in the Ray that has been started, once for all who are sent it."""
        import ray

        self._packed = ray.put(self._pack())

    def _pack(self) -> bytes:
        """Raises ConfigError if the object holds what cannot leave this process."""
        import cloudpickle

        with readers_code(f"{self} cannot be sent to another process"):
            packed: bytes = cloudpickle.dumps(self.value)
        return packed

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (str(self), None, self._pack() if self._packed is None else self._packed)

    __hash__ = object.__hash__  # two objects of one name are two

    def __eq__(self, other: object) -> bool:
        return self is other


_CARRIED = "object:"


def is_carried(name: str) -> bool:
    """Whether a configuration's name stands for an object, which may be missing."""
    return name.startswith(_CARRIED)


def find(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """What a configuration means by `name`: an entry of `known`, or `module:callable`, imported.

    An entry is the thing itself, or again `module:callable`.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(name, Carried):
        return name.value
    if is_carried(name):
        raise ConfigError(
            f"{kind} {name} is an object of a Python program: give it to shufl.resume or "
            "shufl.load_run again"
        )
    meant = known.get(name, MOVED.get(name, name))
    if not isinstance(meant, str):
        return meant
    if ":" not in meant:
        raise ConfigError(
            f"{kind} must be one of {', '.join(known)}, or module:callable, got {name}"
        )
    with readers_code(f"{kind} {name} could not be imported", quote=_OF_IMPORTS), usual_settings():
        return pkgutil.resolve_name(meant)


Kinds = tuple[type[BaseException], ...]
_OF_IMPORTS = ImportError, AttributeError, NameError, SyntaxError


@contextmanager
def readers_code(failure: str, quote: Kinds = (BaseException,)) -> Iterator[None]:
    """Runs code of the reader's, of which every error is one line.

    `quote` has the kinds of errors whose texts are in the line: none, `()`, for code that has
    users' records, whose errors may quote one. Of others the line says the kind and the place.

    Raises:
        ConfigError: `failure`, and what the code raised; or a ConfigError that it raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except READERS_ERRORS as error:
        raise ConfigError(f"{failure}: {one_line(error, quote)}") from error


def one_line(error: BaseException, quote: Kinds = (BaseException,)) -> str:
    """What an exception says, in one printable line; its kind if it says nothing.

    If it comes from code of the reader's, also from which file and line. `quote` is as for
    `readers_code`.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    quoted = isinstance(error, quote)
    if isinstance(error, TypeError) and frames:  # of a call of ours that does not fit
        quoted = quoted or Path(frames[-1][0].f_code.co_filename).is_relative_to(_OURS)
    said = text.one_line(str(error)) if quoted else ""
    if isinstance(error, SystemExit):
        code = repr(error.code) if quoted or isinstance(error.code, int | None) else "…"
        said = f"it calls sys.exit({code})"
    elif not quoted and isinstance(error, OSError) and isinstance(error.errno, int):
        said = os.strerror(error.errno)  # of the system: what the error says may quote a record
    said = said or type(error).__name__
    for frame, line in reversed(frames):
        path = Path(frame.f_code.co_filename)
        if path.is_file() and not is_of_others(path):
            return f"{said} ({path.name}, line {line})"
    return said


_OURS = Path(__file__).parents[1]


def is_of_others(path: Path) -> bool:
    """Whether a file is Python's, of an installed package or ours, and so none of the reader's."""
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    others = sysconfig.get_path("stdlib"), _OURS
    return bool(installed) or any(path.is_relative_to(other) for other in others)
