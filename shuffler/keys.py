"""Certificates: how the parties of a deployment are enrolled.

One authority (X.509, P-256, `cryptography`) issues every certificate of a deployment. What one says
of its holder is in `shuffler.callers`.

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
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shuffler.callers import NAME, Role, fingerprint_of, uri_of

MAX_DAYS = 36_500
"""Longest life of a certificate."""

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")
_EARLY = datetime.timedelta(minutes=5)  # clocks differ
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


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
        """What `shufl keys` wrote for this name."""
        files = (directory / file for file in ("authority.pem", f"{name}.pem", f"{name}.key"))
        return cls(*(path.read_bytes() for path in files))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hexadecimal: what withdraws it alone (`Revoked`)."""
        return fingerprint_of(x509.load_pem_x509_certificate(self.certificate))

    def write(self, directory: Path, name: str) -> None:
        """Writes NAME.pem and NAME.key (mode 0600), and the authority's certificate beside them.

        Raises:
            FileExistsError: if NAME has been issued already.
        """
        _write_secret(directory / f"{name}.key", self.private_key)
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
        return cls(_builder("shufl authority", key, days).sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The authority in `authority.pem` and `authority.key`.

        Raises:
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
        _write_secret(directory / "authority.key", _key_pem(self._key))
        (directory / "authority.pem").write_bytes(self.certificate)

    @property
    def certificate(self) -> bytes:
        """Its certificate, PEM: what both sides trust."""
        return _pem(self._certificate)

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
        if not NAME.fullmatch(name):
            raise ValueError(f"a name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
        if role is Role.AUTHORITY:
            raise ValueError("an authority is issued by none")
        if (role is Role.SHUFFLER) != bool(hosts):
            raise ValueError("a shuffler's certificate needs hosts, and no other has any")
        if (role is Role.NODE) != (users > 0):
            raise ValueError("a node's certificate needs a number of users, and no other has one")
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        if role is not Role.SHUFFLER:
            names = [x509.UniformResourceIdentifier(uri_of(role, name, users))]
            usage = ExtendedKeyUsageOID.CLIENT_AUTH
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(name, key, days, self._certificate)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Credentials(self.certificate, _pem(certificate), _key_pem(key))


def _write_secret(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, days: float, issuer: x509.Certificate | None = None
) -> x509.CertificateBuilder:
    """The certificate of a key, still to be signed; without an issuer, of an authority."""
    if not -MAX_DAYS <= days <= MAX_DAYS:  # below 0: expired ones, for tests
        raise ValueError(f"a certificate is valid for at most {MAX_DAYS} days, got {days:g}")
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    if issuer is not None:
        latest = issuer.not_valid_after_utc
        if latest < now:
            raise ValueError(f"the authority expired on {latest:%Y-%m-%d}")
        end = min(end, latest)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    root = issuer is None
    usages = dict.fromkeys(_USAGES, False)
    usages["key_cert_sign" if root else "digital_signature"] = True
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLY)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(root, 0 if root else None), critical=True)
        .add_extension(x509.KeyUsage(**usages), critical=True)
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


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
