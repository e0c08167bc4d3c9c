"""Prices the rounds of the tiny configuration: half of the work of a run that has a few rounds.

Accountants keep prices, so that a process which has imported this need not find them again.
"""

from shufl.accounting import (
    CheckIn,
    GaussianMechanism,
    Shuffled,
    accountants_of_kind,
    make_accountant,
)

_ROUND = Shuffled(60, CheckIn(0.5), GaussianMechanism(clip_norm=0.8, noise_multiplier=1.0))

for _name in accountants_of_kind(_ROUND):
    _accountant = make_accountant(_name, "zero-out")
    if _accountant.supports(_ROUND):
        _accountant.compose(_ROUND).get_epsilon(1 / 60)
