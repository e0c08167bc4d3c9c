"""A shuffler's configuration: TOML, checked before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shuffler.channel import parse_address
from shuffler.keys import NAME

__all__ = [
    "ConfigError",
    "FrontConfig",
    "FrontLimits",
    "FrontWorker",
    "Limits",
    "ShufflerConfig",
    "Tls",
    "load_config",
]

_Config = TypeVar("_Config", bound="_Process")

Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]


class ConfigError(ValueError):
    """The configuration is not valid; one line says which key and what is wrong with it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(_Section):
    """Files that `shufl keys` makes.

    Attributes:
        certificate, key: the shuffler's own.
        authority: the certificate that clients' certificates must be issued by.
        revoked: names and fingerprints of credentials withdrawn before they expire, one a line;
            read again on SIGHUP. Left out: none.
    """

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None


class Limits(_Section):
    """What one shuffler takes at once.

    Attributes:
        streams: of reports, at once; each may take 5 MB of memory.
        streams_per_sender: of them with one credential.
        reports_per_second: with one credential; more are slowed down. Left out: no limit.
        burst: how many may come at once before they are slowed down.
        idle_seconds: how long a stream may be silent, or leave its answers, before it is ended.
        release_idle_seconds: how long a release may be left unread before its batch is destroyed;
            not at a worker of a front, where the front's counts.
        stop_seconds: how long releases may go on after SIGTERM; a second one ends them.
    """

    streams: Count = 24
    streams_per_sender: Count = 4
    reports_per_second: Annotated[float, Field(gt=0)] | None = None
    burst: Count = 1000
    idle_seconds: Seconds = 60.0
    release_idle_seconds: Seconds = 300.0
    stop_seconds: Seconds = 300.0


class _Process(_Section):
    """What a shuffler and a front have in common.

    Attributes:
        listen: HOST:PORT; port 0 picks a free one.
        log_file: where the log is appended; left out: standard error.
        metrics: HOST:PORT on loopback for Prometheus; left out: none.
        tls: files for both sides of TLS.
    """

    listen: str = "127.0.0.1:0"
    log_file: Path | None = None
    metrics: str | None = None
    tls: Tls | None = None

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        parse_address(self.listen)
        if self.metrics is not None and not parse_address(self.metrics)[2]:
            raise ValueError(f"metrics only on a loopback address, got {self.metrics!r}")
        return self


class ShufflerConfig(_Process):
    """A whole shuffler.

    Attributes:
        spool: directory for accepted reports. May be left out with `--exit-with-parent` only: then
            a temporary one, removed at exit.
        plaintext: no TLS, and a token instead of certificates; on loopback only. Otherwise `tls` is
            needed.
        worker: its name as a worker of a front; left out: it serves a server alone.
        limits: how much at once.
    """

    spool: Path | None = None
    plaintext: bool = False
    worker: Name | None = None
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.plaintext and not parse_address(self.listen)[2]:
            raise ValueError(f"plaintext only on a loopback address, got listen = {self.listen!r}")
        if self.plaintext == (self.tls is not None):
            raise ValueError("either a section [tls] or plaintext = true, and not both")
        if self.plaintext and self.worker:
            raise ValueError("a worker of a front needs a section [tls], got plaintext = true")
        return self


class FrontWorker(_Section):
    """One worker of a front.

    Attributes:
        name: what `worker` is in its configuration.
        address: its HOST:PORT.
        users: the most users enrolled there: for so many reports it makes room in a round.
    """

    name: Name
    address: str
    users: Annotated[int, Field(ge=1, le=2**24)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if parse_address(self.address)[1] == 0:
            raise ValueError(f"a worker's port lies in [1, 65535], got {self.address!r}")
        return self


class FrontLimits(_Section):
    """How long things may take at a front.

    Attributes:
        worker_seconds: longest wait for one answer of a worker, or one part of its release.
        idle_seconds: how long a call may leave its request before it is ended.
        release_idle_seconds: how long a release may be left unread before its batch is destroyed.
        stop_seconds: how long releases may go on after SIGTERM; a second one ends them.
    """

    worker_seconds: Seconds = 15.0
    idle_seconds: Seconds = 60.0
    release_idle_seconds: Seconds = 300.0
    stop_seconds: Seconds = 300.0


class FrontConfig(_Process):
    """A whole front.

    Attributes:
        workers: all of its workers.
        limits: how long things may take.
    """

    tls: Tls
    workers: Annotated[list[FrontWorker], Field(min_length=1, max_length=64)]
    limits: FrontLimits = FrontLimits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("name", "address"):
            given = [getattr(worker, key) for worker in self.workers]
            if len(set(given)) < len(given):
                raise ValueError(f"no two workers have one {key}, got {', '.join(given)}")
        return self


def load_config(path: Path, kind: type[_Config]) -> _Config:
    """Reads a configuration; paths in it are relative to its directory.

    Args:
        path: the TOML file.
        kind: `ShufflerConfig` or `FrontConfig`.

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
        config = kind.model_validate(content)
    except ValidationError as error:
        # A misspelt key first: it is also why another one is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise ConfigError(f"{path}: {_one_line(kind, first)}") from None
    base = path.absolute().parent
    found: dict[str, Any] = {name: base / path for name, path in config if isinstance(path, Path)}
    if config.tls is not None:
        found["tls"] = Tls(**{name: path and base / path for name, path in config.tls})
    return config.model_copy(update=found)


def _one_line(kind: type[_Section], error: Any) -> str:
    """One pydantic error: which key, what is wrong, and what is allowed or was given."""
    sections = error["loc"][:-1]
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        for section in sections:
            if isinstance(section, str):
                annotation = kind.model_fields[section].annotation
                kind = next(
                    each
                    for each in (annotation, *get_args(annotation))
                    if isinstance(each, type) and issubclass(each, _Section)
                )
        return f"unknown key {key}; allowed: {', '.join(kind.model_fields)}"
    if error["type"] == "missing":
        return f"{key} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":  # of a validator here, which says what was given
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, got {error['input']!r}"
