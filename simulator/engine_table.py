"""The engines by name, with their keys of the configuration; nothing here needs torch or Flower."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from shufl.accounting.validation import Count, Seconds
from shufl.simulator.section import Section

Precision = Literal["float32", "bfloat16"]


class FlowerKeys(Section):
    """The Flower engine's keys of `[simulation]`."""

    nodes: int = Field(20, ge=1, le=10**6, description="a whole number from 1 to 10^6")
    cpus_per_node: float = Field(  # each CPU has as many processes of nodes as this goes into 1
        1.0, ge=0.1, allow_inf_nan=False, description="a number, at least 0.1"
    )
    round_timeout: Seconds = 600.0
    reply_after: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="seconds, a number of at least 0"
    )


class VectorisedKeys(Section):
    """The vectorised engine's keys of `[simulation]`."""

    noise: Literal["report", "aggregate"] = "report"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "float32"
    users_per_chunk: int = Field(256, ge=1, le=10**6, description="a whole number from 1 to 10^6")
    workers: Count = 1
    silent: float = Field(0.0, ge=0, lt=1, description="a number in [0, 1)")


@dataclass(frozen=True)
class EngineEntry:
    """An engine as configurations know it.

    Attributes:
        engine: `module:class` of an `Engine`, or the class.
        keys: its keys of the configuration's section `[simulation]`.
        not_ignored: those of `keys` that change what is computed. Another engine, which ignores
            the rest, refuses a value of these that is not the default.
    """

    engine: str | type
    keys: type[Section]
    not_ignored: tuple[str, ...] = ()

    def load(self) -> Any:
        """The engine's class, imported."""
        return pkgutil.resolve_name(self.engine) if isinstance(self.engine, str) else self.engine


ENGINES = {
    "flower": EngineEntry("shufl.simulator.engines.flower:FlowerEngine", FlowerKeys),
    "vectorised": EngineEntry(
        "shufl.simulator.engines.vectorised:VectorisedEngine",
        VectorisedKeys,
        not_ignored=("noise", "device", "precision", "silent"),
    ),
}
