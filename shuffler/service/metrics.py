"""Metrics: counts and reasons only.

No metric names a sender, a user or a report. The counts tell how many
reports came in a round, which the server must not know before a release: they are for the
shuffler's operator alone, on loopback.
"""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
    start_http_server,
)

from shufl.shuffler.wire.channel import parse_address


class Metrics:
    """Prometheus metrics, in a registry of their own."""

    def __init__(self) -> None:
        # Otherwise each counter tells when its first report came, beside how many there were.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        self.reports = counter("shufl_reports", "Reports answered, by verdict", ["verdict"])
        self.rounds = counter("shufl_rounds", "Rounds closed, by outcome", ["outcome"])
        self.releases = counter("shufl_releases", "Batches released")
        self.refusals = counter("shufl_refusals", "Calls refused, by reason", ["reason"])
        self.disagreements = counter(
            "shufl_disagreements", "Nodes that were shown another key, model or plan"
        )

    def serve(self, address: str) -> Any:
        """Answers Prometheus over HTTP in a thread; `shutdown` of the result ends it."""
        host, port, _ = parse_address(address)
        try:
            server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise OSError(f"metrics: cannot listen on {address}: {error.strerror}") from None
        return server
