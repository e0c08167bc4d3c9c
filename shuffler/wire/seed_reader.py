"""How the server reads the seeds that nodes have sealed and signed (`wire.node_seeds`)."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shufl.shuffler.callers import Caller, Role, caller_of
from shufl.shuffler.wire.node_seeds import (
    SEED_SIGNATURE,
    SEED_START,
    SUM_VERSION,
    signed_part,
)
from shufl.shuffler.wire.sealing import SEED_PAYLOAD_BYTES, RoundHeader


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
    _, seed, users, signature, length = SEED_START.unpack_from(payload)
    if not users:
        raise ValueError("it stands for no user")
    if authority is None:
        return Seed(seed, users, "")
    caller, key = _signer(payload[SEED_START.size :][:length], authority)
    if caller is None or key is None or caller.expired:
        raise ValueError("no node with a valid certificate has signed it")
    try:
        key.verify(signature, signed_part(seed, users, header), SEED_SIGNATURE)
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
