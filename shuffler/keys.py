"""Certificates: how the parties of a deployment are enrolled.

One authority (X.509, P-256, `cryptography`) issues every certificate of a deployment. What one says
of its holder is in `shuffler.callers`.

A private key never leaves the machine it was made on: each party makes its own with a request
(PKCS #10), which the authority signs.

Whoever holds the authority's key can enrol any number of users, and so fill a crowd with its own:
it belongs to neither the server nor the shuffler's machine. See docs/threat-model.md.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shufl.protocol.files import write_whole
from shufl.shuffler.callers import NAME, Role, uri_of
from shufl.shuffler.credentials import CURVE, SECRET, Credentials, read_certificate, read_key

MAX_DAYS = 36_500
"""Longest life of a certificate."""

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")
_EARLY = datetime.timedelta(minutes=5)  # clocks differ
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Authority:
    """Issues certificates. Made fresh, or read from its two files."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, days: float = 3650) -> Authority:
        """A new authority with a new key, valid for `days`."""
        key = ec.generate_private_key(CURVE())
        builder = _builder("shufl authority", key.public_key(), days)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The authority in `authority.pem` and `authority.key`.

        Raises:
            ValueError: if one does not hold what it should.
        """
        certificate = read_certificate(directory / "authority.pem")
        key = read_key(directory / "authority.key")
        if certificate.public_key() != key.public_key():
            raise ValueError(f"{directory / 'authority.key'}: not the key of authority.pem")
        return cls(certificate, key)

    def write(self, directory: Path) -> None:
        """Writes `authority.pem` and `authority.key` (mode 0600).

        Raises:
            FileExistsError: if there is an authority in the directory.
        """
        key, certificate = directory / "authority.key", directory / "authority.pem"
        _write_both(key, _key_pem(self._key), certificate, self.certificate)

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
        shuffler: str = "",
        days: float = 365,
    ) -> Credentials:
        """A new key and its certificate: a request and its signature, both on this machine.

        The name has 1 to 64 letters, digits, `.`, `_` or `-`; the rest is as for `sign`.

        Raises:
            ValueError: if an argument does not fit the role.
        """
        request = Request.create(name)
        certificate = self.sign(
            request, role, hosts=hosts, users=users, shuffler=shuffler, days=days
        )
        return Credentials(self.certificate, certificate, request.private_key)

    def sign(
        self,
        request: Request,
        role: Role,
        *,
        hosts: Sequence[str] = (),
        users: int = 0,
        shuffler: str = "",
        days: float = 365,
    ) -> bytes:
        """The certificate (PEM) for a request; what it may be used for is decided here alone.

        Args:
            hosts: for a shuffler: the DNS names and IP addresses that clients know it by.
            users: for a node: how many users report through it.
            shuffler: for a node: the name of the only shuffler that may take its reports; empty:
                every one that trusts this authority.

        Raises:
            ValueError: if an argument does not fit the role.
        """
        if role is Role.AUTHORITY:
            raise ValueError("an authority is issued by none")
        if (role is Role.SHUFFLER) != bool(hosts):
            raise ValueError("a shuffler's certificate needs hosts, and no other has any")
        if users < 0 or (role is Role.NODE) != bool(users):
            raise ValueError("a node's certificate needs a number of users, and no other has one")
        if shuffler:
            _check_name(shuffler)
            if role is not Role.NODE:
                raise ValueError("only a node's certificate names a shuffler")
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        if role is not Role.SHUFFLER:
            names = [x509.UniformResourceIdentifier(uri_of(role, request.name, users, shuffler))]
            usage = ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _builder(request.name, request.public_key, days, self._certificate)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _pem(certificate)


@dataclass(frozen=True)
class Request:
    """A name and a public key that ask for a certificate.

    Attributes:
        public_key: of P-256.
        pem: the request as a file holds it, signed with its own key (PKCS #10).
        private_key: PEM; empty where the request came from another machine.
    """

    name: str
    public_key: ec.EllipticCurvePublicKey
    pem: bytes
    private_key: bytes = field(default=b"", repr=False)

    @classmethod
    def create(cls, name: str) -> Request:
        """A request of this name with a new key.

        Raises:
            ValueError: if it is no name.
        """
        return cls._of(name, ec.generate_private_key(CURVE()))

    @classmethod
    def renew(cls, directory: Path, name: str) -> Request:
        """Asks for another certificate for NAME.key, which stays: writes NAME.csr anew.

        Raises:
            ValueError: if it is no name, or the file does not hold a key.
            OSError: if a file cannot be read or written.
        """
        request = cls._of(name, read_key(directory / f"{name}.key"))
        write_whole(directory / f"{name}.csr", request.pem)
        return request

    @classmethod
    def _of(cls, name: str, key: ec.EllipticCurvePrivateKey) -> Request:
        _check_name(name)
        request = x509.CertificateSigningRequestBuilder(_subject(name)).sign(key, hashes.SHA256())
        pem = request.public_bytes(serialization.Encoding.PEM)
        return cls(name, key.public_key(), pem, _key_pem(key))

    @classmethod
    def read(cls, path: Path) -> Request:
        """The request in a file, if it is what `create` makes.

        Raises:
            ValueError: if it is not, or was changed, or asks for more than a name. One line naming
                the file.
        """
        pem = path.read_bytes()
        try:
            request = x509.load_pem_x509_csr(pem)
            key, signed = request.public_key(), request.is_signature_valid
            names = [(each.oid, each.value) for each in request.subject]
        except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
            raise ValueError(f"{path}: not a certificate request in PEM") from None
        if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, CURVE)):
            raise ValueError(f"{path}: its key is not one of P-256")
        if not signed:
            raise ValueError(f"{path}: not signed with its own key: it was changed on the way")
        if len(names) != 1 or names[0][0] != NameOID.COMMON_NAME or len(request.attributes):
            raise ValueError(
                f"{path}: a request has a common name alone; role, users and hosts are decided "
                "where it is signed"
            )
        name = str(names[0][1])
        _check_name(name)
        return cls(name, key, pem)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key, hexadecimal: the same on both machines, unless exchanged."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        content = self.public_key.public_bytes(serialization.Encoding.DER, form)
        return hashlib.sha256(content).hexdigest()

    def write(self, directory: Path) -> None:
        """Writes NAME.csr and NAME.key (mode 0600), to a machine that is not the authority's.

        Raises:
            FileExistsError: if there is one of them already.
            ValueError: if the authority's key is in the directory.
        """
        if (directory / "authority.key").exists():
            raise ValueError(
                f"{directory} is the authority's: a party makes its key on its own machine"
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, request = (directory / f"{self.name}.{end}" for end in ("key", "csr"))
        _write_both(key, self.private_key, request, self.pem)


def make_flower_key(keys: Path) -> None:
    """Makes the key that a node shows Flower, `flower.key`, and `flower.pub` for the server.

    It is not the node's key for the shuffler: Flower's processes run what the server sends, and may
    read it.

    Raises:
        FileExistsError: there is one already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write_both(keys / "flower.key", secret, keys / "flower.pub", public + b"\n")


def check_days(days: float) -> None:
    """Refuses a value of the option `--days` for which no certificate is made.

    Raises:
        ValueError: it is not above 0, or too long.
    """
    if not 0 < days <= MAX_DAYS:
        raise ValueError(f"--days lies in (0, {MAX_DAYS}], got {days:g}")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"a name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
    if name == Role.AUTHORITY:
        raise ValueError(f"{name} is the authority's own name")


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write_both(key: Path, secret: bytes, other: Path, public: bytes) -> None:
    """Writes a key and what belongs to it, or neither where one of them cannot be written.

    Raises:
        FileExistsError: one of them is there, the other one perhaps having been moved elsewhere.
    """
    if os.path.lexists(other):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(other))
    write_whole(key, secret, mode=SECRET, must_be_new=True)  # of two callers one gets the name
    try:
        write_whole(other, public, must_be_new=True)
    except OSError:
        key.unlink()
        raise


