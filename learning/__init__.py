"""What is learnt: configuration, data, models, tasks, and how a user's update is computed.

The names of `__init__.pyi` are imported when they are first used.
"""

if __name__ != "shufl.learning":
    raise ImportError("this folder is a part of the package shufl: import shufl.learning")

import os
import sys

import lazy_loader

from shufl.learning.data.vision import MissingOperators

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Read when Flower and Ray are imported; a user's own setting wins.
for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}.items():
    os.environ.setdefault(_name, _value)

sys.meta_path.insert(0, MissingOperators())  # in every process, before any code of the reader's
