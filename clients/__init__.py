"""What runs on a user's device: check in, compute an update, clip, add noise, seal, submit.

`make_client_app` gives the Flower ClientApp; the rest are its parts, each usable alone. Coins and
the noisy report itself are in `accounting.mechanisms`.
"""

from clients.app import make_client_app
from clients.device import DeviceLedger, DeviceLimits, RoundRefused, load_device
from clients.node import Announcement, Node, ReportFailed
from clients.settings import ClientSettings, LocalTraining, UserRecords
from clients.update import local_update, record_orders

__all__ = [
    "Announcement",
    "ClientSettings",
    "DeviceLedger",
    "DeviceLimits",
    "LocalTraining",
    "Node",
    "ReportFailed",
    "RoundRefused",
    "UserRecords",
    "load_device",
    "local_update",
    "make_client_app",
    "record_orders",
]
