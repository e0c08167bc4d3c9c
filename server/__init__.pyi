from .aggregate import Aggregate, Aggregator, MakeAggregator, Mean, aggregate_reports
from .app import make_server_app
from .checkpoint import Checkpoint, load_checkpoint
from .checkpoint_file import CheckpointError, read_checkpoint, save_atomically
from .rounds import RoundLoop
from .settings import (
    MOST_IN_VAIN,
    NodeFailed,
    Optimiser,
    RoundFailed,
    RunEnd,
    ServerSettings,
    TrainingSettings,
)
from .training import Observe, PlayedRound, Training

__all__ = [
    "MOST_IN_VAIN",
    "Aggregate",
    "Aggregator",
    "Checkpoint",
    "CheckpointError",
    "MakeAggregator",
    "Mean",
    "NodeFailed",
    "Observe",
    "Optimiser",
    "PlayedRound",
    "RoundFailed",
    "RoundLoop",
    "RunEnd",
    "ServerSettings",
    "Training",
    "TrainingSettings",
    "aggregate_reports",
    "load_checkpoint",
    "make_server_app",
    "read_checkpoint",
    "save_atomically",
]
