"""The Flower ServerApp: a round loop over Flower's grid."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from shufl.server.rounds import RoundLoop
from shufl.server.settings import RunEnd, ServerSettings
from shufl.server.training import Observe


def make_server_app(
    settings: ServerSettings,
    observe: Observe,
    finish: Callable[[RunEnd], None],
    stop: Callable[[], bool] = lambda: False,
    shuffler_gone: Callable[[], bool] = lambda: False,
) -> ServerApp:
    """The ServerApp of a run.

    `observe` is called after every round.

    Args:
        finish: called once, with how the run ended.
        stop: polled; when it turns true, the round is closed early and the run ends.
        shuffler_gone: polled; once it is true, no shuffler will answer again, and nodes are not
            waited for. The run then fails with the shuffler's error.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        finish(RoundLoop(settings, grid, observe, stop, shuffler_gone).run())

    return app