def _key_id(issuer: x509.Certificate) -> x509.SubjectKeyIdentifier:
    """As the certificate has it, which another tool may have made."""
    try:
        return issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.SubjectKeyIdentifier.from_public_key(issuer.public_key())


def _builder(
    name: str, key: ec.EllipticCurvePublicKey, days: float, issuer: x509.Certificate | None = None
) -> x509.CertificateBuilder:
    """The certificate of a key, still to be signed; without an issuer, of an authority."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    if issuer is not None:
        latest = issuer.not_valid_after_utc
        if latest < now:
            raise ValueError(f"the authority expired on {latest:%Y-%m-%d}")
        end = min(end, latest)
    subject = _subject(name)
    root = issuer is None
    usages = dict.fromkeys(_USAGES, False)
    usages["key_cert_sign" if root else "digital_signature"] = True
    own_id = x509.SubjectKeyIdentifier.from_public_key(key)
    signer_id = own_id if issuer is None else _key_id(issuer)
    by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer_id)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLY)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(root, 0 if root else None), critical=True)
        .add_extension(x509.KeyUsage(**usages), critical=True)
        # Python 3.13 and later verify as RFC 5280 asks, with the ids of both keys.
        .add_extension(own_id, critical=False)
        .add_extension(by, critical=False)
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
