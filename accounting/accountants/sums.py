"""`sum-distributed` and `sum-central`: rounds of which only the noisy sum is handed over.

Everybody sends in every round, so nobody sees a user's coin, and the worst pair is the subsampled
Gaussian, in every dimension: section 10 of docs/theory/blanket.md.
"""

import abc
import math

from shufl.accounting.accountants.privacy_profile import ProfileShuffleAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import subsampled_profile
from shufl.protocol.events import CheckIn, Shuffled, Summed
from shufl.protocol.mechanisms import GaussianMechanism


class SumAccountant(ProfileShuffleAccountant):
    """Base of both: each counts on other noise."""

    holds_for = "every pair"
    round_kinds = (Summed,)
    participations = (CheckIn,)
    mechanisms = (GaussianMechanism,)

    @abc.abstractmethod
    def _noise(self, event: Summed) -> float:
        """The standard deviation of the noise in the sum that is counted on, in clip norms."""

    def _is_private(self, event: Shuffled) -> bool:
        return isinstance(event, Summed) and self._noise(event) > 0.0

    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        assert isinstance(event, Summed)  # by `round_kinds`
        return subsampled_profile(
            event.chance, self._noise(event), self.neighboring_relation, least
        )


class SumDistributedAccountant(SumAccountant):
    """Counts on the noise of n users: s² = nz² + σ².

    The adversary knows the noise of none of them. A user who is itself the adversary, or who works
    with it, is not one of the n.

    Guarantee:
        ε holds for every pair of neighbouring datasets, in any dimension, against server, other
        users and whoever sees the models; in a simulation also against a shuffler that follows the
        protocol, on real machines against any shuffler, if n leaves out the users of its own nodes;
        assumes that n users add noise every round which the adversary does not know, that the
        user's own device flips its coin, and that shuffler and server do not collude.
    """

    name = "sum-distributed"
    covers = (
        "every pair of neighbouring datasets, in any dimension, against server, other users and "
        "whoever sees the models; in a simulation also against a shuffler that follows the "
        "protocol, on real machines against any shuffler, if n leaves out the users of its own "
        "nodes; assumes that n users add noise every round which the adversary does not know, "
        "that the user's own device flips its coin, and that shuffler and server do not collude"
    )

    def _noise(self, event: Summed) -> float:
        own = event.mechanism.noise_multiplier
        return math.hypot(own * math.sqrt(event.users), event.central_noise)


class SumCentralAccountant(SumAccountant):
    """Counts on the noise of the shuffler or the server, whichever is not the adversary.

    Guarantee:
        ε holds for every pair of neighbouring datasets, in any dimension, whoever else takes part,
        against server, shuffler, other users and whoever sees the models; assumes that the user's
        own device flips its coin, that whichever of shuffler and server is honest adds its noise
        every round, and that they do not collude.
    """

    name = "sum-central"
    covers = (
        "every pair of neighbouring datasets, in any dimension, whoever else takes part, against "
        "server, shuffler, other users and whoever sees the models; assumes that the user's own "
        "device flips its coin, that whichever of shuffler and server is honest adds its noise "
        "every round, and that they do not collude"
    )
    counts_on_others = False

    def _noise(self, event: Summed) -> float:
        return event.central_noise
