"""The privacy plan: every number that privacy depends on, as all parties agree on it.

`plan_fields` says what each value may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from shufl.protocol import plan_fields as fields
from shufl.protocol.mechanisms import (
    Mechanism,
    least_delta,
    most_blankets,
)
from shufl.protocol.mechanisms.summed_reports import check_sums
from shufl.protocol.plan_fields import LEAST_NOISE, MOST_NOISE, check_allocation, check_mixing
from shufl.protocol.validation import (
    Checked,
    Count,
    NotNegative,
    Positive,
    Probability,
    Record,
    Seconds,
    first_mistake,
)

ON_THEIR_OWN = frozenset({"blanket", "sum-central", "local"})
"""The accountants whose ε does not count on other users' reports."""


class Times(Record):
    """When what happens in a round on real machines, in seconds from its opening.

    All of it is decided before the round, so that no moment tells anything of a user's records.

    Attributes:
        work_until: A user whose update is not done by then reports noise alone.
        send_after: From then on reports are sent, however long the work took.
        send_spread: Each node draws the moment of its reports uniformly from this many seconds, so
            that not all come at once. It protects nothing.
        grace: How long reports may be on their way; then the shuffler closes the round.
        answer_every: A node answers Flower's messages at whole multiples of this many seconds.
        query_every: A node answers at most one query in this many seconds.
    """

    work_until: Seconds = 60.0
    send_after: Seconds = 65.0
    send_spread: NotNegative = 30.0
    grace: Seconds = 25.0
    answer_every: Seconds = 1.0
    query_every: Seconds = 30.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.send_after <= self.work_until:
            raise ValueError(
                f"send_after must be above work_until, {self.work_until:g}, got {self.send_after:g}"
            )
        return self

    @property
    def seconds(self) -> float:
        """How long a round is open."""
        return self.send_after + self.send_spread + self.grace


class Window(Times):
    """A round's times, and how much work a user's update is.

    Attributes:
        most_records: The most records of a user that an update uses. Fewer are filled up with
            records of no weight, so that every user's update is equally much work.
    """

    most_records: Count


