"""When this process imported its modules, whose files may have changed since."""

from __future__ import annotations

import sys
import time

_BEGAN = time.time()
_TIMES: dict[str, float] = {}


class _Clock:
    """Notes when a module is about to be imported, or loaded anew."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Finds nothing: the finders after it do."""
        _TIMES[fullname] = time.time()


def imported_at(name: str) -> float:
    """When a module was imported, or shufl if that was later, in seconds since 1970."""
    return _TIMES.get(name, _BEGAN)


sys.meta_path.insert(0, _Clock())
