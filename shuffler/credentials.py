"""Credentials: a party's certificate and private key, and how they are read from files.

Who makes them is in `shuffler.keys`, which the process of a node does not load.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shufl.protocol.files import write_whole

CURVE = ec.SECP256R1
SECRET = 0o600
"""The mode of a file with a private key."""


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
            ValueError: if a file does not hold what it should, or the key is not the certificate's.
            OSError: if one cannot be read.
        """
        files = (directory / file for file in ("authority.pem", f"{name}.pem", f"{name}.key"))
        return cls.of_files(*files)

    @classmethod
    def of_files(cls, authority: Path, certificate: Path, key: Path) -> Credentials:
        """What three files hold; raises as `read` does."""
        issuer, own = read_certificate(authority), read_certificate(certificate)
        if own.public_key() != read_key(key).public_key():
            raise ValueError(f"{key}: not the key of {certificate}")
        try:
            own.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            raise ValueError(f"{certificate}: not issued by {authority}") from None
        return cls(*(path.read_bytes() for path in (authority, certificate, key)))

    @property
    def name(self) -> str:
        """Whose they are, by the certificate's common name; empty: it has none."""
        subject = x509.load_pem_x509_certificate(self.certificate).subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else ""

    @property
    def signing_key(self) -> ec.EllipticCurvePrivateKey:
        """The private key, to sign with.

        Raises:
            ValueError: it is not one of P-256.
        """
        key = serialization.load_pem_private_key(self.private_key, None)
        if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, CURVE)):
            raise ValueError(f"the key of {self.name} must be one of P-256 to sign with")
        return key

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hexadecimal: what withdraws it alone (`Revoked`)."""
        return fingerprint_of(x509.load_pem_x509_certificate(self.certificate))

    def write(self, directory: Path, name: str) -> None:
        """Writes NAME.pem and NAME.key (mode 0600), and the authority's certificate beside them.

        Raises:
            FileExistsError: if NAME has been issued already.
        """
        key = directory / f"{name}.key"
        write_whole(key, self.private_key, mode=SECRET, must_be_new=True)
        write_whole(directory / f"{name}.pem", self.certificate)
        if not (directory / "authority.pem").exists():
            write_whole(directory / "authority.pem", self.authority)


AnyCredentials = Credentials | Callable[[], Credentials]
"""Credentials, or a function that reads their files at every call, so that renewals count."""


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a file.

    Raises:
        ValueError: if there is none. One line naming the file.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (ValueError, x509.InvalidVersion):
        raise ValueError(f"{path}: not a certificate in PEM") from None


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, hexadecimal: what withdraws it alone."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def renew_from(certificate: x509.Certificate) -> datetime.datetime:
    """When to renew: 30 days before a certificate ends, or in the last 15 % of a shorter life."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return ends - min(datetime.timedelta(days=30), 0.15 * (ends - begins))


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a file.

    Raises:
        ValueError: if there is none. One line naming the file.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path}: not a private key of an elliptic curve in PEM")
    return key
