"""A shuffler's configuration: TOML, checked before anything starts."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Self

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import Field, model_validator

from shufl.protocol.validation import Record, Seconds, read_toml
from shufl.shuffler.credentials import Credentials, read_certificate
from shufl.shuffler.store.operator_minimum import Floor
from shufl.shuffler.wire.channel import MOST_USERS, parse_address

Count = Annotated[int, Field(ge=1, le=10**9, description="a whole number from 1 to 10^9")]
File = Annotated[Path, Field(description="the path of a file")]


class Tls(Record, strict=False):
    """Files that `shufl keys` makes.

    Attributes:
        certificate, key: the shuffler's own.
        authority: the certificate that clients' certificates must be issued by.
        revoked: names and fingerprints of credentials withdrawn before they expire, one a line;
            read again on SIGHUP. Left out: none.
    """

    certificate: File
    key: File
    authority: File
    revoked: Path | None = Field(default=None, description="the path of a file")

    def read(self) -> Credentials:
        """A shuffler's side of TLS, if it is what clients will accept.

        Raises:
            ValueError: if the certificate is not a server's, not valid now or not issued by the
                authority, if others than its owner may read the key, or if the key is not the
                certificate's. One line naming the file.
        """
        credentials = Credentials.of_files(self.authority, self.certificate, self.key)
        if self.key.stat().st_mode & 0o077:
            raise ValueError(f"{self.key}: others than its owner may use it; chmod 600")
        own, issuer = read_certificate(self.certificate), read_certificate(self.authority)
        now = datetime.datetime.now(datetime.UTC)
        for path, loaded in ((self.certificate, own), (self.authority, issuer)):
            begins, ends = loaded.not_valid_before_utc, loaded.not_valid_after_utc
            if not begins <= now <= ends:
                raise ValueError(f"{path}: valid from {begins:%F} to {ends:%F}, and not now")
        try:
            usage = list(own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        except (ValueError, x509.ExtensionNotFound):
            usage = []
        if ExtendedKeyUsageOID.SERVER_AUTH not in usage:
            raise ValueError(f"{self.certificate}: not a shuffler's certificate (no serverAuth)")
        return credentials


class Limits(Record, strict=False):
    """What one shuffler takes at once.

    Attributes:
        users: the largest number of users who can report in a round, if the plan has more.
        calls: open calls at once, of all kinds; each may take 0.8 MB of memory.
        calls_per_sender: open calls with one credential; of one that is no server's, two while half
            of all calls are taken.
        uploads: reports of more than 256 KiB that may be on their way at once in a round.
        runs_per_server: runs of one server credential that have not ended.
        open_rounds_per_server: open rounds in all of its runs.
        disk_gigabytes_per_server: disk for the batches of its runs. Left out: the whole disk. A
            batch takes all that could come into it, from its opening until it is destroyed: a
            server that opens rounds until it is refused must not learn how many reports have come.
        idle_seconds: how long a call may say nothing, and a release be left unread, before it is
            ended.
        release_hours: how long a batch waits for the server to close, fetch or end it, at most.
        stop_seconds: how long releases may go on after SIGTERM; a second one ends them.
    """

    users: int = Field(
        default=MOST_USERS,
        ge=1,
        le=MOST_USERS,
        description=f"a whole number from 1 to {MOST_USERS}",
    )
    calls: Count = 256
    calls_per_sender: Count = 16
    uploads: Count = 24
    runs_per_server: Count = 16
    open_rounds_per_server: Count = 8
    disk_gigabytes_per_server: float | None = Field(
        default=None, gt=0, le=1e9, description="a number in (0, 10^9]"
    )
    idle_seconds: Seconds = 60.0
    release_hours: float = Field(default=1.0, gt=0, le=1e4, description="a number in (0, 10^4]")
    stop_seconds: Seconds = 300.0

    @model_validator(mode="before")
    @classmethod
    def _streams_are_uploads(cls, given: Any) -> Any:
        """Reads the key `streams`, which `shufl provision` of 0.1.0 wrote."""
        if not isinstance(given, dict) or "streams" not in given or "uploads" in given:
            return given
        return {"uploads" if key == "streams" else key: value for key, value in given.items()}


class ShufflerConfig(Record, strict=False):
    """A whole shuffler.

    Attributes:
        listen: HOST:PORT; port 0 picks a free one.
        directory: where the public record is, and the rounds' unnamed files. May be left out with
            `--exit-with-parent` only: then a temporary one, removed at exit, in which nothing waits
            for the disk.
        log_file: where the log is appended; left out: standard error.
        log_megabytes: a log file that grows beyond is renamed to `log_file`.1 and another is begun;
            0: never.
        log_kept: how many renamed ones are kept.
        metrics: HOST:PORT on loopback for Prometheus; left out: none.
        tls: files for both sides of TLS.
        limits: how much at once.
        floor: what the plan of every run is held to.
        simulation_seed: makes the blankets a function of it, so that they protect nobody; with
            `--exit-with-parent` only, where the shuffler is part of a simulation.
    """

    listen: str = "127.0.0.1:0"
    directory: Path | None = Field(default=None, description="the path of a directory")
    log_file: Path | None = Field(default=None, description="the path of a file")
    log_megabytes: float = Field(default=10.0, ge=0, le=1e6, description="a number from 0 to 10^6")
    log_kept: int = Field(default=5, ge=1, le=1000, description="a whole number from 1 to 1000")
    metrics: str | None = None
    tls: Tls
    limits: Limits = Limits()
    floor: Floor = Floor()
    simulation_seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="a whole number in [0, 2^63)"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_address(self.listen)
        if self.metrics is not None and not parse_address(self.metrics)[2]:
            raise ValueError(f"metrics only on a loopback address, got {self.metrics!r}")
        return self


def load_config(path: Path) -> ShufflerConfig:
    """Reads a configuration; paths in it are relative to its directory.

    Raises:
        ValueError: one line that says which key and what is wrong with it.
        OSError: the file cannot be read.
    """
    config = ShufflerConfig.checked(path, read_toml(path))
    base = path.absolute().parent
    found: dict[str, Any] = {name: base / path for name, path in config if isinstance(path, Path)}
    found["tls"] = Tls(**{name: path and base / path for name, path in config.tls})
    return config.model_copy(update=found)
