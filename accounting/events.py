"""What one round releases: mechanisms as events, priced by the accountants of the registry.

In all of them a user holds a vector clipped to norm C, adds `N(0, (zC)² I)` on its own device, and
a shuffler hands the reports over in uniformly random order without their senders. The adversary
sees the shuffled reports, and so how many there are. `noise_multiplier` is z, the noise standard
deviation over the clip norm; the accountant turns it into σ with its neighbouring relation.
"""

from typing import Any

import attrs
import dp_accounting

from accounting import validation


def _users(instance: Any, attribute: Any, value: Any) -> None:
    validation.integer("number of users", value, 1)


def _rate(instance: Any, attribute: Any, value: Any) -> None:
    validation.real("check-in rate", value, "(0, 1]")


def _noise(instance: Any, attribute: Any, value: Any) -> None:
    validation.real("noise multiplier", value, "[0, inf)")


def _blanket(instance: Any, attribute: Any, value: Any) -> None:
    validation.real("blanket probability", value, "(0, 1)")


def _blankets(instance: Any, attribute: Any, value: Any) -> None:
    validation.real("shuffler blankets", value, "[0, inf)")


def _reports(instance: Any, attribute: Any, value: Any) -> None:
    validation.integer("number of reports", value, 0, instance.users)


@attrs.frozen
class ShuffledGaussianDpEvent(dp_accounting.DpEvent):
    """Every one of n users reports once: the mechanism of Theorem 1.

    Attributes:
        users: n, at least 1.
        noise_multiplier: z >= 0; 0 is not private.

    Raises:
        ValueError: A value outside its range.
    """

    users: int = attrs.field(validator=_users)
    noise_multiplier: float = attrs.field(validator=_noise)


@attrs.frozen
class ShuffledCheckInGaussianDpEvent(dp_accounting.DpEvent):
    """Each of n users decides by its own coin, with probability γ, to report once.

    The coins are independent of each other and of the data, and only the users see them.

    Attributes:
        users: n, at least 1: all who flip a coin, not those who report.
        check_in_rate: γ in (0, 1].
        noise_multiplier: z >= 0; 0 is not private.
        shuffler_blankets: λ >= 0, the expected number of blankets.

    Raises:
        ValueError: A value outside its range.
    """

    users: int = attrs.field(validator=_users)
    check_in_rate: float = attrs.field(validator=_rate)
    noise_multiplier: float = attrs.field(validator=_noise)
    shuffler_blankets: float = attrs.field(default=0.0, validator=_blankets)


@attrs.frozen
class FixedSizeShuffledGaussianDpEvent(dp_accounting.DpEvent):
    """Exactly m of n users, drawn uniformly without replacement and in secret, report once each.

    Attributes:
        users: n, at least 1.
        reports: m in 0..n.
        noise_multiplier: z >= 0; 0 is not private.

    Raises:
        ValueError: A value outside its range.
    """

    users: int = attrs.field(validator=_users)
    reports: int = attrs.field(validator=_reports)
    noise_multiplier: float = attrs.field(validator=_noise)


@attrs.frozen
class ShuffledCheckInBlanketGaussianDpEvent(dp_accounting.DpEvent):
    """Each of n users decides by its own coin, with probability γ, to report once; with probability
    β, by a second coin, its report is a blanket: the noise `N(0, (zC)² I)` alone, without a vector.

    All coins are independent of each other and of the data, and only the users see them.

    Attributes:
        users: n, at least 1: all who flip a coin, not those who report.
        check_in_rate: γ in (0, 1].
        noise_multiplier: z >= 0; 0 is not private.
        blanket_probability: β in (0, 1), of those who report.

    Raises:
        ValueError: A value outside its range.
    """

    users: int = attrs.field(validator=_users)
    check_in_rate: float = attrs.field(validator=_rate)
    noise_multiplier: float = attrs.field(validator=_noise)
    blanket_probability: float = attrs.field(validator=_blanket)


GAUSSIAN_EVENTS: tuple[type[Any], ...] = (
    ShuffledGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
    FixedSizeShuffledGaussianDpEvent,
)

EVENTS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (*GAUSSIAN_EVENTS, ShuffledCheckInBlanketGaussianDpEvent)
}

MECHANISMS: dict[str, type[Any]] = {
    "gaussian": ShuffledCheckInGaussianDpEvent,
    "blanket-gaussian": ShuffledCheckInBlanketGaussianDpEvent,
}
"""What one round of a run releases, by the mechanism's name in the plan."""


def event_to_dict(event: Any) -> dict[str, Any]:
    """Returns an event of this module as plain JSON values: `{"name": ..., field: value, ...}`.

    Raises:
        ValueError: Not an event of this module.
    """
    name = type(event).__name__
    if EVENTS.get(name) is not type(event):
        raise ValueError(f"event must be one of {', '.join(sorted(EVENTS))}, got {event!r}")
    values = {
        field.name: field.type(getattr(event, field.name)) for field in attrs.fields(type(event))
    }
    return {"name": name, **values}


def event_from_dict(values: Any) -> Any:
    """Returns the event that `event_to_dict` wrote.

    Raises:
        ValueError: An unknown event, unknown or missing parameters, or values out of range.
    """
    if not isinstance(values, dict) or values.get("name") not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(sorted(EVENTS))}, got {values!r}")
    parameters = {key: value for key, value in values.items() if key != "name"}
    cls = EVENTS[values["name"]]
    expected = {field.name for field in attrs.fields(cls)}
    if set(parameters) != expected:
        raise ValueError(
            f"{values['name']} must have parameters {sorted(expected)}, got {sorted(parameters)}"
        )
    return cls(**parameters)
