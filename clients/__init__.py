"""What runs on a user's device: check in, compute an update, clip, add noise, seal, submit.

`make_client_app` gives the Flower ClientApp; the rest are its parts, each usable alone.
"""

from clients.app import make_client_app
from clients.mechanism import clip, privatise
from clients.randomness import Randomness, SeededRandomness, SystemRandomness, make_randomness
from clients.settings import ClientSettings, LocalTraining
from clients.update import local_update, record_orders

__all__ = [
    "ClientSettings",
    "LocalTraining",
    "Randomness",
    "SeededRandomness",
    "SystemRandomness",
    "clip",
    "local_update",
    "make_client_app",
    "make_randomness",
    "privatise",
    "record_orders",
]
