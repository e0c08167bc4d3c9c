"""Importing this prices the rounds of the tiny configuration.

Accountants keep prices: a process that has them begins with much of the work of a short run done.
"""

from shufl.accounting import accountants_of_kind, make_accountant
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled
from tiny import ADJACENCY, CLIP_NORM, NOISE, RATE, USERS

_MECHANISM = GaussianMechanism(clip_norm=CLIP_NORM, noise_multiplier=NOISE)
_ROUND = Shuffled(USERS, CheckIn(RATE), _MECHANISM)

for _name in accountants_of_kind(_ROUND):
    _accountant = make_accountant(_name, ADJACENCY)
    if _accountant.supports(_ROUND):
        _accountant.compose(_ROUND).get_epsilon(1 / USERS)
