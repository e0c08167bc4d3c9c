"""What each value of a privacy plan may be, and the open form of a plan, `Privacy`.

Here each value has its range, and the words that say so, once. Plans and the section `[privacy]` of
a configuration are made of these types, and the options of the command line of `Privacy`. Nothing
in this module takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shufl.protocol.validation import ClipNorm, Number, Positive, Probability, Record

if TYPE_CHECKING:
    from shufl.protocol.plan import Plan

LEAST_RATE, MOST_BLANKETS = 1e-12, 1e7
LEAST_NOISE, MOST_NOISE = 1e-12, 1e6  # beyond, no accountant computes

Users = Annotated[int, Field(ge=1, le=10**12, description="a whole number from 1 to 10^12")]
CheckInRate = Annotated[Number, Field(ge=LEAST_RATE, le=1, description="a number in [1e-12, 1]")]
# 0 is for sums: there the shuffler's noise and the server's may be all there is.
Noise = Annotated[Number, Field(ge=0, le=MOST_NOISE, description="a number in [1e-12, 10^6]")]
CentralNoise = Annotated[Number, Field(ge=0, le=MOST_NOISE, description="a number from 0 to 10^6")]
Rounds = Annotated[int, Field(ge=1, le=10**9, description="a whole number from 1 to 10^9")]
OfUsers = Annotated[int, Field(ge=1, description="a whole number from 1 to the number of users")]
Blankets = Annotated[Number, Field(ge=0, le=MOST_BLANKETS, description="a number from 0 to 10^7")]
Categories = Annotated[
    int, Field(ge=2, le=2**15, description="a whole number of categories from 2 to 32768")
]
LocalEpsilon = Annotated[Number, Field(ge=1e-9, le=20, description="a number in [1e-9, 20]")]
Flag = Annotated[bool, Field(description="true or false")]
Adjacency = Literal["replace", "zero-out"]
AccountantName = Literal[
    "theorem3", "rdp", "pld", "blanket", "crowd", "sum-distributed", "sum-central", "local"
]
MechanismName = Literal["gaussian", "ldp-sgd", "randomised-response"]
ParticipationName = Literal["check-in", "allocation"]
Mixing = Literal["shuffle", "sum"]
Schedule = Literal["constant", "linear", "cosine"]  # of the server's step size: ε ignores it


def _is(title: str, default: Any = None) -> Any:
    """A field of `Privacy`, and what it is; options of the command line show that."""
    return Field(default=default, title=title)


class Privacy(Record):
    """The section `[privacy]` of a configuration: a plan without n, whose values may be open.

    Open values are None, or "least-error" for blankets. Clip norm C and noise multiplier z belong
    to the mechanisms of any vector, k categories and ε₀ to randomised response.
    """

    check_in_rate: CheckInRate | None = _is("γ, the probability that a user reports in a round")
    clip_norm: ClipNorm = _is("C, the longest update", 1.0)
    noise_multiplier: Noise | None = _is("z, the noise of a report, in clip norms")
    mechanism: MechanismName = _is("How an update becomes a report", "gaussian")
    categories: Categories | None = _is("k, with mechanism randomised-response")
    local_epsilon: LocalEpsilon | None = _is("ε₀, with mechanism randomised-response")
    adjacency: Adjacency = _is("Which datasets are neighbours", "replace")
    accountant: AccountantName = _is("Whose ε stays within the target", "theorem3")
    target_epsilon: Positive | None = _is("The ε to stay within")
    delta: Literal["1/n"] | Probability = _is("δ", "1/n")
    rounds: Rounds | None = _is("T, the most rounds")
    minimum_batch: OfUsers | None = _is("The fewest reports of a release")
    shuffler_blankets: Literal["least-error"] | Blankets = _is(
        "λ, the expected number of reports of noise alone that the shuffler adds to a round", 0.0
    )
    cover: Flag = _is("All users send in every round, as real machines must", False)
    participation: ParticipationName = _is("By a coin, or once in every 1/γ rounds", "check-in")
    mixing: Mixing = _is("What the shuffler hands over, reports or only their sum", "shuffle")
    central_noise: CentralNoise | None = _is(
        "σ, with mixing sum: the noise of shuffler and of server, each"
    )
    least_present: OfUsers | None = _is("The fewest users of a release")

    @model_validator(mode="after")
    def _mechanism_fits(self) -> Self:
        """Refuses what the mechanism does not have."""
        check_mixing(self, self.mechanism)
        least, noise = 0.0 if self.mixing == "sum" else LEAST_NOISE, self.noise_multiplier
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
