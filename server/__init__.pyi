from .aggregate import Aggregate, Aggregator, MakeAggregator, Mean, aggregate_reports
from .checkpoint import Checkpoint, load_checkpoint
from .checkpoint_file import CheckpointError, read_checkpoint
from .optimiser import Optimiser
from .policy import Deployed, Simulated
from .rounds import RoundLoop
from .settings import (
    MOST_IN_VAIN,
    NodeFailed,
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
    "Deployed",
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
    "Simulated",
    "Training",
    "TrainingSettings",
    "aggregate_reports",
    "load_checkpoint",
    "read_checkpoint",
]
