"""The accountant without a shuffler: what remains if it colludes with the server."""

import math

import numpy as np

from accounting.accountants.profile import ProfileShuffleAccountant
from accounting.events import Shuffled
from accounting.mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse
from accounting.numerics import FloatArray
from accounting.numerics.gaussian import gaussian_epsilon, gaussian_losses, log_gaussian_delta
from accounting.numerics.sign_pairs import Response, sign_profile


class LocalAccountant(ProfileShuffleAccountant):
    """No shuffling at all: a user whose reports are all seen by name.

    T Gaussian reports of one user are one Gaussian with `1/σ² = Σ_t 1/σ_t²`, also when chosen
    adaptively, so the conversion is exact (Balle and Wang 2018). Others are composed by their
    profiles, which are exact for two opposite updates.
    """

    name = "local"
    holds_for = "every pair"
    counts_on_others = False
    covers = (
        "every pair of neighbouring datasets, a user who takes part in every round, and a server "
        "that colludes with the shuffler; assumes only that the user's own device adds the noise"
    )
    mechanisms = (GaussianMechanism, LdpSgd, RandomisedResponse)

    def _profile(self, event: Shuffled) -> tuple[FloatArray, FloatArray]:
        if isinstance(event.mechanism, LdpSgd | RandomisedResponse):
            response = Response.of(event.mechanism)
            return sign_profile(response, 1.0, self.neighboring_relation, None)
        shift = 1.0 / self._sigma(event)
        losses = gaussian_losses(shift)
        return losses, np.exp(log_gaussian_delta(shift, losses))

    def _is_gaussian(self, counts: dict[Shuffled, int]) -> bool:
        return all(isinstance(event.mechanism, GaussianMechanism) for event in counts)

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        if not self._is_gaussian(counts):
            return super()._epsilon(counts, delta)
        shift = self._unshuffled(counts)
        if shift == 0.0:
            return 0.0
        if shift == math.inf or delta == 0.0:
            return math.inf
        return gaussian_epsilon(shift, delta)

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        if not self._is_gaussian(counts):
            return super()._delta(counts, epsilon)
        shift = self._unshuffled(counts)
        if shift == math.inf:
            return 1.0
        if shift == 0.0 or epsilon == math.inf:
            return 0.0
        return min(1.0, math.exp(float(log_gaussian_delta(shift, epsilon))))

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if delta == 0.0:
            return "Gaussian noise gives no finite epsilon at delta 0"
        return "some round has no noise"
