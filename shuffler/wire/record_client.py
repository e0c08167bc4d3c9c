"""What auditors use to fetch the public record."""

from __future__ import annotations

from collections.abc import Iterator

from shufl.shuffler.keys import AnyCredentials
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.connection import Connection
from shufl.shuffler.wire.stub import Stub


class RecordClient(Connection):
    """Fetches the public record. Any certificate of the shuffler's authority will do."""

    def __init__(self, address: str, credentials: AnyCredentials, timeout: float = 60.0) -> None:
        """Remembers where the shuffler is; connects with the first question.

        `timeout` is the longest wait in seconds for one answer.

        Raises:
            ValueError: the address is malformed.
        """
        super().__init__(address, credentials, timeout)

    def entries(self) -> Iterator[str]:
        """All entries, as JSON, from the first on; `shuffler.record.verify` checks them.

        Raises:
            ShufflerUnavailable: if the shuffler does not answer.
        """
        stub, first = Stub("Record", self.connected()), 0
        while True:
            with self.errors():
                request = shuffler_pb2.EntriesRequest(first=first)
                found = stub.Entries(request, timeout=self.timeout).entries
            if not found:
                return
            yield from found
            first += len(found)
