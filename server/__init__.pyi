from .aggregate import Aggregate, Aggregator, MakeAggregator, Mean, aggregate_reports
from .app import make_server_app
from .checkpoint import Checkpoint, load_checkpoint, load_tensors, save_tensors
from .checkpoint_file import CheckpointError, read_checkpoint, save_atomically
from .evaluation import Measure, evaluate
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
from .words import AgreedNode, RoundRecord, Schedule, StoppedBy

__all__ = [
    "MOST_IN_VAIN",
    "Aggregate",
    "Aggregator",
    "AgreedNode",
    "Checkpoint",
    "CheckpointError",
    "MakeAggregator",
    "Mean",
    "Measure",
    "NodeFailed",
    "Observe",
    "Optimiser",
    "PlayedRound",
    "RoundFailed",
    "RoundLoop",
    "RoundRecord",
    "RunEnd",
    "Schedule",
    "ServerSettings",
    "StoppedBy",
    "Training",
    "TrainingSettings",
    "aggregate_reports",
    "evaluate",
    "load_checkpoint",
    "load_tensors",
    "make_server_app",
    "read_checkpoint",
    "save_atomically",
    "save_tensors",
]
