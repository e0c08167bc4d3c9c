"""The privacy plan: the one source of every number that privacy depends on."""

import hashlib
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from shufl.accounting import adjacency, registry
from shufl.accounting.accountants.base import ShuffleAccountant
from shufl.accounting.events import CheckIn, Shuffled
from shufl.accounting.mechanisms import Mechanism, least_delta
from shufl.accounting.validation import (
    Checked,
    Count,
    NotNegative,
    Positive,
    Probability,
    Rate,
    first_mistake,
)

# Beyond these no accountant computes.
_LEAST_NOISE, _MOST_NOISE = 1e-12, 1e6


class PrivacyPlan(Checked):
    """What client, shuffler, server and accountant agreed on before the first round.

    Attributes:
        users: n, the eligible users; every one flips its coin in every round.
        check_in_rate: γ in (0, 1], each user's chance to report in a round.
        mechanism: What makes a report of an update; it adds noise.
        rounds: The most rounds that may be spent.
        delta: δ in (0, 1), at least `least_delta(rounds)`.
        target_epsilon: The budget: training halts before ε would exceed it.
        minimum_batch: Fewest reports a shuffler releases, its blankets included, in 1..users; with
            cover the fewest users who sent.
        adjacency: "replace" (one record becomes any other) or "zero-out".
        shuffler_blankets: λ >= 0, how many noise-only reports the shuffler adds to a round in
            expectation.
        cover: Whether users who did not check in send too: an empty report, which only the server
            can tell from others, once it is opened among all the others. ε is the same; who watches
            the network or runs the shuffler does not learn who checked in.
        least_present: Fewest users who must be present at a shuffler for its batch to be released
            where the accountant counts on others, in 1..users; all if left out. Accountants that
            count on others price a round of so many users.
        accountant: Whose ε halts training; a key of `ACCOUNTANTS` that prices `event()`.

    Raises:
        ValueError: A value outside its range, in one line.
    """

    users: Annotated[Count, Field(le=10**12, description="a whole number from 1 to 10^12")]
    check_in_rate: Rate
    mechanism: Mechanism
    rounds: Annotated[Count, Field(le=10**9, description="a whole number from 1 to 10^9")]
    delta: Probability
    target_epsilon: Positive
    minimum_batch: Count
    adjacency: Literal["replace", "zero-out"] = Field("replace", description="replace or zero-out")
    shuffler_blankets: NotNegative = 0.0
    cover: bool = Field(False, description="true or false")
    least_present: Count
    accountant: str = "theorem3"

    @model_validator(mode="before")
    @classmethod
    def _all_present(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("least_present") is None and "users" in values:
            return values | {"least_present": values["users"]}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> "PrivacyPlan":
        for name in ("minimum_batch", "least_present"):
            if getattr(self, name) > self.users:
                raise ValueError(
                    f"{name} must be at most the number of users, {self.users}, "
                    f"got {getattr(self, name)}"
                )
        noise = self.mechanism.noise_multiplier
        if not _LEAST_NOISE <= noise <= _MOST_NOISE:
            raise ValueError(
                f"noise_multiplier of a plan must lie in [{_LEAST_NOISE:g}, {_MOST_NOISE:g}], "
                f"got {noise:g}"
            )
        if self.delta < (least := least_delta(self.rounds)):
            raise ValueError(
                f"delta of a plan of {self.rounds} rounds must be at least {least:g}, which is "
                f"what the random numbers of reports and blankets support, got {self.delta:g}"
            )
        registry.check_accountant(self.accountant, self.event())
        return self

    @property
    def sigma(self) -> float:
        """σ, each report's noise in units of its sensitivity under this plan's adjacency."""
        return adjacency.effective_sigma(
            self.mechanism.noise_multiplier, adjacency.relation_of(self.adjacency)
        )

    def event(self) -> Shuffled:
        """Returns what one round releases of the fewest users who may be present."""
        return Shuffled(
            self.least_present, CheckIn(self.check_in_rate), self.mechanism, self.shuffler_blankets
        )

    def make_accountant(self, name: str | None = None) -> ShuffleAccountant:
        """Returns a fresh accountant for this plan's adjacency; its own accountant if None.

        Raises:
            ValueError: An unknown name.
        """
        return registry.make_accountant(name or self.accountant, self.adjacency)

    def epsilon(self, accountant: str | None = None) -> float:
        """Returns ε of all planned rounds at δ, by an accountant; the plan's own if None.

        >>> from shufl.accounting import GaussianMechanism
        >>> plan = PrivacyPlan(
        ...     users=10_000, check_in_rate=0.1, mechanism=GaussianMechanism(noise_multiplier=2.0),
        ...     rounds=50, delta=1e-5, target_epsilon=1.0, minimum_batch=100, shuffler_blankets=1e3,
        ... )
        >>> round(plan.epsilon("blanket"), 4), round(plan.epsilon("local"), 2)
        (0.0668, 16.07)

        Raises:
            ConfigError: An unknown accountant, or one that does not price the plan's rounds.
        """
        name = registry.check_accountant(accountant or self.accountant, self.event())
        return float(
            self.make_accountant(name).epsilon_after(self.event(), self.delta, self.rounds)
        )

    def to_json(self) -> str:
        """Returns JSON in one form only: fields in order, no spaces, shortest exact floats."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> "PrivacyPlan":
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: Not a JSON object, unknown or missing keys, or a value out of range.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"privacy plan: {first_mistake(error, cls)}") from None

    def digest(self) -> str:
        """Returns the SHA-256 of `to_json`, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
