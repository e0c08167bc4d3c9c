"""The one search: a plan that leaves values open, and what its target ε allows."""

import logging

from shufl.accounting.accountants.base import usual_errors
from shufl.accounting.calibration import (
    CalibrationError,
    least_error_blankets,
    least_error_response,
    nearest,
    range_of,
)
from shufl.accounting.privacy_plan import OpenPlan, PrivacyPlan, most_rounds
from shufl.accounting.registry import ACCOUNTANTS, check_accountant
from shufl.protocol.mechanisms import MECHANISMS
from shufl.protocol.text import rounded_up

_LOG = logging.getLogger(__name__)
_BLANKETS = "shuffler_blankets"
_ANY = {
    "noise_multiplier": 2.0,
    "central_noise": 1.0,
    "local_epsilon": 1.0,
    _BLANKETS: 1.0,
    "check_in_rate": 1.0,
    "rounds": 1,
}
_USED_UP = 0.99  # of the target: a search that could go on comes nearer


@usual_errors()
def calibrate(plan: OpenPlan | PrivacyPlan, epsilon: float | None = None) -> PrivacyPlan:
    """Finds what a plan leaves open, so that the plan is within a target ε.

    One value may be open: the noise, ε₀, the rounds, the check-in rate or the blankets. The
    blankets may also be open together with the noise, or with ε₀; the pair with the least error is
    found then. The ε of what is found is within the target.

    Args:
        plan: What is known. Of a `PrivacyPlan` the noise is found again, or ε₀.
        epsilon: The target; the plan's own if None.

    Returns:
        The whole plan. An `OpenPlan` that leaves nothing open comes back as it is, whatever its ε.

    Examples:
        >>> plan = PrivacyPlan(
        ...     users=10_000, check_in_rate=0.1, rounds=50, delta=1e-5, target_epsilon=1.0,
        ...     mechanism={"name": "gaussian", "noise_multiplier": 2.0}, minimum_batch=100,
        ...     shuffler_blankets=1e3, accountant="blanket",
        ... )
        >>> round(calibrate(plan, epsilon=0.5).mechanism.noise_multiplier, 3)
        0.607

    Raises:
        CalibrationError: No value reaches the target.
        ValueError: More values are open than can be found, or a value does not fit the others.
    """
    if isinstance(plan, PrivacyPlan):
        plan = OpenPlan.without_noise(plan)
    plan = plan if epsilon is None else plan.replace(target_epsilon=epsilon)
    PrivacyPlan(**dict(example_of(plan)))  # refuses what does not fit before the search
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


def example_of(plan: OpenPlan) -> PrivacyPlan:
    """Returns the plan with some value in each open place, which its accountant prices.

    Raises:
        ValueError: The accountant does not price the rounds, or does not count open blankets.
    """
    some = plan.closed(**{name: _ANY[name] for name in plan.open})
    check_accountant(plan.accountant, some.event())
    if _BLANKETS in plan.open and not ACCOUNTANTS[plan.accountant].counts_on_blankets:
        raise ValueError(
            f"shuffler_blankets must be a number with accountant {plan.accountant}, "
            'which does not count them, got "least-error"'
        )
    return some


def fitted(plan: OpenPlan) -> PrivacyPlan:
    """Returns what `calibrate` does, but for a δ of any size, and with 0 rounds if none is within.

    Raises:
        CalibrationError: Nothing reaches the target.
        ValueError: More is open than can be found, or the accountant does not price the rounds.
    """
    some = example_of(plan)

    def epsilon_at(*values: float) -> float:
        return plan.closed(**dict(zip(plan.open, values, strict=True))).epsilon()

    target, reports = some.target_epsilon, some.least_present * some.check_in_rate
    found: tuple[float, ...] = ()
    match plan.open:
        case ():
            pass
        case ("rounds",):
            found = (most_rounds(epsilon_at, target),)
        case ("noise_multiplier",) if plan.central_noise and epsilon_at(0.0) <= target:
            found = (0.0,)
        case (name,):
            found = (nearest(epsilon_at, target, range_of(name, some)),)
        case ("noise_multiplier", "shuffler_blankets"):
            found = least_error_blankets(epsilon_at, target, reports, MECHANISMS[plan.mechanism])
        case ("local_epsilon", "shuffler_blankets") if plan.categories:
            found = least_error_response(epsilon_at, target, reports, plan.categories)
        case several:
            what = " and ".join(several)
            raise ValueError(f"{what} cannot be found together: give all but one")
    return plan.closed(**dict(zip(plan.open, found, strict=True)))


def unused_note(asked: OpenPlan, found: PrivacyPlan) -> str | None:
    """Returns one line where a search ended at the edge of its range, with ε left; otherwise None.

    `found` is what `calibrate` made of the plan that was `asked` for.
    """
    values = dict(found) | dict(found.mechanism)
    edges = {name: range_of(name, found).costly for name in asked.open}
    ends = [f"{name} = {edge:.7g}" for name, edge in edges.items() if values[name] == edge]
    if not ends or (epsilon := found.epsilon()) >= _USED_UP * found.target_epsilon:
        return None
    return (
        f"the target is not used up: ε is {rounded_up(epsilon)} of {found.target_epsilon:g}, and "
        f"the search goes no further than {', '.join(ends)}"
    )
