"""Flower's ServerApp of shufl, which is installed on the server; see `[tool.flwr.app]`."""

from simulator.deployment.server_app import app

__all__ = ["app"]
