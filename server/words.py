"""The words for what a round and a run come to, and how a learning rate falls."""

from typing import Literal

RoundOutcome = Literal["released", "below-minimum", "discarded", "lost"]
Schedule = Literal["constant", "linear", "cosine"]
StoppedBy = Literal["budget", "rounds", "interrupt"]
