"""Flower's ClientApp of shufl, which is installed on the nodes; see `[tool.flwr.app]`."""

from clients.relay import app

__all__ = ["app"]
