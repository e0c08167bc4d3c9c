from .client_app import make_client_app
from .device_ledger import DeviceLedger, DeviceLimits, RoundRefused, SimulatedLedger, load_device
from .node_process import serve_device
from .node_round import Announcement, Node, ReportFailed
from .policy import Deployed, Simulated
from .settings import ClientSettings

SERVICE: str

__all__ = [
    "SERVICE",
    "Announcement",
    "ClientSettings",
    "Deployed",
    "DeviceLedger",
    "DeviceLimits",
    "Node",
    "ReportFailed",
    "RoundRefused",
    "Simulated",
    "SimulatedLedger",
    "load_device",
    "make_client_app",
    "serve_device",
]
