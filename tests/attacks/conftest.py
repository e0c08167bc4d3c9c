"""Fixtures: shufflers, as for the tests of the shuffler itself."""

from shuffler_world import here, start  # noqa: F401
