"""What tests of a canary share: what its rounds show, and a client with too little noise."""

import numpy as np

from rounds import make_plan
from shufl.accounting import make_accountant
from shufl.accounting.audit.attack import clopper_pearson
from shufl.clients import Node
from shufl.protocol.mechanisms import SeededRandomness


def audited(**values):
    """A plan whose rounds are attacked; the budget stays out of their way."""
    usual = {"check_in_rate": 1.0, "clip_norm": 0.5, "delta": 0.1, "minimum_batch": 1}
    return make_plan(**usual | {"target_epsilon": 1e300} | values)


def claimed(plan, accountant, epsilon):
    """δ of one round, as an accountant states it."""
    return make_accountant(accountant, plan.adjacency).compose(plan.event()).get_delta(epsilon)


def delta_shown(worlds, log_ratio, epsilon):
    """δ(ε) that rounds of two worlds show at 99 % by the event {log likelihood ratio > ε}.

    The event is known beforehand, so no rounds are needed to choose it.
    """
    present, replaced = (
        (sum(score > epsilon for score in scores), len(scores))
        for scores in worlds.scores(log_ratio)
    )
    least, _ = clopper_pearson(*present, 0.005)
    _, most = clopper_pearson(*replaced, 0.005)
    return least - np.exp(epsilon) * most


class HalvedNoise(SeededRandomness):
    def standard_normal(self, round, users, size):
        return super().standard_normal(round, users, size) / 2


def node_with_halved_noise(settings):
    return Node(settings, HalvedNoise(settings.policy.seed))
