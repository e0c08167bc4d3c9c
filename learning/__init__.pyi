from .dropout import SeededDropout, unfolded_attention
from .local_training import (
    STEPS,
    LocalTraining,
    Loss,
    Step,
    UserRecords,
    cross_entropy,
    logits_of,
)
from .module_state import ModuleState, StateError
from .parameters import load_tensors
from .tasks import Measure, evaluate
from .user_update import (
    as_keys,
    epochs_of_users,
    in_type,
    local_update,
    record_orders,
    user_updates,
)

__all__ = [
    "STEPS",
    "LocalTraining",
    "Loss",
    "Measure",
    "ModuleState",
    "SeededDropout",
    "StateError",
    "Step",
    "UserRecords",
    "as_keys",
    "cross_entropy",
    "epochs_of_users",
    "evaluate",
    "in_type",
    "load_tensors",
    "local_update",
    "logits_of",
    "record_orders",
    "unfolded_attention",
    "user_updates",
]
