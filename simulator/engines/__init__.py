"""The ways to play a run's rounds. CONTRIBUTING.md says what a new one touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shufl.protocol.validation import ConfigError

if TYPE_CHECKING:
    from shufl.learning.config import Config


def check_draws(config: Config) -> None:
    """Refuses allocation from the operating system's entropy: a resumed run would draw again.

    Raises:
        ConfigError: the plan asks for it.
    """
    if config.privacy.participation == "allocation" and config.seed == "system":
        raise ConfigError(
            "seed must be a number with privacy.participation allocation, so that a "
            'run which is resumed has the same draws, got "system"'
        )
