"""The privacy plan: the one source of every number that privacy depends on."""

import dataclasses
import hashlib
import json
from typing import Any

from accounting import adjacency, registry, validation
from accounting.accountants.base import ShuffleAccountant
from accounting.events import ShuffledCheckInGaussianDpEvent
from accounting.mechanisms import GaussianMechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What client, shuffler, server and accountant agreed on before the first round.

    Attributes:
        users: n, the eligible users; every one flips its coin in every round.
        check_in_rate: γ in (0, 1], each user's chance to report in a round.
        clip_norm: C > 0, the largest Euclidean norm of an update before noise.
        noise_multiplier: z > 0, the standard deviation of each user's noise over C.
        rounds: The most rounds that may be spent.
        delta: δ in (0, 1).
        target_epsilon: The budget: training halts before ε would exceed it.
        minimum_batch: Fewest reports a shuffler releases, its blankets included, in 1..users.
        adjacency: "replace" (one record becomes any other) or "zero-out".
        shuffler_blankets: λ >= 0, how many noise-only reports the shuffler adds to a round in
            expectation.
        least_present: Fewest users who must be present at a shuffler for its batch to be released
            where the accountant counts on others, in 1..users; all if None. Accountants that count
            on others price a round of so many users.
        accountant: Whose ε halts training; a key of `ACCOUNTANTS` that prices `event()`.

    Raises:
        ValueError: A value outside its range, in one line.
    """

    users: int
    check_in_rate: float
    clip_norm: float
    noise_multiplier: float
    rounds: int
    delta: float
    target_epsilon: float
    minimum_batch: int
    adjacency: str = "replace"
    shuffler_blankets: float = 0.0
    least_present: int | None = None
    accountant: str = "theorem3"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "users": validation.integer("users", self.users, 1),
            "check_in_rate": validation.real("check-in rate", self.check_in_rate, "(0, 1]"),
            "clip_norm": validation.real("clip norm", self.clip_norm, "(0, inf)"),
            "noise_multiplier": validation.real(
                "noise multiplier", self.noise_multiplier, "(0, inf)"
            ),
            "rounds": validation.integer("rounds", self.rounds, 1),
            "delta": validation.real("delta", self.delta, "(0, 1)"),
            "target_epsilon": validation.real("target epsilon", self.target_epsilon, "(0, inf)"),
            "adjacency": validation.choice(
                "adjacency", self.adjacency, tuple(adjacency.ADJACENCIES)
            ),
            "shuffler_blankets": validation.real(
                "shuffler blankets", self.shuffler_blankets, "[0, inf)"
            ),
        }
        checked["minimum_batch"] = validation.integer(
            "minimum batch", self.minimum_batch, 1, checked["users"]
        )
        least = self.users if self.least_present is None else self.least_present
        checked["least_present"] = validation.integer(
            "least users present", least, 1, checked["users"]
        )
        # One type per field, so that 1 and 1.0 give the same bytes and the same digest.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        registry.check_accountant(self.accountant, self.event())

    @property
    def sigma(self) -> float:
        """σ, each report's noise in units of its sensitivity under this plan's adjacency."""
        return adjacency.effective_sigma(
            self.noise_multiplier, adjacency.relation_of(self.adjacency)
        )

    @property
    def mechanism(self) -> GaussianMechanism:
        """What makes a report of an update."""
        return GaussianMechanism(self.clip_norm, self.noise_multiplier)

    def event(self) -> ShuffledCheckInGaussianDpEvent:
        """Returns what one round releases of the fewest users who may be present."""
        assert self.least_present is not None  # since `__post_init__`
        return ShuffledCheckInGaussianDpEvent(
            self.least_present, self.check_in_rate, self.noise_multiplier, self.shuffler_blankets
        )

    def make_accountant(self, name: str | None = None) -> ShuffleAccountant:
        """Returns a fresh accountant for this plan's adjacency; its own accountant if None.

        Raises:
            ValueError: An unknown name.
        """
        return registry.make_accountant(name or self.accountant, self.adjacency)

    def to_json(self) -> str:
        """Returns canonical JSON: sorted keys, no spaces, shortest exact floats."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "PrivacyPlan":
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: Not a JSON object, unknown or missing keys, or a value out of range.
        """
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"privacy plan must be JSON, got {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"privacy plan must be a JSON object, got {type(values).__name__}")
        expected = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - expected):
            raise ValueError(f"privacy plan has unknown keys: {', '.join(unknown)}")
        if missing := sorted(expected - set(values)):
            raise ValueError(f"privacy plan lacks keys: {', '.join(missing)}")
        return cls(**values)

    def digest(self) -> str:
        """Returns the SHA-256 of `to_json`, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
