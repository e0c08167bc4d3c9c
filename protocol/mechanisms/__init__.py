"""What a report is made of: mechanisms and randomness, for devices, shuffler and accountants.

It needs numpy, scipy, mpmath, pydantic and `cryptography` only: the shuffler process, which makes
blankets, imports this, and no accountant.
"""

from typing import Annotated

from pydantic import Field

from shufl.protocol.mechanisms.gaussian import GaussianMechanism as GaussianMechanism
from shufl.protocol.mechanisms.gaussian import clip as clip
from shufl.protocol.mechanisms.ldp_sgd import LdpSgd as LdpSgd
from shufl.protocol.mechanisms.random_allocation import all_allocated as all_allocated
from shufl.protocol.mechanisms.random_allocation import allocated as allocated
from shufl.protocol.mechanisms.random_allocation import new_allocation_key as new_allocation_key
from shufl.protocol.mechanisms.random_allocation import (
    simulated_allocation_key as simulated_allocation_key,
)
from shufl.protocol.mechanisms.randomised_response import RandomisedResponse as RandomisedResponse
from shufl.protocol.mechanisms.randomness import Randomness as Randomness
from shufl.protocol.mechanisms.randomness import SeededRandomness as SeededRandomness
from shufl.protocol.mechanisms.randomness import SystemRandomness as SystemRandomness
from shufl.protocol.mechanisms.randomness import least_delta as least_delta
from shufl.protocol.mechanisms.randomness import make_randomness as make_randomness
from shufl.protocol.mechanisms.randomness import most_blankets as most_blankets
from shufl.protocol.mechanisms.randomness import seed_of_shuffler as seed_of_shuffler
from shufl.protocol.mechanisms.randomness import split_mix as split_mix
from shufl.protocol.mechanisms.report_draws import to_normals as to_normals

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
