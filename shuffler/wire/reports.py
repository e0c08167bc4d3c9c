"""What clients and the server agree on beside the seal: a report's bytes and a model's digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shufl.shuffler.wire.errors import RejectReason, ReportRejected

EMPTY_ENTRY = -(2**15)
"""Each entry of an empty report."""

_ENTRY, _ENTRY_BYTES = "<i2", 2  # little-endian 16-bit integers


def report_length(dimension: int) -> int:
    """Length in bytes of an encoded report of `dimension` entries: the same for every report."""
    return dimension * _ENTRY_BYTES


def encode_report(report: np.ndarray) -> bytes:
    """A report of shape (d,), int16 above -32 768, as d little-endian integers."""
    return report.astype(_ENTRY).tobytes()


def empty_report(dimension: int) -> bytes:
    """What a user who did not check in sends under a plan with cover: no report has its entries."""
    return np.full(dimension, EMPTY_ENTRY, dtype=_ENTRY).tobytes()


def entries_of(payload: bytes | bytearray | memoryview) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The entries of an encoded report; who writes to them writes to the payload."""
    return np.frombuffer(payload, dtype=_ENTRY)


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
    return entries_of(payload)


def model_digest(parameters: Mapping[str, ArrayLike]) -> str:
    """SHA-256 (hexadecimal) of a model: the names, types, shapes and values of its parameters.

    The parameters are given by name, for example as a PyTorch `state_dict` on the CPU.
    """
    digest = hashlib.sha256()
    for name, given in parameters.items():
        values = np.asarray(given)
        about = json.dumps([name, values.dtype.str, values.shape]).encode()
        digest.update(len(about).to_bytes(8, "big") + about)
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
