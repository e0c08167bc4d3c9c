"""Who calls the shuffler: what a certificate says, and which credentials are withdrawn.

A client's certificate carries its role as a URI among its alternative names, and the shuffler reads
nothing else from it:

    urn:shufl:node:USERS:NAME             may submit, for its users 0 to USERS - 1
    urn:shufl:node:USERS:NAME:SHUFFLER    may do so at the shuffler of that name alone
    urn:shufl:server:NAME                 may run rounds and fetch releases
    urn:shufl:monitor:NAME                may ask whether the shuffler is healthy
"""

from __future__ import annotations

import datetime
import functools
import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from shufl.shuffler.credentials import fingerprint_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a credential may be called."""

_PREFIX = "urn:shufl:"
_FINGERPRINT = re.compile(r"([0-9A-Fa-f]{2}:?){32}")  # SHA-256, as openssl prints it or without `:`


class Role(StrEnum):
    """What a certificate is for."""

    AUTHORITY = "authority"  # it issues the others, and calls nobody
    SHUFFLER = "shuffler"
    SERVER = "server"
    NODE = "node"
    MONITOR = "monitor"


@dataclass(frozen=True)
class Caller:
    """Who a client's certificate says it is.

    Attributes:
        role: what it may do.
        name: which credential; in the log and the metrics never.
        users: of a node: how many users report through it. Otherwise 0.
        shuffler: of a node: the only shuffler where they may; empty: at every one.
        until: when its certificate expires; None: it has none.
        fingerprint: SHA-256 of its certificate, hexadecimal; empty: it has none.
        certificate: the certificate, PEM; empty: it has none.
    """

    role: Role
    name: str
    users: int
    shuffler: str = ""
    until: datetime.datetime | None = field(default=None, compare=False)
    fingerprint: str = field(default="", compare=False)
    certificate: bytes = field(default=b"", compare=False, repr=False)

    @property
    def expired(self) -> bool:
        """Whether its certificate has expired by now."""
        return self.until is not None and self.until < datetime.datetime.now(datetime.UTC)

    def is_of(self, authority: bytes) -> bool:
        """Whether a certificate of this PEM has issued its own."""
        return not self.certificate or _has_issued(authority, self.certificate)


class Revoked:
    """Credentials that are withdrawn before they expire: `caller in revoked`.

    A list of the operator's own and not one signed by the authority, whose key should be on no
    machine of the running system.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the file; None: nothing is withdrawn.

        Each line of the file has the name of a credential, which withdraws all of that name, or the
        SHA-256 fingerprint of one certificate; `#` begins a comment line.

        Raises:
            ValueError: if a line is neither; one line naming the file.
        """
        self.path = path
        self._entries: frozenset[str] = frozenset()
        self.read()

    def __contains__(self, caller: Caller) -> bool:
        return caller.name in self._entries or caller.fingerprint in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def read(self) -> None:
        """Reads the file again; where that fails what was read before stays."""
        if self.path is None:
            return
        entries = set()
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            entry = line.strip()
            if not entry or entry.startswith("#"):
                continue
            if _FINGERPRINT.fullmatch(entry):
                entry = entry.replace(":", "").lower()
            if not NAME.fullmatch(entry):
                # Without the line: this goes into the log, which names nobody.
                raise ValueError(
                    f"{self.path}, line {number}: not a credential's name or SHA-256 fingerprint"
                )
            entries.add(entry)
        self._entries = frozenset(entries)


def uri_of(role: Role, name: str, users: int, shuffler: str) -> str:
    """What a client's certificate says of it; `users` and `shuffler` count for a node only."""
    said = (str(users), name, shuffler) if role is Role.NODE else (name,)
    return _PREFIX + ":".join((role, *filter(None, said)))


def caller_of(certificate: bytes) -> Caller | None:
    """Who a certificate (PEM) names; None if it has no role here, or has expired.

    The signature is not checked: TLS has done that. It has also checked the time, but only when the
    connection was made.
    """
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (uri,) = (uri for uri in uris if uri.startswith(_PREFIX))
        role, *said = uri.removeprefix(_PREFIX).split(":")
        users, name, *shuffler = said if role == Role.NODE else ("0", *said)
        if "" in said or len(shuffler) > (role == Role.NODE):
            return None
        until, fingerprint = loaded.not_valid_after_utc, fingerprint_of(loaded)
        about = "".join(shuffler), until, fingerprint, certificate
        caller = Caller(Role(role), name, int(users), *about)
        return None if caller.expired else caller
    except (ValueError, x509.ExtensionNotFound):
        return None


@functools.lru_cache(maxsize=2**14)
def _has_issued(authority: bytes, certificate: bytes) -> bool:
    loaded = x509.load_pem_x509_certificate(certificate)
    for each in x509.load_pem_x509_certificates(authority):
        with suppress(ValueError, TypeError, InvalidSignature):
            loaded.verify_directly_issued_by(each)
            return True
    return False
