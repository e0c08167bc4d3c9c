"""Certificates: who may do what at the shuffler.

One authority (X.509, P-256, `cryptography`) issues every certificate of a deployment. A client's
certificate carries its role as a URI among its alternative names, and the shuffler reads nothing
else from it:

    urn:shufl:node:USERS:NAME   may submit, for its users 0 to USERS - 1
    urn:shufl:server:NAME       may run rounds and fetch releases
    urn:shufl:monitor:NAME      may ask whether the shuffler is healthy

Whoever holds the authority's key can enrol any number of users, and so fill a crowd with its own:
it belongs to neither the server nor the shuffler's machine. See docs/threat-model.md.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = [
    "MAX_DAYS",
    "Authority",
    "Caller",
    "Credentials",
    "Revoked",
    "Role",
    "caller_of",
]

_PREFIX = "urn:shufl:"
MAX_DAYS = 36_500
"""Longest life of a certificate."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FINGERPRINT = re.compile(r"([0-9A-Fa-f]{2}:?){32}")  # SHA-256, as openssl prints it or without `:`
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")
_EARLY = datetime.timedelta(minutes=5)  # clocks differ


class Role(StrEnum):
    """What a certificate is for."""

    SHUFFLER = "shuffler"
    NODE = "node"
    SERVER = "server"
    MONITOR = "monitor"


@dataclass(frozen=True)
class Caller:
    """Who a client's certificate says it is.

    Attributes:
        role: what it may do.
        name: which credential; in the log and the metrics never.
        users: of a node: how many users report through it. Otherwise 0.
        until: when its certificate expires; None: it has none.
        fingerprint: SHA-256 of its certificate, hexadecimal; empty: it has none.
    """

    role: Role
    name: str
    users: int
    until: datetime.datetime | None = field(default=None, compare=False)
    fingerprint: str = field(default="", compare=False)

    @property
    def expired(self) -> bool:
        """Whether its certificate has expired by now."""
        return self.until is not None and self.until < datetime.datetime.now(datetime.UTC)


class Revoked:
    """Credentials that are withdrawn before they expire: `caller in revoked`.

    A list of the operator's own and not one signed by the authority, whose key should be on no
    machine of the running system.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the file; None: nothing is withdrawn.

        Args:
            path: a file with the name of a credential, which withdraws all of that name, or the
                SHA-256 fingerprint of one certificate on each line; `#` begins a comment line.

        Raises:
            OSError: if the file can not be read.
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
        """Reads the file again; where that fails what was read before stays.

        Raises:
            OSError, ValueError: as at first.
        """
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
            if not _NAME.fullmatch(entry):
                # Without the line: this goes into the log, which names nobody.
                raise ValueError(
                    f"{self.path}, line {number}: not a credential's name or SHA-256 fingerprint"
                )
            entries.add(entry)
        self._entries = frozenset(entries)


@dataclass(frozen=True)
class Credentials:
    """One party's side of TLS, all PEM.

    Attributes:
        authority: the certificate that the other side's must be issued by.
        certificate: this party's own.
        private_key: its key.
    """

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    @classmethod
    def read(cls, directory: Path, name: str) -> Credentials:
        """What `shufl keys` wrote for this name.

        Raises:
            OSError: if a file can not be read.
        """
        return cls(
            (directory / "authority.pem").read_bytes(),
            (directory / f"{name}.pem").read_bytes(),
            (directory / f"{name}.key").read_bytes(),
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hexadecimal: what withdraws it alone (`Revoked`)."""
        return _fingerprint(x509.load_pem_x509_certificate(self.certificate))

    def write(self, directory: Path, name: str) -> None:
        """Writes NAME.pem and NAME.key (mode 0600), and the authority's certificate beside them.

        Raises:
            FileExistsError: if NAME has been issued already.
        """
        write_secret(directory / f"{name}.key", self.private_key)
        (directory / f"{name}.pem").write_bytes(self.certificate)
        if not (directory / "authority.pem").exists():
            (directory / "authority.pem").write_bytes(self.authority)


