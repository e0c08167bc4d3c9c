from .app import make_client_app
from .device import DeviceLedger, DeviceLimits, RoundRefused, load_device
from .device_process import serve_device
from .module_state import ModuleState, StateError
from .node import Announcement, Node, ReportFailed
from .settings import ClientSettings, LocalTraining, UserRecords
from .update import local_update, record_orders, user_updates

__all__ = [
    "Announcement",
    "ClientSettings",
    "DeviceLedger",
    "DeviceLimits",
    "LocalTraining",
    "ModuleState",
    "Node",
    "ReportFailed",
    "RoundRefused",
    "StateError",
    "UserRecords",
    "load_device",
    "local_update",
    "make_client_app",
    "record_orders",
    "serve_device",
    "user_updates",
]
