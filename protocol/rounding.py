"""How privacy numbers are printed: upper bounds rounded up, lower bounds down."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns some digits of an upper bound, or of a noise, a δ or a number of blankets.

    What is printed is then true: more of any of these is no more ε.
    """
    return _rounded(value, ROUND_CEILING, digits)


def rounded_down(value: float, digits: int = 4) -> str:
    """Returns some digits of a lower bound, or of a check-in rate."""
    return _rounded(value, ROUND_FLOOR, digits)


def _rounded(value: float, rounding: str, count: int) -> str:
    """Rounded in one direction, but for what lies within the errors of floating point."""
    digits = Context(prec=12).create_decimal_from_float(value)
    return f"{float(Context(prec=count, rounding=rounding).plus(digits)):.{count}g}"