class Authority:
    """Issues certificates. Made fresh, or read from its two files."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, days: float = 3650) -> Authority:
        """A new authority with a new key, valid for `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shufl authority")])
        builder = _builder(name, name, key.public_key(), days)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The authority in `authority.pem` and `authority.key`.

        Raises:
            OSError: if a file can not be read.
            ValueError: if one does not hold what it should.
        """
        certificate = x509.load_pem_x509_certificate((directory / "authority.pem").read_bytes())
        key = serialization.load_pem_private_key((directory / "authority.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("authority.key is not a key of an elliptic curve")
        return cls(certificate, key)

    def write(self, directory: Path) -> None:
        """Writes `authority.pem` and `authority.key` (mode 0600).

        Raises:
            FileExistsError: if there is an authority in the directory.
        """
        write_secret(directory / "authority.key", _key_pem(self._key))
        (directory / "authority.pem").write_bytes(self.certificate)

    @property
    def certificate(self) -> bytes:
        """Its certificate, PEM: what both sides trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        role: Role,
        name: str,
        *,
        hosts: Sequence[str] = (),
        users: int = 0,
        days: float = 365,
    ) -> Credentials:
        """A new key and its certificate.

        Args:
            role: what it is for.
            name: 1 to 64 letters, digits, `.`, `_` or `-`.
            hosts: for a shuffler: the DNS names and IP addresses that clients know it by.
            users: for a node: how many users report through it.
            days: how long it is valid.

        Raises:
            ValueError: if an argument does not fit the role.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"a name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
        if (role is Role.SHUFFLER) != bool(hosts):
            raise ValueError("a shuffler's certificate needs hosts, and no other has any")
        if (role is Role.NODE) != (users > 0):
            raise ValueError("a node's certificate needs a number of users, and no other has one")
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        if role is Role.NODE:
            names.append(x509.UniformResourceIdentifier(f"{_PREFIX}{role}:{users}:{name}"))
        elif role is not Role.SHUFFLER:
            names.append(x509.UniformResourceIdentifier(f"{_PREFIX}{role}:{name}"))
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        if role is Role.SHUFFLER:
            usage = ExtendedKeyUsageOID.SERVER_AUTH
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(
                subject,
                self._certificate.subject,
                key.public_key(),
                days,
                self._certificate.not_valid_after_utc,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Credentials(self.certificate, pem, _key_pem(key))


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
        role, *rest = uri.removeprefix(_PREFIX).split(":")
        until, fingerprint = loaded.not_valid_after_utc, _fingerprint(loaded)
        if role == Role.NODE:
            users, name = rest
            caller = Caller(Role.NODE, name, int(users), until, fingerprint)
        else:
            (name,) = rest
            caller = Caller(Role(role), name, 0, until, fingerprint)
        return None if caller.expired else caller
    except (ValueError, x509.ExtensionNotFound):
        return None


def check_server_files(certificate: Path, key: Path, authority: Path) -> None:
    """Finds out whether a shuffler's files are what clients will accept.

    Raises:
        OSError: if a file can not be read.
        ValueError: if the certificate is not a server's, not valid now or not issued by the
            authority, or if others than its owner may read the key. One line naming the file.
    """
    own, issuer = _load(certificate), _load(authority)
    if key.stat().st_mode & 0o077:
        raise ValueError(f"{key}: others than its owner may use it; chmod 600")
    now = datetime.datetime.now(datetime.UTC)
    for path, loaded in ((certificate, own), (authority, issuer)):
        if now < loaded.not_valid_before_utc:
            raise ValueError(f"{path}: not valid before {loaded.not_valid_before_utc:%Y-%m-%d}")
        if now > loaded.not_valid_after_utc:
            raise ValueError(f"{path}: expired on {loaded.not_valid_after_utc:%Y-%m-%d}")
    try:
        usage = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound):
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage:
        raise ValueError(f"{certificate}: not a shuffler's certificate (no serverAuth)")
    try:
        own.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"{certificate}: not issued by {authority}") from None


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not a certificate in PEM") from None


def write_secret(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read.

    Raises:
        FileExistsError: if there is one.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    if not -MAX_DAYS <= days <= MAX_DAYS:  # below 0: expired ones, for tests
        raise ValueError(f"a certificate is valid for at most {MAX_DAYS} days, got {days:g}")
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    if latest is not None:
        if latest < now:
            raise ValueError(f"the authority expired on {latest:%Y-%m-%d}")
        end = min(end, latest)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLY)
        .not_valid_after(end)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(f"a host is a DNS name or an IP address, got {host!r}")
    return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
