"""Sealing reports to the server, so that the shuffler carries what it cannot read.

HPKE (RFC 9180), base mode, one message per encapsulation, from `cryptography`; nothing here is
cryptography of our own. Every seal draws a fresh ephemeral key, so sealing is randomised and two
seals of the same payload cannot be linked.

Two suites: `x25519`, and the post-quantum hybrid `mlkem768-x25519`, which stays closed as long as
either of its halves holds (draft-ietf-hpke-pq); it matters to whoever expects today's traffic to be
kept until there is a quantum computer. A public key's length says which one it belongs to.

A report is bound to its round and length: the header's encoding is HPKE's `info`. RFC 9180 section
5.1 hashes `info` into the key schedule, so under any other header the key differs and the report
does not open. (The library offers no `aad`; for single-shot use RFC 9180 section 8.1 says `info`
will do.)

Inside, before the payload, are 16 random bytes: the report's id. A copy of a sealed report, handed
in by another user, opens to the same id, and `ReportOpener` rejects it. The shuffler does not see
ids.

Base mode authenticates nobody: who may submit is the shuffler's question.

A key pair is made for each round and never written anywhere; when the server drops the private key
OpenSSL overwrites it, and the round's reports cannot be opened by anyone again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from shufl.shuffler.wire.channel import MAX_REPORT_BYTES
from shufl.shuffler.wire.errors import RejectReason, ReportRejected
from shufl.shuffler.wire.reports import report_length

Sealing = Literal["x25519", "mlkem768-x25519"]
"""The names of the suites."""

PrivateKey = X25519PrivateKey | MLKEM768X25519PrivateKey
"""The server's private key of one round."""

ID_BYTES = 16
"""Length of a report's id."""

SEED_PAYLOAD_BYTES = 885
"""Length of what a node seals with its seed (`wire.node_seeds`): room for the longest certificate.

Messages of version 1 were sealed at a length that no message of this version has, so shufflers and
servers of different versions refuse each other's runs.
"""

