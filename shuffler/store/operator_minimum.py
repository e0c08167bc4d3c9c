"""What a shuffler's operator holds every plan to, whatever the server asks for."""

from __future__ import annotations

from shufl.protocol.plan import Plan
from shufl.protocol.plan_fields import Blankets, Rounds
from shufl.protocol.validation import Count, NotNegative, Record
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused


class Floor(Record, strict=False):
    """No run is created, and no round opened, with less privacy than this.

    Attributes:
        least_blankets: the least λ, a plan's `shuffler_blankets`.
        least_batch: the least `minimum_batch` of a plan.
        least_sum_noise: the least noise, in clip norms, of a sum of the fewest users of a batch.
        most_rounds: how many rounds a run may have; None: any number.
    """

    least_blankets: Blankets = 0.0
    least_batch: Count = 1
    least_sum_noise: NotNegative = 0.0
    most_rounds: Rounds | None = None

    def check(self, plan: Plan, round: int = 1) -> None:
        """Refuses a plan below the floor, or a round of it beyond.

        Rounds of a run rise, so that with numbers from 1 to `most_rounds` there are no more.

        Raises:
            ShufflerRefused: `BELOW_FLOOR`; the detail names the key of the floor.
        """
        if plan.shuffler_blankets < self.least_blankets:
            raise self._below("least_blankets", f"the plan has {plan.shuffler_blankets:.15g}")
        if plan.minimum_batch < self.least_batch:
            raise self._below("least_batch", f"the plan's minimum batch is {plan.minimum_batch}")
        if plan.mixing == "sum" and plan.noise_of_batch < self.least_sum_noise:
            raise self._below("least_sum_noise", f"the plan has {plan.noise_of_batch:.4g}")
        if self.most_rounds is None:
            return
        if plan.rounds > self.most_rounds:
            raise self._below("most_rounds", f"the plan has {plan.rounds}")
        if not 1 <= round <= self.most_rounds:
            raise self._below("most_rounds", f"rounds count from 1, this one is {round}")

    def _below(self, key: str, asked: str) -> ShufflerRefused:
        allowed = f"this shuffler's floor has {key} = {getattr(self, key):.15g}"
        return ShufflerRefused(Refusal.BELOW_FLOOR, f"{allowed}, {asked}")
