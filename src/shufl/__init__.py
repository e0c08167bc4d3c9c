"""Federated learning in the shuffle model of differential privacy.

The names of `__init__.pyi` are imported when they are first used. Each room of the repository is a
package in here: `shufl.protocol`, `shufl.accounting`, `shufl.shuffler`, `shufl.learning`,
`shufl.clients`, `shufl.server`, `shufl.results`, `shufl.simulator`, `shufl.deploy` and
`shufl.configs`.
"""

from typing import Any

import lazy_loader

from shufl.protocol.import_times import imported_at as imported_at

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        from shufl.cli.options import missing_extra

        raise missing_extra(error, f"shufl.{name}") from None
