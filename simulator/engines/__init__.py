"""The ways to play a run's rounds. A new engine is a file here and a line in this table."""

from simulator.engines.base import Engine, EngineFailed, interrupts
from simulator.engines.flower import FlowerEngine
from simulator.engines.vectorised import VectorisedEngine

ENGINES: dict[str, type[Engine]] = {"flower": FlowerEngine, "vectorised": VectorisedEngine}

__all__ = ["ENGINES", "Engine", "EngineFailed", "interrupts"]
