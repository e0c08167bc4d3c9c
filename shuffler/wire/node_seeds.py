"""A node's seed with sums, as it is sealed to the server: for how many users, and signed by whom.

A deployed node signs its seed with the key of its certificate. Then a shuffler, which may leave any
node out of a sum, cannot make the server believe that more users are in it than there are.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shufl.protocol.mechanisms.summed_reports import SEED_BYTES
from shufl.shuffler.callers import Caller, Role, caller_of
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.wire.sealing import SEED_PAYLOAD_BYTES, RoundHeader, seal

SUM_VERSION = 2
"""Version of a node's message with sums, which the node names before a run."""

_START = struct.Struct(f">B{SEED_BYTES}sQ73pH")
_CERTIFICATE_BYTES = SEED_PAYLOAD_BYTES - _START.size
_SIGNED = b"shufl seed of a sum"
_ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Seed:
    """What a node has sealed.

    Attributes:
        seed: of the mask of its vector.
        users: for how many users the vector stands, at least 1.
        node: the name in the certificate that has signed this; empty: nobody has.
    """

    seed: bytes
    users: int
    node: str


def seal_seed(
    seed: bytes,
    users: int,
    public_key: bytes,
    header: RoundHeader,
    credentials: Credentials | None = None,
) -> bytes:
    """Seals a seed that stands for so many users; signed if there are credentials.

    All are of one length: `sealed_length(SEED_PAYLOAD_BYTES)`.

    Raises:
        ValueError: the certificate is too long, or the public key is not one to seal to.
    """
    certificate = signature = b""
    if credentials is not None:
        pem = x509.load_pem_x509_certificate(credentials.certificate)
        certificate = pem.public_bytes(Encoding.DER)
        if len(certificate) > _CERTIFICATE_BYTES:
            raise ValueError(
                f"a certificate must have at most {_CERTIFICATE_BYTES} bytes with sums, "
                f"got {len(certificate)}"
            )
        signature = credentials.signing_key.sign(_signed(seed, users, header), _ALGORITHM)
    start = _START.pack(SUM_VERSION, seed, users, signature, len(certificate))
    return seal((start + certificate).ljust(SEED_PAYLOAD_BYTES, b"\0"), public_key, header)


def read_seed(payload: bytes, header: RoundHeader, authority: bytes | None) -> Seed:
    """Reads what `seal_seed` has sealed for this header.

    Args:
        authority: PEM of the certificates that have issued nodes' certificates; None: none signs.

    Raises:
        ValueError: it is of another version, or stands for no user, or no node of the authority has
            signed it for as many users. One line, without what it holds.
    """
    if len(payload) != SEED_PAYLOAD_BYTES or payload[0] != SUM_VERSION:
        raise ValueError(
            f"it is not of version {SUM_VERSION}: nodes and server must have the same shufl"
        )
    _, seed, users, signature, length = _START.unpack_from(payload)
    if not users:
        raise ValueError("it stands for no user")
    if authority is None:
        return Seed(seed, users, "")
    caller, key = _signer(payload[_START.size :][:length], authority)
    if caller is None or key is None or caller.expired:
        raise ValueError("no node with a valid certificate has signed it")
    try:
        key.verify(signature, _signed(seed, users, header), _ALGORITHM)
    except InvalidSignature:
        raise ValueError(f"{caller.name} has not signed it") from None
    if users > caller.users:
        raise ValueError(
            f"{caller.name} says that it stands for {users} users, its certificate for "
            f"{caller.users}"
        )
    return Seed(seed, users, caller.name)


@functools.lru_cache(maxsize=2**16)
def _signer(
    certificate: bytes, authority: bytes
) -> tuple[Caller | None, ec.EllipticCurvePublicKey | None]:
    """The node that a certificate (DER) of the authority names, and its key; None: it is none."""
    with contextlib.suppress(Exception):  # whatever cryptography raises for made-up bytes
        loaded = x509.load_der_x509_certificate(certificate)
        key, caller = loaded.public_key(), caller_of(loaded.public_bytes(Encoding.PEM))
        if caller and caller.role is Role.NODE and caller.is_of(authority):
            return caller, key if isinstance(key, ec.EllipticCurvePublicKey) else None
    return None, None


def _signed(seed: bytes, users: int, header: RoundHeader) -> bytes:
    return _SIGNED + header.binding(SEED_PAYLOAD_BYTES) + users.to_bytes(8, "big") + seed
