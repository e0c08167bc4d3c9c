"""How privacy numbers are printed: upper bounds rounded up, lower bounds down."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def rounded_up(value: float) -> str:
    """Returns four digits of an upper bound."""
    return _four_digits(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """Returns four digits of a lower bound."""
    return _four_digits(value, ROUND_FLOOR)


def _four_digits(value: float, rounding: str) -> str:
    """Rounded in one direction, but for what lies within the errors of floating point."""
    digits = Context(prec=12).create_decimal_from_float(value)
    return f"{float(Context(prec=4, rounding=rounding).plus(digits)):.4g}"