class Plan(Checked):
    """What client, shuffler, server and accountant agreed on before the first round.

    A shuffler knows a plan in this form; `PrivacyPlan` also says what it costs.

    Attributes:
        users: n, the eligible users; every one may report in every round.
        check_in_rate: γ, each user's chance to report in a round.
        participation: "check-in", by a coin in each round, or "allocation", in exactly one of every
            1/γ rounds, which the device draws itself before the first.
        mechanism: What makes a report of an update; it adds noise.
        mixing: "shuffle", the shuffler hands over reports in random order, or "sum", it hands over
            their sum: every user who is present sends, its noise alone if it did not check in.
        central_noise: σ, with sums: shuffler and server each add N(0, (σC)²) to the sum.
        rounds: The most rounds that may be spent.
        delta: δ, at least `least_delta(rounds)`.
        target_epsilon: The budget: training halts before ε would exceed it.
        minimum_batch: Fewest reports a shuffler releases; see `enough_sent`.
        adjacency: "replace" (one record becomes any other) or "zero-out".
        shuffler_blankets: λ, how many noise-only reports the shuffler adds to a round in
            expectation.
        cover: Whether users who did not check in send too: an empty report, which only the server
            can tell from other reports, after it has opened the shuffled batch. ε is the same. The
            shuffler, and whoever watches the network, do not learn who checked in.
        least_present: Fewest users who must be present at a shuffler for its batch to be released,
            if the accountant counts on others; all users if left out. Accountants that count on
            others price a round of this many users.
        accountant: Whose ε halts training.
        window: What real machines keep to; a simulation takes no notice of it.
    """

    users: fields.Users
    check_in_rate: fields.CheckInRate
    mechanism: Mechanism
    rounds: fields.Rounds
    delta: Probability
    target_epsilon: Positive
    minimum_batch: fields.OfUsers
    adjacency: fields.Adjacency = "replace"
    shuffler_blankets: fields.Blankets = 0.0
    cover: fields.Flag = False
    participation: fields.ParticipationName = "check-in"
    mixing: fields.Mixing = "shuffle"
    central_noise: fields.CentralNoise = 0.0
    least_present: fields.OfUsers = Field(default=0, validate_default=False)  # 0: all users
    accountant: fields.AccountantName = "theorem3"
    window: Window | None = None

    @model_validator(mode="before")
    @classmethod
    def _all_present(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("least_present") is None and "users" in values:
            return values | {"least_present": values["users"]}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in ("minimum_batch", "least_present"):
            if getattr(self, name) > self.users:
                raise ValueError(
                    f"{name} must be at most the number of users, {self.users}, "
                    f"got {getattr(self, name)}"
                )
        if self.participation == "allocation":
            check_allocation(self.check_in_rate)
        noise, of_sums = self.mechanism.noise_multiplier, self.mixing == "sum"
        check_mixing(self, self.mechanism.name)
        if not (noise >= LEAST_NOISE or (of_sums and noise == 0.0)) or noise > MOST_NOISE:
            raise ValueError(
                f"noise_multiplier of a plan must lie in [{LEAST_NOISE:g}, {MOST_NOISE:g}], "
                f"got {noise:g}"
            )
        if self.delta < (least := least_delta(self.rounds)):
            raise ValueError(
                f"delta of a plan of {self.rounds} rounds must be at least {least:g}, which is "
                f"what the random numbers of reports and blankets support, got {self.delta:g}"
            )
        return self

    @property
    def fewest_present(self) -> int:
        """How many users must be present at a shuffler; with cover so many are in each batch.

        Without cover the minimum batch is one of reports, not of those who are present.
        """
        counted_on = 1 if self.accountant in ON_THEIR_OWN else self.least_present
        return max(counted_on, self.minimum_batch if self.cover else 1)

    @property
    def every(self) -> int:
        """b: with allocation a user reports in one of every b rounds."""
        return round(1 / self.check_in_rate)

    @property
    def most_blankets(self) -> int:
        """How many blankets the shuffler makes for a round; it keeps a secret number of them."""
        return most_blankets(self.shuffler_blankets)

    def enough_sent(self, sent: Any, blankets: Any) -> Any:
        """Returns whether a batch reaches the minimum batch; if not, its shuffler destroys it.

        All reports of the batch count, blankets too. With cover every user sends, and only the
        senders count.

        Args:
            sent: How many reports users sent, a number or an array.
            blankets: How many the shuffler added, of the same shape.
        """
        return sent + (0 if self.cover else blankets) >= self.minimum_batch

    def enough_present(self, users: int) -> bool:
        """Returns whether a shuffler's batch may be released with `users` users present.

        A smaller batch is destroyed unseen if the accountant that halts the run counts on others.
        """
        return users >= (1 if self.accountant in ON_THEIR_OWN else self.least_present)

    def noise_of_sum(self, users: int, shufflers: int = 1) -> float:
        """Returns the standard deviation over C of the noise in the sum of `users` users' messages.

        It includes the shufflers' noise, and the server's once for each shuffler.
        """
        own = self.mechanism.noise_multiplier * math.sqrt(users)
        return math.hypot(own, self.central_noise * math.sqrt(2 * shufflers))

    @property
    def noise_of_batch(self) -> float:
        """The standard deviation over C of the noise in the least sum that a shuffler hands over.

        0 without sums.
        """
        own = self.mechanism.noise_multiplier * math.sqrt(self.fewest_present)
        return math.hypot(own, self.central_noise) if self.mixing == "sum" else 0.0

    def longest_sum(self, users: int, dimension: int) -> float:
        """Returns a length over C that the sum of `users` honest users' messages hardly exceeds.

        It has room for γn updates and five standard deviations more, and for the noise of d
        coordinates.
        """
        expected = users * self.check_in_rate
        updates = min(expected + 5 * math.sqrt(expected) + 5, users)
        return updates + self.noise_of_sum(users) * (math.sqrt(dimension) + 8)

    def longest_cheat(self, dimension: int) -> float:
        """Returns how long a vector over C a node of one user may add to a sum that is accepted.

        A node of more users can also leave out their noise, so it may add more.
        """
        noise = self.noise_of_sum(self.users) * math.sqrt(dimension)
        return math.sqrt(self.longest_sum(self.users, dimension) ** 2 - noise**2)

    def check_dimension(self, dimension: int, of_node: int | None = None) -> None:
        """Refuses sums of a model's updates that 32 bits do not hold, or too little node noise.

        `of_node` is the fewest users of a node; if None, the nodes' noise is not checked.

        Raises:
            ConfigError: One line.
        """
        if self.mixing == "sum":
            own, central = self.mechanism.noise_multiplier, self.central_noise
            longest = self.longest_sum(self.users, dimension)
            check_sums(longest, own, central, of_node, dimension)

    def section(self) -> dict[str, Any]:
        """Returns the plan as the section `[privacy]` of a configuration has it: without n."""
        values = dict(self) | dict(self.mechanism) | {"mechanism": self.mechanism.name}
        names = fields.Privacy.model_fields
        return {name: values[name] for name in names if values.get(name) is not None}

    def by_key(self) -> dict[str, Any]:
        """Returns all its values by their keys in a configuration, such as `privacy.rounds`."""
        values = {f"privacy.{name}": value for name, value in self.section().items()}
        values |= {f"window.{name}": value for name, value in self.window or ()}
        if self.window is not None:
            values["data.most_records"] = values.pop("window.most_records")
        return values | {"data.users": self.users}

    def differs(self, other: Plan, here: str = "here", there: str = "there") -> str:
        """Returns the keys that differ, with both values: `privacy.rounds: 8 here, 9 there`."""
        pairs = differing(self.by_key(), other.by_key()).items()
        return "; ".join(f"{key}: {own} {here}, {others} {there}" for key, (own, others) in pairs)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: Not a JSON object, unknown or missing keys, or a value out of range.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"privacy plan: {first_mistake(error, cls)}") from None


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns both values of every key whose values differ; None where one has none."""
    pairs = {key: (one.get(key), other.get(key)) for key in [*one, *other]}
    # 1 and true are equal in Python.
    return {key: pair for key, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


_Node = TypeVar("_Node", int, np.ndarray)


def shuffler_of(node: _Node, shufflers: int) -> _Node:
    """Returns to which shuffler, from 0, the users of a node report; of several nodes an array.

    ε counts on the users of one shuffler alone, so client, server and accountant ask here.
    """
    return node % shufflers
