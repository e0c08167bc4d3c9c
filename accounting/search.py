"""The one search: a plan that leaves values open, and what its target ε allows."""

import logging
from collections.abc import Callable

from shufl.accounting.accountants.base import usual_errors
from shufl.accounting.calibration import (
    LEAST_BLANKETS,
    MOST_ROUNDS,
    CalibrationError,
    largest_local_epsilon,
    largest_rate,
    least_blankets,
    least_error_blankets,
    least_error_response,
    least_noise,
    most_rounds,
)
from shufl.accounting.plan import OpenPlan, PrivacyPlan
from shufl.accounting.registry import ACCOUNTANTS, check_accountant
from shufl.protocol.mechanisms import MECHANISMS, RandomisedResponse
from shufl.protocol.rounding import rounded_up

_LOG = logging.getLogger(__name__)
_NOISE, _LOCAL, _BLANKETS = "noise_multiplier", "local_epsilon", "shuffler_blankets"
_ANY = {
    **{_NOISE: 2.0, _LOCAL: 1.0, _BLANKETS: 1.0, "rounds": 1, "check_in_rate": 1.0},
    "central_noise": 1.0,
}
_LEAST_OF_SUMS = 1e-6  # of all users' noises, which hide a user together
_USED_UP = 0.99  # of the target: a search that could go on comes nearer


@usual_errors()
def calibrate(plan: OpenPlan | PrivacyPlan, epsilon: float | None = None) -> PrivacyPlan:
    """Returns the plan with what it leaves open found for a target ε: the plan's, or `epsilon`.

    Open may be one of noise, ε₀, rounds, check-in rate and blankets, or the blankets with the noise
    or with ε₀: those two are the pair of least error. Of a `PrivacyPlan` the noise is found, or ε₀.
    The ε of what is found is within the target. An `OpenPlan` that leaves nothing open comes back
    as it is, whatever its ε.

    Examples:
        >>> plan = PrivacyPlan(
        ...     users=10_000, check_in_rate=0.1, rounds=50, delta=1e-5, target_epsilon=1.0,
        ...     mechanism={"name": "gaussian", "noise_multiplier": 2.0}, minimum_batch=100,
        ...     shuffler_blankets=1e3, accountant="blanket",
        ... )
        >>> round(calibrate(plan, epsilon=0.5).mechanism.noise_multiplier, 3)
        0.607

    Raises:
        CalibrationError: Nothing reaches the target.
        ValueError: More is open than can be found, or a value does not fit the others.
    """
    if isinstance(plan, PrivacyPlan):
        plan = OpenPlan.without_noise(plan)
    plan = plan if epsilon is None else plan.replace(target_epsilon=epsilon)
    some = plan.closed(**{name: _ANY[name] for name in plan.open})
    PrivacyPlan(**dict(some))  # what does not fit is refused before the search, which takes time
    say_search(plan)
    found = fitted(plan)
    if not found.rounds:
        raise CalibrationError(f"not one round is within epsilon {plan.target_epsilon:g}")
    return PrivacyPlan(**dict(found))


def say_search(plan: OpenPlan) -> None:
    """Logs what is searched for, which may take a minute."""
    if plan.open:
        what = " and ".join(plan.open).replace("_", " ")
        _LOG.info("searching for %s within epsilon %g", what, plan.target_epsilon)


def fitted(plan: OpenPlan) -> PrivacyPlan:
    """Returns the same as `calibrate`, for a δ of any size, and with no round if none is within.

    Raises:
        CalibrationError: Nothing reaches the target.
        ValueError: More is open than can be found, or the accountant does not price the rounds.
    """
    some = plan.closed(**{name: _ANY[name] for name in plan.open})
    check_accountant(plan.accountant, some.event())
    if _BLANKETS in plan.open and not ACCOUNTANTS[plan.accountant].counts_on_blankets:
        raise ValueError(
            f"shuffler_blankets must be a number with accountant {plan.accountant}, "
            'which does not count them, got "least-error"'
        )

    def epsilon_at(*values: float) -> float:
        return plan.closed(**dict(zip(plan.open, values, strict=True))).epsilon()

    found = _found(plan, some, epsilon_at)
    return plan.closed(**dict(zip(plan.open, found, strict=True)))


def _found(
    plan: OpenPlan, some: PrivacyPlan, epsilon_at: Callable[..., float]
) -> tuple[float, ...]:
    """The open values, in their order; `some` has any in their places."""
    target, users, rate = some.target_epsilon, some.least_present, some.check_in_rate
    kind = MECHANISMS.get(plan.mechanism)
    match plan.open:
        case ():
            return ()
        case ("noise_multiplier",) if kind:
            if plan.central_noise and epsilon_at(0.0) <= target:
                return (0.0,)
            least = _LEAST_OF_SUMS if plan.mixing == "sum" else kind.least_noise
            return (least_noise(epsilon_at, target, least),)
        case ("central_noise",):
            return (least_noise(epsilon_at, target, _LEAST_OF_SUMS),)
        case ("local_epsilon",):
            return (largest_local_epsilon(epsilon_at, target),)
        case ("rounds",):
            return (most_rounds(epsilon_at, target),)
        case ("check_in_rate",):
            return (largest_rate(epsilon_at, target, users),)
        case ("shuffler_blankets",):
            return (least_blankets(epsilon_at, target),)
        case ("noise_multiplier", "shuffler_blankets") if kind:
            return least_error_blankets(epsilon_at, target, users, rate, kind)
        case ("local_epsilon", "shuffler_blankets") if plan.categories:
            return least_error_response(epsilon_at, target, users * rate, plan.categories)
    raise ValueError(f"{' and '.join(plan.open)} cannot be found together: give all but one")


def unused_note(asked: OpenPlan, found: PrivacyPlan) -> str | None:
    """Returns one line where a search ended at the edge of its range, with ε left; otherwise None.

    `found` is what `calibrate` made of the plan that was `asked` for.
    """
    values = dict(found) | dict(found.mechanism)
    of_sums = found.mixing == "sum"
    least = _LEAST_OF_SUMS if of_sums else getattr(found.mechanism, "least_noise", None)
    edges = {
        _NOISE: ("noise", least),
        "central_noise": ("central-noise", _LEAST_OF_SUMS),
        "rounds": ("rounds", MOST_ROUNDS),
        _LOCAL: ("local_epsilon", RandomisedResponse.most_epsilon),
        "check_in_rate": ("gamma", 1.0),
        _BLANKETS: ("blankets", LEAST_BLANKETS),
    }
    ends = [
        f"{word} = {edge:.7g}"
        for name, (word, edge) in edges.items()
        if name in asked.open and values[name] == edge
    ]
    if not ends or (epsilon := found.epsilon()) >= _USED_UP * found.target_epsilon:
        return None
    return (
        f"the target is not used up: ε is {rounded_up(epsilon)} of {found.target_epsilon:g}, and "
        f"the search goes no further than {', '.join(ends)}"
    )
