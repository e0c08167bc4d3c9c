"""Experiments on one machine: configuration, data, models, engines, grids of runs, pages."""

import os
import sys

from shufl.simulator.data.vision import MissingOperators

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
