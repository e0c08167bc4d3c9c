"""What a value may be: types for the fields of plans and configurations, checks for arguments.

Every refusal is one line that names the value, what is allowed and what was given.
"""

import difflib
import math
import numbers
import os
import platform
import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, description="a whole number, at least 1")]
Positive = Annotated[Number, Field(gt=0, description="a number above 0")]
NotNegative = Annotated[Number, Field(ge=0, description="a number, at least 0")]
# Within it float64 and float32 hold an update and its noise without loss.
ClipNorm = Annotated[Number, Field(ge=1e-18, le=1e15, description="a number in [1e-18, 1e15]")]
Seconds = Annotated[Number, Field(gt=0, le=1e9, description="a number in (0, 10^9]")]
Probability = Annotated[Number, Field(gt=0, lt=1, description="a number in (0, 1)")]


class ConfigError(ValueError):
    """A value is not allowed, in a configuration, a file or an argument.

    Its text is one line that names the value, what was given and what is allowed, such as
    `check-in rate must lie in (0, 1], got 1.3`.
    """

    def _render_traceback_(self) -> list[str]:
        """Gives the line that IPython shows in a notebook in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class Record(BaseModel):
    """A frozen record of values of exactly the types named; an unknown name is an error.

    A number of numpy's is taken as Python's.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: it.item() if isinstance(it, np.generic) else it for key, it in given.items()}

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Returns the record that a TOML file holds.

        Raises:
            ConfigError: The file cannot be read, or a value is wrong.
        """
        return cls.checked(path, read_file(path))

    @classmethod
    def checked(cls, source: object, content: Any) -> Self:
        """Returns the record of these values.

        Args:
            source: Where the values come from; an error names it first.
            content: Keys and values.

        Raises:
            ConfigError: A key is unknown or missing, or a value is wrong.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{source}: {first_mistake(error, cls)}") from None


class Checked(Record):
    """A record that answers a wrong value by a ConfigError of one line."""

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        """Checks every value.

        Raises:
            ConfigError: An unknown or missing name, a value without one, or one that is not
                allowed.
        """
        if unnamed:
            names = ", ".join(f"{name}=" for name in type(self).model_fields if name != "name")
            raise ConfigError(
                f"{type(self).__name__} takes values by name ({names}), got {shown(unnamed[0])}"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(first_mistake(error, type(self))) from None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some values changed, checked like a new one."""
        return type(self)(**(dict(self) | changes))


def check_linux(what: str) -> None:
    """Checks that this system has what protects real users.

    A node keeps records in memory that is no file, and a shuffler takes a round's disk at once.

    Raises:
        ConfigError: It is another system than Linux.
    """
    if not (hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")):
        raise ConfigError(
            f"{what} for real users needs Linux, got {platform.system()}; simulations, accountants "
            "and audits run here"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file.

    Raises:
        OSError: It cannot be read.
        ConfigError: It is no TOML, in one line that names it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file; a ConfigError if it cannot be read."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def first_mistake(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns what is wrong first: `key must be …, got …`, or that a key is unknown or missing.

    An unknown key comes before all else: it may be why another one is missing.

    The descriptions of the model's fields say what is allowed.
    """
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    kind, path = first["type"], [str(part) for part in first["loc"]]
    section, depth = _section_of(path, model)
    where = ".".join(path)
    if kind == "value_error":  # of a check of our own, which says what is wrong
        text = str(first["ctx"]["error"])
        if path and text.partition(" ")[0] in section.model_fields:
            return f"{where}.{text}"
        return text if text.startswith(where) else f"{where}: {text}"
    if kind == "json_invalid":
        return f"it must be JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if kind == "extra_forbidden":
        names = list(section.model_fields)
        close = difflib.get_close_matches(path[-1], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"unknown key {where}; {hint}allowed: {', '.join(names)}"
    if depth < len(path):  # a value
        where, field = ".".join(path[: depth + 1]), section.model_fields[path[depth]]
        allowed = field.description or words_of(field.annotation)
        if kind == "missing":
            return f"{where} is missing" + (f": {allowed}" if allowed else "")
        allowed = allowed or first["msg"].removeprefix("Input should be ")
    elif kind == "missing":  # a whole section
        return f"{where} is missing"
    elif kind == "union_tag_invalid":
        allowed = f"one with the name {first['ctx']['expected_tags']}"
    elif kind == "tuple_type":
        allowed = f"one table of values or several, each below [[{where}]]"
    else:
        allowed = "one table of values at least" if first["input"] == [] else "a table of values"
    return f"{where or 'it'} must be {allowed}, got {shown(first['input'])}"


def words_of(kind: Any) -> str:
    """What a type says is allowed; of a union, what its parts say; nothing where it is silent."""
    if kind is NoneType:
        return "left out"
    if get_origin(kind) is Literal:
        values = get_args(kind)
        return f'"{values[0]}"' if len(values) == 1 else f"one of {', '.join(map(str, values))}"
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return " or ".join(filter(None, map(words_of, get_args(kind))))
    said = (getattr(each, "description", None) for each in getattr(kind, "__metadata__", ()))
    return next(filter(None, said), "")


def shown(value: Any) -> str:
    """Returns what was given, at most 100 characters of it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # tables in tables, a number of thousands of digits
        return "more than can be shown"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _section_of(path: list[str], model: type[BaseModel]) -> tuple[type[BaseModel], int]:
    """The innermost section that a path leads into, and how many names of the path it takes."""
    for depth, part in enumerate(path):
        if part.isdecimal():  # one of several sections
            continue
        info = model.model_fields.get(part)
        kinds = (info.annotation, *get_args(info.annotation)) if info else ()
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return model, depth
        model = inner[0]
    return model, len(path)


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value` as an int in [low, high].

    Raises:
        ConfigError: Not an integer (a bool is none) or out of range.
    """
    allowed = f"at least {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be an integer {allowed}, got {value!r}")
    if not low <= (number := int(value)) <= (number if high is None else high):
        raise ConfigError(f"{name} must be {allowed}, got {number}")
    return number


def real(name: str, value: Any, interval: str) -> float:
    """Returns `value` as a finite float inside an interval written as `(0, 1]` or `[0, inf)`.

    Raises:
        ConfigError: Not a finite real number (a bool is none) or outside the interval.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number in {interval}, got {value!r}")
    number, (low, high) = float(value), map(float, interval[1:-1].split(","))
    on_an_end = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not (math.isfinite(number) and (low < number < high or on_an_end)):
        raise ConfigError(f"{name} must lie in {interval}, got {number}")
    return number


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of the allowed words.

    Raises:
        ConfigError: Anything else.
    """
    if not isinstance(value, str) or value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ConfigError(f"{name} must be {words}, got {value!r}")
    return value
