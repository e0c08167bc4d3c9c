"""What a report is made of: mechanisms and randomness, for devices, shuffler and accountants.

It needs numpy, scipy, mpmath, pydantic and `cryptography` only: the shuffler process, which makes
blankets, imports this, and no accountant.
"""

from typing import Annotated

from pydantic import Field

from shufl.protocol.mechanisms.allocation import (
    all_allocated,
    allocated,
    new_allocation_key,
    simulated_allocation_key,
)
from shufl.protocol.mechanisms.draws import to_normals
from shufl.protocol.mechanisms.gaussian import GaussianMechanism, clip
from shufl.protocol.mechanisms.ldp_sgd import LdpSgd
from shufl.protocol.mechanisms.randomised_response import RandomisedResponse
from shufl.protocol.mechanisms.randomness import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    least_delta,
    make_randomness,
    most_blankets,
    seed_of_shuffler,
    split_mix,
)

Mechanism = Annotated[
    GaussianMechanism | LdpSgd | RandomisedResponse,
    Field(
        discriminator="name",
        description="one with the name gaussian, ldp-sgd or randomised-response",
    ),
]
"""Any mechanism; plans tell them apart by `name`."""

MECHANISMS: dict[str, type[GaussianMechanism] | type[LdpSgd]] = {
    "gaussian": GaussianMechanism,
    "ldp-sgd": LdpSgd,
}
"""Those of any vector, by the noise multiplier z."""

__all__ = [
    "MECHANISMS",
    "GaussianMechanism",
    "LdpSgd",
    "Mechanism",
    "RandomisedResponse",
    "Randomness",
    "SeededRandomness",
    "SystemRandomness",
    "all_allocated",
    "allocated",
    "clip",
    "least_delta",
    "make_randomness",
    "most_blankets",
    "new_allocation_key",
    "seed_of_shuffler",
    "simulated_allocation_key",
    "split_mix",
    "to_normals",
]
