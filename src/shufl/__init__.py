"""Federated learning in the shuffle model of differential privacy.

The names of `__init__.pyi` are imported when they are first used. Each room of the repository is a
package in here: `shufl.protocol`, `shufl.accounting`, `shufl.shuffler`, `shufl.learning`,
`shufl.clients`, `shufl.server`, `shufl.results`, `shufl.simulator`, `shufl.deploy` and
`shufl.configs`.
"""

import importlib.metadata
import os
from typing import Any

import lazy_loader

from shufl.protocol.import_times import imported_at as imported_at

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


# Read when Flower and Ray are imported; a user's own setting wins.
for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}.items():
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("shufl")
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        from shufl.cli.options import missing_extra

        raise missing_extra(error, f"shufl.{name}") from None
