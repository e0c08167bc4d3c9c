"""The ways to play a run's rounds. CONTRIBUTING.md says what a new one touches."""

from shufl.simulator.engine_table import ENGINES, engine_of
from shufl.simulator.engines.base import Engine, EngineFailed, interrupts

__all__ = ["ENGINES", "Engine", "EngineFailed", "engine_of", "interrupts"]
