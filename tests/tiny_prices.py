"""Importing this prices the tiny configuration, that with twice its noise, and quickstart.

Accountants keep prices: a process that has them begins with much of the work of a short run done.
"""

from shufl.accounting import accountants_of_kind, make_accountant
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled
from tiny import ADJACENCY, CLIP_NORM, NOISE, RATE, USERS


def _price(event, adjacency, delta):
    for name in accountants_of_kind(event):
        accountant = make_accountant(name, adjacency)
        if accountant.supports(event):
            accountant.compose(event).get_epsilon(delta)


for _noise in (NOISE, 2 * NOISE):
    _mechanism = GaussianMechanism(clip_norm=CLIP_NORM, noise_multiplier=_noise)
    _price(Shuffled(USERS, CheckIn(RATE), _mechanism), ADJACENCY, 1 / USERS)
_price(
    Shuffled(1437, CheckIn(0.5), GaussianMechanism(noise_multiplier=1.0), 50.0), "replace", 1 / 1437
)
