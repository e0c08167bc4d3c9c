"""The accountant without a shuffler: what remains if it colludes with the server."""

import math
from typing import ClassVar

import attrs
import numpy as np

from shufl.accounting.accountants.base import added, gaussian_noise
from shufl.accounting.accountants.privacy_profile import ProfileShuffleAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import (
    gaussian_epsilon,
    gaussian_losses,
    log_gaussian_delta,
    subsampled_profile,
)
from shufl.protocol.events import Allocation, CheckIn, FixedSize, Shuffled, Summed
from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse
from shufl.protocol.text import rounded_up

_LEAST_RATE = 1e-290  # where floats still have all their digits


class LocalAccountant(ProfileShuffleAccountant):
    """No shuffling at all: a user whose reports are all seen by name.

    The device's own coins do not depend on data, so a round is a report with probability γ and
    nothing otherwise, and its divergence is γ times the report's (docs/theory/gaussian.md, section
    4). With allocation, a block of rounds is one report. In a round of fixed size the user is taken
    to report for certain, because others draw who reports.

    Guarantee:
        ε holds for every pair of neighbouring datasets, and a server that colludes with the
        shuffler and so knows when the user took part; assumes only that the user's own device flips
        its coins and adds the noise.
    """

    name = "local"
    covers = (
        "every pair of neighbouring datasets, and a server that colludes with the shuffler and so "
        "knows when the user took part; assumes only that the user's own device flips its coins "
        "and adds the noise"
    )
    holds_for = "every pair"
    counts_on_others = False
    round_kinds = (Shuffled, Summed)
    participations = (CheckIn, FixedSize, Allocation)
    mechanisms = (GaussianMechanism, LdpSgd, RandomisedResponse)

    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        rate = _own_rate(event)
        if isinstance(event.mechanism, LdpSgd | RandomisedResponse):
            from shufl.accounting.numerics.sign_pairs import Response, sign_profile

            response = Response.of(event.mechanism)
            return sign_profile(response, rate, self.neighboring_relation, None, least)
        if isinstance(event, Summed):  # it sends in every round: nobody sees its coin
            noise = event.mechanism.noise_multiplier
            return subsampled_profile(rate, noise, self.neighboring_relation, least)
        shift = 1.0 / self._sigma(event)
        losses = gaussian_losses(shift, least)
        return losses, rate * np.exp(log_gaussian_delta(shift, losses))

    def _always(self, counts: dict[Shuffled, int]) -> float:
        """μ of the one Gaussian that all rounds are to a user whose coins all say yes.

        `μ² = Σ_t 1/σ_t²`, also when chosen adaptively (Balle and Wang 2018). Infinite without
        noise, or if not all reports are Gaussian.
        """
        sigmas = [(self._sigma(event), count) for event, count in counts.items()]
        return math.sqrt(sum(sorted(c / s / s if s else math.inf for s, c in sigmas)))

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        shift = self._always(counts)
        if not (0.0 < shift < math.inf and 0.0 < delta < 1.0):
            return super()._epsilon(counts, delta)
        most = gaussian_epsilon(shift, delta)
        if all(_own_rate(event) == 1.0 for event in counts):
            return most
        return min(super()._epsilon(counts, delta), most)

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        shift = self._always(counts)
        if not (0.0 < shift < math.inf and epsilon < math.inf):
            return super()._delta(counts, epsilon)
        most = min(1.0, math.exp(float(log_gaussian_delta(shift, epsilon))))
        if all(_own_rate(event) == 1.0 for event in counts):
            return most
        return min(super()._delta(counts, epsilon), most)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`: also ε of the unluckiest coins."""
        if any(isinstance(event, Summed) for event in self._counts):  # nobody sees their coins
            return super().note(delta)
        certain = CheckIn(1.0)
        always = ((attrs.evolve(e, participation=certain), c) for e, c in self._counts.items())
        most = self._epsilon(added({}, always), delta)
        if most == math.inf or all(_own_rate(event) == 1.0 for event in self._counts):
            return super().note(delta)
        return f"{rounded_up(most)} for a user whose coins all say yes"


class AmplifiedAccountant(ProfileShuffleAccountant):
    """Base of the accountants that count on a shuffler. None of them reports more than `local`.

    Where shuffling hides nearly nothing, composition on a grid alone would report a little more.

    Attributes:
        least_noise: At smaller Gaussian noise multipliers no other report is counted on.
    """

    least_noise: ClassVar[float] = 0.0

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        alone = LocalAccountant(self.neighboring_relation)
        return min(super()._epsilon(counts, delta), alone._epsilon(counts, delta))

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        alone = LocalAccountant(self.neighboring_relation)
        return min(super()._delta(counts, epsilon), alone._delta(counts, epsilon))

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if any(0.0 < gaussian_noise(event) < self.least_noise for event in self._counts):
            return (
                f"with noise multipliers below {self.least_noise:g} no other report is counted on"
            )
        return super().note(delta)


def _own_rate(event: Shuffled) -> float:
    """The chance that the user reports, as far as its own device decides it; or a larger one."""
    if not isinstance(event.participation, CheckIn):
        return 1.0
    return max(event.participation.rate, _LEAST_RATE)
