"""JSON that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(content: Any, indent: int | None = None) -> str:
    """Standard JSON, which has no NaN and no infinity: those become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
