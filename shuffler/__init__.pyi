from .child_process import ShufflerProcess
from .credentials import AnyCredentials, Credentials
from .wire.control_client import ControlClient
from .wire.errors import (
    Outcome,
    Refusal,
    RejectReason,
    ReportRejected,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from .wire.intake_client import IntakeClient
from .wire.reports import (
    decode_report,
    empty_report,
    encode_report,
    model_digest,
    report_length,
)
from .wire.sealing import (
    PrivateKey,
    ReportOpener,
    RoundHeader,
    Sealing,
    generate_key_pair,
    key_digest,
    message_length,
    most_parameters,
    seal,
    sealed_length,
    usual_sealing,
)

__all__ = [
    "AnyCredentials",
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
    "message_length",
    "model_digest",
    "most_parameters",
    "report_length",
    "seal",
    "sealed_length",
    "usual_sealing",
]
