"""How a round ended, for the shuffler's public record and for the server's rows alike."""

from enum import StrEnum


class RoundOutcome(StrEnum):
    """How a round ended.

    At one shuffler a round ends in one of these ways; a run's round is released if one shuffler has
    released its batch.

    Attributes:
        RELEASED: the server was given the batch.
        BELOW_MINIMUM: the batch held too few reports and was destroyed unseen.
        DISCARDED: the batch was destroyed unseen: fewer users were present than ε assumes, or the
            server did not want it, or never fetched it.
        LOST: the shuffler was away, or had lost the batch.
    """

    RELEASED = "released"
    BELOW_MINIMUM = "below-minimum"
    DISCARDED = "discarded"
    LOST = "lost"
