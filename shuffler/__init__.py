"""The shuffler: a process of its own between user devices and the server.

It sees who sends and can not read what; the server reads what and is not told who. Reports travel
sealed to the server's key (`seal`), through the shuffler (`IntakeClient`, `ShufflerProcess`), to
the server (`ControlClient`, `open_report`) in an order that says nothing.
"""

from shuffler.client import ControlClient, IntakeClient
from shuffler.errors import (
    Outcome,
    Refusal,
    ReportRejected,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shuffler.process import ShufflerProcess
from shuffler.reports import decode_report, encode_report, model_version, report_length
from shuffler.sealing import (
    SEALING_OVERHEAD,
    PrivateKey,
    RoundHeader,
    generate_key_pair,
    open_report,
    private_key_from_bytes,
    private_key_to_bytes,
    public_key_from_bytes,
    public_key_to_bytes,
    seal,
    sealed_length,
)

__all__ = [
    "SEALING_OVERHEAD",
    "ControlClient",
    "IntakeClient",
    "Outcome",
    "PrivateKey",
    "Refusal",
    "ReportRejected",
    "RoundHeader",
    "ShufflerError",
    "ShufflerProcess",
    "ShufflerRefused",
    "ShufflerUnavailable",
    "Verdict",
    "decode_report",
    "encode_report",
    "generate_key_pair",
    "model_version",
    "open_report",
    "private_key_from_bytes",
    "private_key_to_bytes",
    "public_key_from_bytes",
    "public_key_to_bytes",
    "report_length",
    "seal",
    "sealed_length",
]
