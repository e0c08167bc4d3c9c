"""The ways to play a run's rounds. A new engine is a file here and an entry of `ENGINES`."""

from shufl.simulator.engine_table import ENGINES, EngineEntry
from shufl.simulator.engines.base import Engine, EngineFailed, interrupts

__all__ = ["ENGINES", "Engine", "EngineEntry", "EngineFailed", "interrupts"]
