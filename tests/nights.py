"""What only `make nightly` tries."""

import pytest


def by_night(*values):
    """More values of a parametrised test, each a tuple where there are several parameters."""
    marks = pytest.mark.slow, pytest.mark.nightly
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]
