"""What a value may be: types for the fields of plans and configurations, checks for arguments.

Every refusal is one line that names the value, what is allowed and what was given.
"""

import math
import numbers
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_PLAIN = BeforeValidator(lambda value: value.item() if isinstance(value, np.generic) else value)

Count = Annotated[int, _PLAIN, Field(ge=1, description="a whole number, at least 1")]
Positive = Annotated[
    float, _PLAIN, Field(gt=0, allow_inf_nan=False, description="a number above 0")
]
NotNegative = Annotated[
    float, _PLAIN, Field(ge=0, allow_inf_nan=False, description="a number, at least 0")
]
Rate = Annotated[float, _PLAIN, Field(gt=0, le=1, description="a number in (0, 1]")]
Probability = Annotated[float, _PLAIN, Field(gt=0, lt=1, description="a number in (0, 1)")]


class Checked(BaseModel):
    """A frozen record of checked values; a wrong one is a ValueError of one line."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)

    def __init__(self, **values: Any) -> None:
        """Checks every value.

        Raises:
            ValueError: An unknown or missing name, or a value that is not allowed.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(one_line(error, type(self))) from None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some values changed, checked like a new one."""
        return type(self)(**(dict(self) | changes))


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns what is wrong first, as `name must be …, got …`; unknown names come before all else.

    Args:
        error: What pydantic found.
        model: The model whose fields' descriptions say what is allowed.
    """
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    if first["type"] == "value_error":  # of a check of our own, which says it all
        return str(first["ctx"]["error"])
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {name}; allowed: {', '.join(model.model_fields)}"
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    allowed = field.description if field and field.description else first["msg"]
    if first["type"] == "missing":
        return f"{name} is missing" + (f": {allowed}" if field and field.description else "")
    if field is None or not field.description:
        allowed = allowed.removeprefix("Input should be ").replace(
            "Invalid JSON", "an object of JSON"
        )
        return f"{name or 'it'} must be {allowed}, got {first['input']!r}"
    return f"{name} must be {allowed}, got {first['input']!r}"


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value` as an int in [low, high].

    Raises:
        ValueError: Not an integer (a bool is none) or out of range.
    """
    allowed = f"at least {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def real(name: str, value: Any, interval: str) -> float:
    """Returns `value` as a finite float inside an interval written as `(0, 1]` or `[0, inf)`.

    Raises:
        ValueError: Not a finite real number (a bool is none) or outside the interval.
    """
    low_text, high_text = interval[1:-1].split(",")
    low, high = float(low_text), float(high_text)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")
    number = float(value)
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    if not (math.isfinite(number) and above and below):
        raise ValueError(f"{name} must lie in {interval}, got {number}")
    return number


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of the allowed words.

    Raises:
        ValueError: Anything else.
    """
    if not isinstance(value, str) or value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value
