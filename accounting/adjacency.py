"""Which datasets count as neighbours, and the σ each relation puts into the formulas.

Reports are clipped to norm C and carry noise of standard deviation zC. Under `replace` one user's
record becomes any other: two clipped reports differ by up to 2C, so σ = z/2. Under `zero-out` one
user's report becomes the clipped zero vector: they differ by up to C, so σ = z.
"""

from dp_accounting import NeighboringRelation

from shufl.protocol import validation

ADJACENCIES: dict[str, NeighboringRelation] = {
    "replace": NeighboringRelation.REPLACE_ONE,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
}

_SENSITIVITY_IN_CLIP_NORMS: dict[NeighboringRelation, float] = {
    NeighboringRelation.REPLACE_ONE: 2.0,
    NeighboringRelation.REPLACE_SPECIAL: 1.0,
}


def relation_of(adjacency: str) -> NeighboringRelation:
    """Returns the neighbouring relation of an adjacency's name.

    Raises:
        ValueError: An unknown name.
    """
    return ADJACENCIES[validation.choice("adjacency", adjacency, tuple(ADJACENCIES))]


def effective_sigma(noise_multiplier: float, relation: NeighboringRelation) -> float:
    """Returns σ = zC/Δ, the noise in units of the sensitivity of one report.

    Raises:
        ValueError: ADD_OR_REMOVE_ONE. With a shuffler the number of reports is public, so adding or
            removing a user is not a change this mechanism hides.
    """
    if relation not in _SENSITIVITY_IN_CLIP_NORMS:
        name = getattr(relation, "name", relation)
        raise ValueError(
            "neighbouring relation must be REPLACE_ONE ('replace') or REPLACE_SPECIAL "
            f"('zero-out'), got {name}"
        )
    return noise_multiplier / _SENSITIVITY_IN_CLIP_NORMS[relation]
