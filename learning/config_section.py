"""The sections of a configuration, read from TOML; a mistake is a ConfigError of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from shufl.protocol.validation import ConfigError, Record, read_toml


class Section(Record):
    """A table of the configuration."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The table that a TOML file holds.

        Raises:
            ConfigError: the file cannot be read, or a value is wrong.
        """
        return cls.checked(path, read_file(path))


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file; a ConfigError if it cannot be read."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
