"""The server: guard, broadcast, fetch the shuffled batch, aggregate, step, evaluate, checkpoint.

`make_server_app` gives the Flower ServerApp; the rest are its parts, each usable alone.
"""

from server.aggregate import Aggregate, aggregate_reports
from server.aggregators import AGGREGATORS, Aggregator, Mean, SpectralFilter
from server.app import make_server_app
from server.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from server.evaluate import Evaluation, evaluate
from server.rounds import RoundLoop
from server.settings import (
    MOST_INCOMPLETE,
    AgreedNode,
    Optimiser,
    RoundFailed,
    RoundRecord,
    RunResult,
    Schedule,
    ServerSettings,
    TrainingSettings,
    enough_users,
)
from server.training import PlayedRound, Training

__all__ = [
    "AGGREGATORS",
    "MOST_INCOMPLETE",
    "Aggregate",
    "Aggregator",
    "AgreedNode",
    "Checkpoint",
    "CheckpointError",
    "Evaluation",
    "Mean",
    "Optimiser",
    "PlayedRound",
    "RoundFailed",
    "RoundLoop",
    "RoundRecord",
    "RunResult",
    "Schedule",
    "ServerSettings",
    "SpectralFilter",
    "Training",
    "TrainingSettings",
    "aggregate_reports",
    "enough_users",
    "evaluate",
    "load_checkpoint",
    "make_server_app",
]
