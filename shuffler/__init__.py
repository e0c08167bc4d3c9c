"""The shuffler: a process of its own between user devices and the server.

It sees who sends and cannot read what; the server reads what and is not told who. Reports travel
sealed to the server's key (`seal`), through the shuffler (`IntakeClient`, `ShufflerProcess`), to
the server (`ControlClient`, `ReportOpener`) in an order that says nothing.
"""

from shuffler.keys import Credentials
from shuffler.process import ShufflerProcess
from shuffler.wire.control_client import ControlClient
from shuffler.wire.errors import (
    Outcome,
    Refusal,
    RejectReason,
    ReportRejected,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shuffler.wire.intake_client import IntakeClient
from shuffler.wire.reports import (
    decode_report,
    empty_report,
    encode_report,
    model_digest,
    report_length,
)
from shuffler.wire.sealing import (
    PrivateKey,
    ReportOpener,
    RoundHeader,
    Sealing,
    generate_key_pair,
    key_digest,
    open_report,
    seal,
    sealed_length,
)

__all__ = [
    "ControlClient",
    "Credentials",
    "IntakeClient",
    "Outcome",
    "PrivateKey",
    "Refusal",
    "RejectReason",
    "ReportOpener",
    "ReportRejected",
    "RoundHeader",
    "Sealing",
    "ShufflerError",
    "ShufflerProcess",
    "ShufflerRefused",
    "ShufflerUnavailable",
    "Verdict",
    "decode_report",
    "empty_report",
    "encode_report",
    "generate_key_pair",
    "key_digest",
    "model_digest",
    "open_report",
    "report_length",
    "seal",
    "sealed_length",
]
