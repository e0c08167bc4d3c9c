from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    ACCEPTED: _ClassVar[Verdict]
    UNKNOWN_RUN: _ClassVar[Verdict]
    ROUND_NOT_OPEN: _ClassVar[Verdict]
    DUPLICATE: _ClassVar[Verdict]
    WRONG_LENGTH: _ClassVar[Verdict]
    WRONG_COMMITMENT: _ClassVar[Verdict]
    BAD_SENDER: _ClassVar[Verdict]
    ROUND_FULL: _ClassVar[Verdict]
    STORAGE_FULL: _ClassVar[Verdict]
    STORAGE_FAILED: _ClassVar[Verdict]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    RELEASABLE: _ClassVar[Outcome]
    BELOW_MINIMUM: _ClassVar[Outcome]
    DISCARDED: _ClassVar[Outcome]
VERDICT_UNSPECIFIED: Verdict
ACCEPTED: Verdict
UNKNOWN_RUN: Verdict
ROUND_NOT_OPEN: Verdict
DUPLICATE: Verdict
WRONG_LENGTH: Verdict
WRONG_COMMITMENT: Verdict
BAD_SENDER: Verdict
ROUND_FULL: Verdict
STORAGE_FULL: Verdict
STORAGE_FAILED: Verdict
OUTCOME_UNSPECIFIED: Outcome
RELEASABLE: Outcome
BELOW_MINIMUM: Outcome
DISCARDED: Outcome

class EntriesRequest(_message.Message):
    __slots__ = ("first",)
    FIRST_FIELD_NUMBER: _ClassVar[int]
    first: int
    def __init__(self, first: _Optional[int] = ...) -> None: ...

class EntriesReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("run_id", "round", "commitment", "users", "sealed", "count", "step", "length", "start", "upload")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    commitment: str
    users: _containers.RepeatedScalarFieldContainer[int]
    sealed: bytes
    count: int
    step: int
    length: int
    start: int
    upload: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., commitment: _Optional[str] = ..., users: _Optional[_Iterable[int]] = ..., sealed: _Optional[bytes] = ..., count: _Optional[int] = ..., step: _Optional[int] = ..., length: _Optional[int] = ..., start: _Optional[int] = ..., upload: _Optional[int] = ...) -> None: ...

class AgreeRequest(_message.Message):
    __slots__ = ("run_id", "round", "commitment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    commitment: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., commitment: _Optional[str] = ...) -> None: ...

class AgreeReply(_message.Message):
    __slots__ = ("commitment", "nonce", "seconds_left")
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    commitment: str
    nonce: bytes
    seconds_left: float
    def __init__(self, commitment: _Optional[str] = ..., nonce: _Optional[bytes] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedScalarFieldContainer[Verdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, str]]] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("run_id", "plan", "report_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REPORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    plan: bytes
    report_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., plan: _Optional[bytes] = ..., report_bytes: _Optional[int] = ...) -> None: ...

class CreateRunReply(_message.Message):
    __slots__ = ("plan_digest",)
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    plan_digest: str
    def __init__(self, plan_digest: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenRoundRequest(_message.Message):
    __slots__ = ("run_id", "round", "model_digest", "public_key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    model_digest: str
    public_key: bytes
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., model_digest: _Optional[str] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class OpenRoundReply(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class CloseRoundRequest(_message.Message):
    __slots__ = ("run_id", "round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class CloseRoundReply(_message.Message):
    __slots__ = ("outcome", "senders", "absent")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    senders: int
    absent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., senders: _Optional[int] = ..., absent: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run_id", "round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class ReleaseChunk(_message.Message):
    __slots__ = ("sealed", "more")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    sealed: _containers.RepeatedScalarFieldContainer[bytes]
    more: bool
    def __init__(self, sealed: _Optional[_Iterable[bytes]] = ..., more: _Optional[bool] = ...) -> None: ...

class EndRoundRequest(_message.Message):
    __slots__ = ("run_id", "round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class EndRoundReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class EndRunReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