_DOMAIN = b"shufl.v5 sealed report"
_TAG_BYTES = 16
_X25519_BYTES = 32
_MLKEM768_BYTES = 1184


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One suite, and how to read a public key; `overhead` is what sealing adds to a payload."""

    suite: Suite
    overhead: int
    public_bytes: int
    read: Callable[[bytes], Any]


def _read_hybrid(data: bytes) -> MLKEM768X25519PublicKey:
    return MLKEM768X25519PublicKey(
        MLKEM768PublicKey.from_public_bytes(data[:_MLKEM768_BYTES]),
        X25519PublicKey.from_public_bytes(data[_MLKEM768_BYTES:]),
    )


def _kind(kem: KEM, public_bytes: int, read: Callable[[bytes], Any]) -> _Kind:
    # ChaCha20-Poly1305 rather than AES-GCM: as fast within 20 %, and free of timing leaks on user
    # devices without AES instructions.
    suite = Suite(kem, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
    return _Kind(suite, kem.enc_length() + ID_BYTES + _TAG_BYTES, public_bytes, read)


_KINDS: dict[str, _Kind] = {
    "x25519": _kind(KEM.X25519, _X25519_BYTES, X25519PublicKey.from_public_bytes),
    "mlkem768-x25519": _kind(KEM.MLKEM768_X25519, _MLKEM768_BYTES + _X25519_BYTES, _read_hybrid),
}

SEALED_BYTES = min(kind.overhead for kind in _KINDS.values())
"""What sealing adds to a report, at least: no shorter one is sealed."""


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class RoundHeader:
    """What a report belongs to; all of it is bound into the seal.

    Attributes:
        round: the round's number, 0 ≤ round < 2⁶³.
        model_digest: `model_digest` of the model that the report was computed on.
        plan_digest: SHA-256 of the privacy plan's bytes, lower-case hexadecimal.
        key_digest: `key_digest` of the server's public key of the round.
        nonce: what the shuffler drew for the round; empty before it has said it.

    Raises:
        ValueError: if a field has another type, or `round` is out of range.
    """

    run_id: str
    round: Annotated[int, Field(ge=0, lt=2**63)]
    model_digest: str
    plan_digest: str
    key_digest: str
    nonce: bytes = b""

    @functools.cached_property
    def commitment(self) -> str:
        """SHA-256 (hexadecimal) of all fields: equal for two parties who were shown the same.

        Each field carries its own length, so that different headers are different bytes.
        """
        fields = (
            self.run_id.encode(),
            self.round.to_bytes(8, "big"),
            self.model_digest.encode(),
            self.plan_digest.encode(),
            self.key_digest.encode(),
            self.nonce,
        )
        parts = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
        return hashlib.sha256(b"shufl.v5 round" + parts).hexdigest()

    def binding(self, length: int) -> bytes:
        """What a sealed payload of this length is bound to."""
        return _DOMAIN + self.commitment.encode() + length.to_bytes(8, "big")


def generate_key_pair(sealing: Sealing = "x25519") -> tuple[PrivateKey, bytes]:
    """A fresh key pair of the server for one round.

    Returns:
        The private key, and the public key's bytes (32, or 1216 for the hybrid).
    """
    x25519 = X25519PrivateKey.generate()
    public = x25519.public_key().public_bytes_raw()
    if sealing == "x25519":
        return x25519, public
    mlkem = MLKEM768PrivateKey.generate()
    return MLKEM768X25519PrivateKey(mlkem, x25519), mlkem.public_key().public_bytes_raw() + public


def key_digest(public_key: bytes) -> str:
    """SHA-256 of a public key, hexadecimal: by it clients and shuffler know they have the same."""
    return hashlib.sha256(public_key).hexdigest()


def payload_length(sealed_length: int, public_key: bytes) -> int:
    """Length in bytes of what a sealed report of this length holds.

    Raises:
        ValueError: if the public key has another length than any, or nothing is left.
    """
    kind = _kind_of(public_key)
    length = sealed_length - kind.overhead
    if length < 0:
        raise ValueError(f"a sealed report to this key is longer than {sealed_length} bytes")
    return length


def sealed_length(payload_length: int, sealing: Sealing = "x25519") -> int:
    """Length in bytes of a sealed payload of `payload_length` bytes."""
    return _KINDS[sealing].overhead + payload_length


def usual_sealing(mixing: str) -> Sealing:
    """The suite where nobody has chosen one.

    With sums the shuffler has all of a node's message but the seed, and it may carry no noise of
    its own: whoever opens the seed, however late, has the node's sum.
    """
    return "mlkem768-x25519" if mixing == "sum" else "x25519"


def message_length(dimension: int, mixing: str, sealing: Sealing = "x25519") -> int:
    """Length in bytes of what is sent in a round: a sealed report, or a vector with its seed."""
    if mixing == "sum":
        return 4 * dimension + sealed_length(SEED_PAYLOAD_BYTES, sealing)
    return sealed_length(report_length(dimension), sealing)


def most_parameters(sealing: Sealing = "x25519", mixing: str = "shuffle") -> int:
    """The most parameters of a model whose report, or masked vector, a shuffler takes."""
    fixed = message_length(0, mixing, sealing)
    return (MAX_REPORT_BYTES - fixed) // (message_length(1, mixing, sealing) - fixed)


def seal(payload: bytes, public_key: bytes, header: RoundHeader) -> bytes:
    """Seals a payload to the server's public key for one round (RFC 9180, base mode).

    All payloads of a run must have one length, since sealing keeps it. The server must name the
    same header to open the report, of `sealed_length(len(payload))` bytes.

    Raises:
        ValueError: if the public key has another length or is no usable key.
    """
    content = content_for(len(payload))
    content[ID_BYTES:] = payload
    return seal_content(content, public_key, header)


def content_for(payload_length: int) -> bytearray:
    """A fresh id, and behind its `ID_BYTES` zeros where the payload is to be written."""
    return bytearray(os.urandom(ID_BYTES)) + bytes(payload_length)


def seal_content(content: bytearray, public_key: bytes, header: RoundHeader) -> bytes:
    """`seal`, without a copy of the payload."""
    kind = _kind_of(public_key)
    length = len(content) - ID_BYTES
    return kind.suite.encrypt(content, kind.read(public_key), header.binding(length))


def is_of(public_key: bytes, sealing: Sealing) -> bool:
    """Whether a public key is for this suite."""
    return len(public_key) == _KINDS[sealing].public_bytes


def _kind_of(public_key: bytes) -> _Kind:
    for kind in _KINDS.values():
        if len(public_key) == kind.public_bytes:
            return kind
    lengths = " or ".join(str(kind.public_bytes) for kind in _KINDS.values())
    raise ValueError(f"a public key has {lengths} bytes, got {len(public_key)}")


class ReportOpener:
    """Opens the reports of one round; each report once."""

    def __init__(self, private_key: PrivateKey) -> None:
        self._kind = _KINDS[
            "x25519" if isinstance(private_key, X25519PrivateKey) else "mlkem768-x25519"
        ]
        self._private_key = private_key
        self._seen: set[bytes] = set()

    def open(self, sealed: bytes, header: RoundHeader) -> bytes:
        """The payload of a report that was sealed for this header (RFC 9180, base mode).

        Raises:
            ReportRejected: `NOT_OPENED` if it was sealed to another key or for another round, or
                was changed or cut; `REPLAYED` if it was opened before.
        """
        try:
            binding = header.binding(len(sealed) - self._kind.overhead)
            content = self._kind.suite.decrypt(sealed, self._private_key, binding)
        except (InvalidTag, ValueError, OverflowError):  # a negative length is no 8 bytes
            raise ReportRejected(
                RejectReason.NOT_OPENED, "a sealed report does not open under this key and header"
            ) from None
        report_id, payload = content[:ID_BYTES], content[ID_BYTES:]
        if report_id in self._seen:
            raise ReportRejected(RejectReason.REPLAYED, "a report with this id was opened before")
        self._seen.add(report_id)
        return payload
