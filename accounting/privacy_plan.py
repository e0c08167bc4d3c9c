"""The privacy plan as its accountant prices it, and plans whose values may be open."""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from shufl import accounting, protocol
from shufl.protocol.mechanisms import MECHANISMS, GaussianMechanism, LdpSgd, RandomisedResponse
from shufl.protocol.plan import Plan
from shufl.protocol.plan_fields import AccountantName, Privacy, Users, check_allocation
from shufl.protocol.validation import Checked, Probability

MOST_ROUNDS = 10**6
"""Upper limit of the search in `most_rounds`."""


class PrivacyPlan(Plan):
    """A `Plan` that its accountant prices, and what it costs."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        accounting.check_accountant(self.accountant, self.event())
        return self

    @property
    def sigma(self) -> float:
        """σ, each report's noise in units of its sensitivity under this plan's adjacency."""
        relation = accounting.ADJACENCIES[self.adjacency]
        return accounting.effective_sigma(self.mechanism.noise_multiplier, relation)

    def event(self) -> protocol.Shuffled:
        """Returns what one round releases of the fewest users who may be present."""
        users, coins = self.least_present, protocol.CheckIn(self.check_in_rate)
        if self.mixing == "sum":
            return protocol.Summed(users, coins, self.mechanism, central_noise=self.central_noise)
        drawn: protocol.CheckIn | protocol.Allocation = coins
        if self.participation == "allocation":
            drawn = protocol.Allocation(self.every)
        return protocol.Shuffled(users, drawn, self.mechanism, self.shuffler_blankets)

    def make_accountant(self, name: str | None = None) -> accounting.ShuffleAccountant:
        """Returns a fresh accountant for this plan's adjacency.

        Args:
            name: Which one, such as "blanket"; the plan's own if None.

        Raises:
            ValueError: The name is unknown.
        """
        return accounting.make_accountant(name or self.accountant, self.adjacency)

    def epsilon(self, accountant: AccountantName | None = None, rounds: int | None = None) -> float:
        """Returns what the plan costs: ε at its δ.

        Args:
            accountant: Which one is asked, such as "blanket"; the plan's own if None.
            rounds: How many rounds count; all of the plan's if None.

        Returns:
            ε >= 0; inf if no finite one is known.

        Examples:
            >>> from shufl.protocol import GaussianMechanism
            >>> plan = PrivacyPlan(
            ...     users=10_000, check_in_rate=0.1, rounds=50, delta=1e-5, target_epsilon=1.0,
            ...     mechanism=GaussianMechanism(noise_multiplier=2.0),
            ...     minimum_batch=100, shuffler_blankets=1e3,
            ... )
            >>> round(plan.epsilon("blanket"), 4), round(plan.epsilon("local"), 2)
            (0.0668, 16.07)

        Raises:
            ConfigError: The accountant is unknown, or does not price the plan's rounds.
        """
        name = accounting.check_accountant(accountant or self.accountant, self.event())
        count = self.rounds if rounds is None else rounds
        pricing = self.make_accountant(name)
        return float(pricing.epsilon_after(self.event(), self.delta, count)) if count else 0.0

    def to_json(self) -> str:
        """Returns JSON in one form only: fields in order, no spaces, shortest exact floats."""
        return self.model_dump_json()

    def digest(self) -> str:
        """Returns the SHA-256 of `to_json`, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class OpenPlan(Privacy, Checked):
    """A plan whose values may be open; `calibrate` finds them."""

    delta: Probability
    users: Users

    @model_validator(mode="before")
    @classmethod
    def _one_in_n(cls, values: dict[str, Any]) -> dict[str, Any]:
        users: Any = values.get("users")
        if values.get("delta", "1/n") != "1/n":
            return values
        if users == 1:
            raise ValueError('delta must be a number when there is one user, got "1/n"')
        # If this is no number of users, that is what will be refused.
        known = isinstance(users, int | np.integer) and users > 1
        return values | {"delta": 1 / int(users) if known else 0.5}

    @model_validator(mode="after")
    def _rate_given(self) -> Self:
        if self.participation == "allocation":
            if self.check_in_rate is None:
                raise ValueError("check_in_rate must be given with participation allocation")
            check_allocation(self.check_in_rate)
        return self

    @classmethod
    def without_noise(cls, plan: PrivacyPlan) -> Self:
        """Returns the plan with its noise open, or the ε₀ of its randomised response."""
        noise = "central_noise" if plan.accountant == "sum-central" else "noise_multiplier"
        return cls(**{"users": plan.users} | plan.section() | {noise: None, "local_epsilon": None})

    @property
    def kind(self) -> type[GaussianMechanism] | type[LdpSgd] | type[RandomisedResponse]:
        """The class of its mechanism."""
        return MECHANISMS.get(self.mechanism, RandomisedResponse)

    def closed(self, **values: Any) -> PrivacyPlan:
        """Returns the plan with these values filled in, unchecked.

        They must fill all that is open but the minimum batch, which becomes half of the expected
        batch.
        """
        given = {"window": None} | dict(self) | values
        of_kind = {name: given[name] for name in self.kind.model_fields if name != "name"}
        if self.accountant == "sum-central" and self.mechanism == "gaussian":
            of_kind["noise_multiplier"] = of_kind["noise_multiplier"] or 0.0
        given["mechanism"] = self.kind(**of_kind)
        given["central_noise"] = given["central_noise"] or 0.0
        present = given["least_present"] = self.least_present or self.users
        if self.minimum_batch is None:
            expected: float = present  # with cover every user sends, and blankets do not count
            if not self.cover:
                expected = present * given["check_in_rate"] + given["shuffler_blankets"]
            given["minimum_batch"] = min(self.users, max(1, int(expected / 2)))
        names = PrivacyPlan.model_fields
        return PrivacyPlan.model_construct(**{name: given[name] for name in names})


def most_rounds(
    epsilon_after: Callable[[int], float], target_epsilon: float, most: int = MOST_ROUNDS
) -> int:
    """Returns the most rounds T <= `most` with ε(T) <= target; 0 if not one is.

    ε(T) increases.
    """
    return bisect.bisect_left(
        range(1, most + 1),
        True,
        key=lambda rounds: not epsilon_after(rounds) <= target_epsilon,  # also of no number
    )


def rounds_within_budget(plan: PrivacyPlan, accountant: str | None = None) -> int:
    """Returns the most rounds T <= plan.rounds whose ε stays within the plan's budget.

    By bisection on T, independently of the step-by-step guard. ε is that of `accountant`, of the
    plan's own if None.

    Raises:
        ValueError: An unknown accountant.
        dp_accounting.UnsupportedEventError: One that does not price the plan's rounds.
    """
    epsilon_after = functools.partial(
        plan.make_accountant(accountant).epsilon_after, plan.event(), plan.delta
    )
    return most_rounds(epsilon_after, plan.target_epsilon, plan.rounds)
