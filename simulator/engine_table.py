"""The engines by name, with their keys of the configuration; nothing here needs torch or Flower."""

from __future__ import annotations

import pkgutil
from typing import Any, Literal

from pydantic import Field

from shufl.accounting.validation import Count, Seconds
from shufl.simulator.section import Section

Precision = Literal["float32", "bfloat16"]


class EngineName(Section):
    """The key of `[simulation]` that names the engine."""

    engine: Literal["flower", "vectorised"] = "flower"


class FlowerKeys(EngineName):
    """The Flower engine's keys of `[simulation]`."""

    nodes: int = Field(default=20, ge=1, le=10**6, description="a whole number from 1 to 10^6")
    cpus_per_node: float = Field(  # each CPU has as many processes of nodes as this goes into 1
        default=1.0, ge=0.1, allow_inf_nan=False, description="a number, at least 0.1"
    )
    round_timeout: Seconds = 600.0


class VectorisedKeys(EngineName):
    """The vectorised engine's keys of `[simulation]`."""

    noise: Literal["report", "aggregate"] = "report"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "float32"
    records_per_chunk: int | None = Field(
        default=None, ge=1, le=10**6, description="a whole number from 1 to 10^6"
    )
    workers: Count = 1
    silent: float = Field(default=0.0, ge=0, lt=1, description="a number in [0, 1)")


ENGINES: dict[str, str | type] = {
    "flower": "shufl.simulator.engines.flower:FlowerEngine",
    "vectorised": "shufl.simulator.engines.vectorised:VectorisedEngine",
}
"""Each engine's `Engine`, as `module:class` or the class itself, by its name in a configuration."""


def engine_of(name: str) -> Any:
    """The class of an engine, imported."""
    engine = ENGINES[name]
    return pkgutil.resolve_name(engine) if isinstance(engine, str) else engine
