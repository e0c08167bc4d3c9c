"""A node's seed with sums, as it is sealed to the server: for how many users, and signed by whom.

A deployed node signs its seed with the key of its certificate. Then a shuffler, which may leave any
node out of a sum, cannot make the server believe that more users are in it than there are. How the
server reads seeds is in `wire.seed_reader`, which the process of a node does not load.
"""

from __future__ import annotations

import struct

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shufl.protocol.mechanisms.summed_reports import SEED_BYTES
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.wire.sealing import SEED_PAYLOAD_BYTES, RoundHeader, seal

SUM_VERSION = 2
"""Version of a node's message with sums, which the node names before a run."""

SEED_START = struct.Struct(f">B{SEED_BYTES}sQ73pH")
"""A message's version, seed, users and signature, and the length of the certificate behind them."""

SEED_SIGNATURE = ec.ECDSA(hashes.SHA256())
"""How a seed is signed."""

_CERTIFICATE_BYTES = SEED_PAYLOAD_BYTES - SEED_START.size
_SIGNED = b"shufl seed of a sum"


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
        signature = credentials.signing_key.sign(signed_part(seed, users, header), SEED_SIGNATURE)
    start = SEED_START.pack(SUM_VERSION, seed, users, signature, len(certificate))
    return seal((start + certificate).ljust(SEED_PAYLOAD_BYTES, b"\0"), public_key, header)


def signed_part(seed: bytes, users: int, header: RoundHeader) -> bytes:
    """What a node signs with its seed."""
    return _SIGNED + header.binding(SEED_PAYLOAD_BYTES) + users.to_bytes(8, "big") + seed
