"""The privacy plan: the one declaration of every number that privacy depends on.

Each quantity has its range and its words here, once: for the section `[privacy]`, for options of
the command line, for plans as devices and shufflers read them. No accountant is imported for that:
a plan looks for its accountant when it is asked what it costs.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from shufl.protocol.mechanisms import (
    Mechanism,
    least_delta,
    most_blankets,
)
from shufl.protocol.mechanisms.randomised_response import Categories, LocalEpsilon
from shufl.protocol.mechanisms.summed import check_sums
from shufl.protocol.validation import (
    Checked,
    ClipNorm,
    Count,
    NotNegative,
    Number,
    Positive,
    Probability,
    Record,
    Seconds,
    Whole,
    first_mistake,
)

LEAST_RATE, MOST_BLANKETS = 1e-12, 1e7
_LEAST_NOISE, _MOST_NOISE = 1e-12, 1e6  # beyond, no accountant computes

Users = Annotated[Whole, Field(ge=1, le=10**12, description="a whole number from 1 to 10^12")]
CheckInRate = Annotated[Number, Field(ge=LEAST_RATE, le=1, description="a number in [1e-12, 1]")]
# 0 is for sums: there the shuffler's noise and the server's may be all there is.
Noise = Annotated[Number, Field(ge=0, le=_MOST_NOISE, description="a number in [1e-12, 10^6]")]
CentralNoise = Annotated[Number, Field(ge=0, le=_MOST_NOISE, description="a number from 0 to 10^6")]
Rounds = Annotated[Whole, Field(ge=1, le=10**9, description="a whole number from 1 to 10^9")]
OfUsers = Annotated[Whole, Field(ge=1, description="a whole number from 1 to the number of users")]
Blankets = Annotated[Number, Field(ge=0, le=MOST_BLANKETS, description="a number from 0 to 10^7")]
Flag = Annotated[bool, Field(description="true or false")]
Adjacency = Literal["replace", "zero-out"]
AccountantName = Literal[
    "theorem3", "rdp", "pld", "blanket", "crowd", "sum-distributed", "sum-central", "local"
]
MechanismName = Literal["gaussian", "ldp-sgd", "randomised-response"]
ParticipationName = Literal["check-in", "allocation"]
Mixing = Literal["shuffle", "sum"]


ON_THEIR_OWN = frozenset({"blanket", "sum-central", "local"})
"""The accountants whose ε does not count on other users' reports."""


class Times(Record):
    """When what happens in a round on real machines, in seconds from its opening.

    All of it is decided before the round, so that no moment tells anything of a user's records.

    Attributes:
        work_until: A user whose update is not done by then reports noise alone.
        send_after: Then reports are sent, however long the work took.
        send_spread: Each node's reports leave at a moment drawn uniformly from so many seconds, so
            that not all come at once. It protects nothing.
        grace: For reports on their way; then the shuffler closes the round.
        answer_every: A node answers Flower's messages at whole multiples of so many seconds.
        query_every: A node answers no more than one query in so many seconds.
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
        most_records: Every user's update costs as much as one from so many records. No more of a
            user's records are used; fewer are filled up with records of no weight.
    """

    most_records: Count


