"""What tests of a canary share: what its rounds show, and a client with too little noise."""

import numpy as np

from shufl.accounting.audit.attack import clopper_pearson
from shufl.clients import Node
from shufl.protocol.mechanisms import SeededRandomness


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
    return Node(settings, HalvedNoise(settings.seed))
