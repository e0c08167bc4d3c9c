"""Client stubs, as the generated code would make them, from the protocol's descriptors."""

from __future__ import annotations

from typing import Any, Literal

import grpc
from google.protobuf.message_factory import GetMessageClass

from shufl.shuffler.wire.shuffler_pb2 import DESCRIPTOR


class Stub:
    """A service's methods over a channel, each an attribute of its name."""

    def __init__(
        self, service: Literal["Intake", "Control", "Record"], channel: grpc.Channel
    ) -> None:
        about = DESCRIPTOR.services_by_name[service]
        for method in about.methods:
            request = "stream" if method.client_streaming else "unary"
            reply = "stream" if method.server_streaming else "unary"
            call = getattr(channel, f"{request}_{reply}")(
                f"/{about.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service has no method {name}")