class Plan(Checked):
    """What client, shuffler, server and accountant agreed on before the first round.

    This is as much as a shuffler knows of it; `PrivacyPlan` also knows what it costs.

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
            can tell from others, once it is opened among all the others. ε is the same; who watches
            the network or runs the shuffler does not learn who checked in.
        least_present: Fewest users who must be present at a shuffler for its batch to be released
            where the accountant counts on others; all if left out. Accountants that count on others
            price a round of so many users.
        accountant: Whose ε halts training.
        window: What real machines keep to; a simulation takes no notice of it.
    """

    users: Users
    check_in_rate: CheckInRate
    mechanism: Mechanism
    rounds: Rounds
    delta: Probability
    target_epsilon: Positive
    minimum_batch: OfUsers
    adjacency: Adjacency = "replace"
    shuffler_blankets: Blankets = 0.0
    cover: Flag = False
    participation: ParticipationName = "check-in"
    mixing: Mixing = "shuffle"
    central_noise: CentralNoise = 0.0
    least_present: OfUsers = Field(default=0, validate_default=False)  # 0: all users
    accountant: AccountantName = "theorem3"
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
        if not (noise >= _LEAST_NOISE or (of_sums and noise == 0.0)) or noise > _MOST_NOISE:
            raise ValueError(
                f"noise_multiplier of a plan must lie in [{_LEAST_NOISE:g}, {_MOST_NOISE:g}], "
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
        """How many users there are in a batch, at least, by what a shuffler enforces with cover."""
        counted_on = 1 if self.accountant in ON_THEIR_OWN else self.least_present
        return max(counted_on, self.minimum_batch)

    @property
    def every(self) -> int:
        """b: with allocation a user reports in one of every so many rounds."""
        return round(1 / self.check_in_rate)

    @property
    def most_blankets(self) -> int:
        """How many blankets are made for a round, of which a secret number is kept."""
        return most_blankets(self.shuffler_blankets)

    def enough_sent(self, sent: Any, blankets: Any) -> Any:
        """Returns whether a batch reaches the minimum batch, else its shuffler destroys it.

        All reports of the batch count, blankets too. With cover every user sends, and the senders
        alone count. Both numbers may be arrays.
        """
        return sent + (0 if self.cover else blankets) >= self.minimum_batch

    def enough_present(self, users: int) -> bool:
        """Returns whether a shuffler's batch may be released where so many users are present.

        A smaller one is destroyed unseen if the accountant that halts the run counts on others.
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
        """Returns a length over C that a sum of so many honest users' messages hardly exceeds.

        Some γn updates, by at most five standard deviations more, and the noise of d coordinates.
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
            noise = self.mechanism.noise_multiplier, self.central_noise
            check_sums(self.longest_sum(self.users, dimension), *noise, of_node, dimension)

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


class Privacy(Record):
    """A plan, but for n, of which values may be open: the section `[privacy]` of a configuration.

    Open values are None, or "least-error" for blankets. Clip norm C and noise multiplier z belong
    to the mechanisms of any vector, k categories and ε₀ to randomised response.
    """

    check_in_rate: CheckInRate | None = None
    clip_norm: ClipNorm = 1.0
    noise_multiplier: Noise | None = None
    mechanism: MechanismName = "gaussian"
    categories: Categories | None = None
    local_epsilon: LocalEpsilon | None = None
    adjacency: Adjacency = "replace"
    accountant: AccountantName = "theorem3"
    target_epsilon: Positive | None = None
    delta: Literal["1/n"] | Probability = "1/n"
    rounds: Rounds | None = None
    minimum_batch: OfUsers | None = None
    shuffler_blankets: Literal["least-error"] | Blankets = 0.0
    cover: Flag = False
    participation: ParticipationName = "check-in"
    mixing: Mixing = "shuffle"
    central_noise: CentralNoise | None = None
    least_present: OfUsers | None = None

    @model_validator(mode="after")
    def _mechanism_fits(self) -> Self:
        """Refuses what the mechanism does not have."""
        check_mixing(self, self.mechanism)
        least, noise = 0.0 if self.mixing == "sum" else _LEAST_NOISE, self.noise_multiplier
        if noise is not None and noise < least:
            raise ValueError(f"noise_multiplier must be a number in [1e-12, 10^6], got {noise}")
        response = self.mechanism == "randomised-response"
        if response and self.categories is None:
            raise ValueError("categories must be given with mechanism randomised-response")
        others = {"clip_norm": 1.0, "noise_multiplier": None}
        own = {"categories": None, "local_epsilon": None}
        for key, default in (others if response else own).items():
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key} must be left out with mechanism {self.mechanism}, "
                    f"got {getattr(self, key):g}"
                )
        return self

    @property
    def open(self) -> tuple[str, ...]:
        """The names of the values that a search can find, and that are open."""
        noise = "local_epsilon" if self.mechanism == "randomised-response" else "noise_multiplier"
        if self.accountant == "sum-central":
            noise = "central_noise"
        names = noise, "shuffler_blankets", "rounds", "check_in_rate"
        return tuple(name for name in names if getattr(self, name) in (None, "least-error"))


def check_mixing(plan: Plan | Privacy, mechanism: str) -> None:
    """Refuses what does not go with sums, and what only sums have.

    Raises:
        ValueError: One line.
    """
    if plan.mixing == "shuffle":
        if plan.central_noise:
            raise ValueError(
                f"central_noise must be 0 without mixing sum, got {plan.central_noise:g}"
            )
        return
    for name, needed, given in (
        ("cover", True, plan.cover),
        ("shuffler_blankets", 0, plan.shuffler_blankets),
        ("mechanism", "gaussian", mechanism),
        ("participation", "check-in", plan.participation),
    ):
        if given != needed:
            words = [str(each).lower() for each in (needed, given)]
            raise ValueError(f"{name} must be {words[0]} with mixing sum, got {words[1]}")


def check_allocation(check_in_rate: float) -> None:
    """Refuses a check-in rate that is not one in a whole number of rounds.

    Raises:
        ValueError: It is not.
    """
    if not check_in_rate >= 1e-9 or abs(check_in_rate * round(1 / check_in_rate) - 1) > 1e-5:
        raise ValueError(
            "check_in_rate must be one in a whole number up to 10^9, such as 0.25 or 0.1, with "
            f"participation allocation, got {check_in_rate:g}"
        )


_Node = TypeVar("_Node", int, np.ndarray)


def shuffler_of(node: _Node, shufflers: int) -> _Node:
    """Returns to which shuffler, from 0, the users of a node report; of several nodes an array.

    ε counts on the users of one shuffler alone, so client, server and accountant ask here.
    """
    return node % shufflers
