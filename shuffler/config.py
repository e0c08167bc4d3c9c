"""A shuffler's configuration: TOML, checked before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shuffler.channel import parse_address

__all__ = ["ConfigError", "Limits", "ShufflerConfig", "Tls", "load_config"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConfigError(ValueError):
    """The configuration is not valid; one line says which key and what is wrong with it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(_Section):
    """Files that `shufl keys` makes.

    Attributes:
        certificate, key: the shuffler's own.
        authority: the certificate that clients' certificates must be issued by.
    """

    certificate: Path
    key: Path
    authority: Path


class Limits(_Section):
    """What one shuffler takes at once.

    Attributes:
        streams: of reports, at once; each may take 5 MB of memory.
        streams_per_sender: of them with one credential.
        reports_per_second: with one credential; more are slowed down. Left out: no limit.
        burst: how many may come at once before they are slowed down.
        idle_seconds: how long a stream may be silent, or leave its answers, before it is ended.
        stop_seconds: how long releases may go on after SIGTERM; a second one ends them.
    """

    streams: Count = 24
    streams_per_sender: Count = 4
    reports_per_second: Annotated[float, Field(gt=0)] | None = None
    burst: Count = 1000
    idle_seconds: Seconds = 60.0
    stop_seconds: Seconds = 300.0


class ShufflerConfig(_Section):
    """A whole shuffler.

    Attributes:
        listen: HOST:PORT; port 0 picks a free one.
        spool: directory for accepted reports. May be left out with `--exit-with-parent` only: then
            a temporary one, removed at exit.
        log_file: where the log is appended; left out: standard error.
        metrics: HOST:PORT on loopback for Prometheus; left out: none.
        plaintext: no TLS, and a token instead of certificates; on loopback only.
        tls: needed unless `plaintext` is set.
    """

    listen: str = "127.0.0.1:0"
    spool: Path | None = None
    log_file: Path | None = None
    metrics: str | None = None
    plaintext: bool = False
    tls: Tls | None = None
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.plaintext and not parse_address(self.listen)[2]:
            raise ValueError(f"plaintext only on a loopback address, got listen = {self.listen!r}")
        if self.plaintext == (self.tls is not None):
            raise ValueError("either a section [tls] or plaintext = true, and not both")
        parse_address(self.listen)
        if self.metrics is not None and not parse_address(self.metrics)[2]:
            raise ValueError(f"metrics only on a loopback address, got {self.metrics!r}")
        return self


def load_config(path: Path) -> ShufflerConfig:
    """Reads a configuration; paths in it are relative to its directory.

    Raises:
        ConfigError: one line.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        config = ShufflerConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{message}") from None
    base = path.absolute().parent
    tls = config.tls and Tls(
        certificate=base / config.tls.certificate,
        key=base / config.tls.key,
        authority=base / config.tls.authority,
    )
    return config.model_copy(
        update={
            "tls": tls,
            "spool": config.spool and base / config.spool,
            "log_file": config.log_file and base / config.log_file,
        }
    )
