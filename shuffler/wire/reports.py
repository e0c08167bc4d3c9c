"""What clients and the server agree on beside the seal: a report's bytes and a model's version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from shuffler.wire.errors import RejectReason, ReportRejected

_ENTRY, _ENTRY_BYTES = "<i2", 2  # little-endian 16-bit integers


def report_length(dimension: int) -> int:
    """Length in bytes of an encoded report of `dimension` entries: the same for every report."""
    return dimension * _ENTRY_BYTES


def encode_report(report: np.ndarray) -> bytes:
    """A report of shape (d,), int16, as d little-endian integers."""
    return report.astype(_ENTRY).tobytes()


def decode_report(payload: bytes, dimension: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The report of shape (d,), int16, that `encode_report` wrote.

    Raises:
        ReportRejected: `WRONG_LENGTH` if the payload's length is not that of `dimension` entries.
    """
    if len(payload) != report_length(dimension):
        raise ReportRejected(
            RejectReason.WRONG_LENGTH,
            f"a report has {report_length(dimension)} bytes, got {len(payload)}",
        )
    return np.frombuffer(payload, dtype=_ENTRY)


def model_version(parameters: Iterable[bytes]) -> str:
    """SHA-256 (hexadecimal) of a model's parameters, each given as its bytes, in order."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(len(parameter).to_bytes(8, "big"))
        digest.update(parameter)
    return digest.hexdigest()
