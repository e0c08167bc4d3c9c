from .algorithms import STEPS, Step
from .app import make_client_app
from .device import DeviceLedger, DeviceLimits, RoundRefused, load_device
from .device_process import serve_device
from .dropout import SeededDropout, unfolded_attention
from .module_state import ModuleState, StateError
from .node import Announcement, Node, ReportFailed
from .settings import ClientSettings, LocalTraining, Loss, UserRecords, cross_entropy
from .update import as_keys, epochs_of_users, in_type, local_update, record_orders, user_updates

__all__ = [
    "STEPS",
    "Announcement",
    "ClientSettings",
    "DeviceLedger",
    "DeviceLimits",
    "LocalTraining",
    "Loss",
    "ModuleState",
    "Node",
    "ReportFailed",
    "RoundRefused",
    "SeededDropout",
    "StateError",
    "Step",
    "UserRecords",
    "as_keys",
    "cross_entropy",
    "epochs_of_users",
    "in_type",
    "load_device",
    "local_update",
    "make_client_app",
    "record_orders",
    "serve_device",
    "unfolded_attention",
    "user_updates",
]
