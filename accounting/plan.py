"""The privacy plan as its accountant prices it, and plans of which values are open."""

from __future__ import annotations

import hashlib
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from shufl import accounting, protocol
from shufl.protocol.mechanisms import MECHANISMS, GaussianMechanism, LdpSgd, RandomisedResponse
from shufl.protocol.plan import AccountantName, Plan, Privacy, Users, check_allocation
from shufl.protocol.validation import Checked, Probability


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
        if self.mixing == "sum":
            coins = protocol.CheckIn(self.check_in_rate)
            about = self.least_present, coins, self.mechanism
            return protocol.Summed(*about, central_noise=self.central_noise)
        participation: protocol.CheckIn | protocol.Allocation
        if self.participation == "allocation":
            participation = protocol.Allocation(self.every)
        else:
            participation = protocol.CheckIn(self.check_in_rate)
        return protocol.Shuffled(
            self.least_present, participation, self.mechanism, self.shuffler_blankets
        )

    def make_accountant(self, name: str | None = None) -> accounting.ShuffleAccountant:
        """Returns a fresh accountant for this plan's adjacency; its own accountant if None.

        Raises:
            ValueError: An unknown name.
        """
        return accounting.make_accountant(name or self.accountant, self.adjacency)

    def epsilon(self, accountant: AccountantName | None = None, rounds: int | None = None) -> float:
        """Returns ε at the plan's δ.

        Without `rounds` all of the plan's count, and without `accountant` its own one is asked.

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
            ConfigError: An unknown accountant, or one that does not price the plan's rounds.
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
    """A plan of which values may be open; `calibrate` finds them."""

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
        """Returns the plan with its noise, or ε₀ of randomised response, open."""
        values = dict(plan) | dict(plan.mechanism) | {"mechanism": plan.mechanism.name}
        known = {name: values[name] for name in cls.model_fields if name in values}
        noise = "central_noise" if plan.accountant == "sum-central" else "noise_multiplier"
        return cls(**known | {noise: None, "local_epsilon": None})

    @property
    def kind(self) -> type[GaussianMechanism] | type[LdpSgd] | type[RandomisedResponse]:
        """The class of its mechanism."""
        return MECHANISMS.get(self.mechanism, RandomisedResponse)

    def closed(self, **values: Any) -> PrivacyPlan:
        """Returns the plan with these values in it, unchecked; all that is open must be among them.

        The minimum batch, if it is open, is half of the expected one.
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
