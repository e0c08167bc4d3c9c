from .app import make_client_app
from .device import DeviceLedger, DeviceLimits, RoundRefused, load_device
from .device_process import serve_device
from .node import Announcement, Node, ReportFailed
from .settings import ClientSettings

__all__ = [
    "Announcement",
    "ClientSettings",
    "DeviceLedger",
    "DeviceLimits",
    "Node",
    "ReportFailed",
    "RoundRefused",
    "load_device",
    "make_client_app",
    "serve_device",
]
