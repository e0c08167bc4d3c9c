"""Rounds of Gaussian reports and plans of such, in one line each."""

import attrs
import numpy as np

from shufl.accounting import PrivacyPlan
from shufl.protocol import CheckIn, FixedSize, GaussianMechanism, Shuffled, Summed


def check_in(users, rate, noise, blankets=0.0):
    mechanism = GaussianMechanism(noise_multiplier=noise)
    return Shuffled(users, CheckIn(rate), mechanism, blankets)


def everyone(users, noise):
    return check_in(users, 1.0, noise)


def fixed_size(users, reports, noise):
    return Shuffled(users, FixedSize(reports), GaussianMechanism(noise_multiplier=noise))


def with_noise(event, noise):
    central = {"central_noise": noise} if isinstance(event, Summed) else {}
    return attrs.evolve(event, mechanism=GaussianMechanism(noise_multiplier=noise), **central)


def words(*shape):
    """Draws as a deployment has them, but the same each time."""
    return np.random.default_rng(1).integers(2**64, size=shape, dtype=np.uint64)


USUAL = {"rounds": 10, "delta": 1e-5, "target_epsilon": 1e9, "minimum_batch": 1}


def make_plan(*, noise_multiplier, clip_norm=1.0, **values):
    """Of these values, and `USUAL` ones."""
    mechanism = GaussianMechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    return PrivacyPlan(mechanism=mechanism, **USUAL | values)
