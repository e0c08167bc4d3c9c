"""The sections of a configuration, read from TOML; a mistake is a ConfigError of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import ValidationError, field_validator

from shufl.protocol.validation import ConfigError, Record, first_mistake, read_toml


class Section(Record):
    """A table of the configuration; a number of numpy's is taken as Python's."""

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    @classmethod
    def read(cls, path: Path) -> Self:
        """The table that a TOML file holds.

        Raises:
            ConfigError: the file cannot be read, or a value is wrong.
        """
        return cls.checked(path, read_file(path))

    @classmethod
    def checked(cls, source: object, content: Any) -> Self:
        """The table of these values.

        Args:
            source: where the values come from; an error names it first.
            content: keys and values.

        Raises:
            ConfigError: a key is unknown or missing, or a value is wrong.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{source}: {first_mistake(error, cls)}") from None


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file; a ConfigError if it cannot be read."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
