"""What only `make nightly` tries."""

import pytest


def by_night(*values):
    """More values of a parametrised test, each a tuple where there are several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for value in values
    ]
