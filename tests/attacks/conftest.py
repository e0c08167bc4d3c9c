"""Fixtures: a shuffler, and what a round of its clients needs."""

from __future__ import annotations

import pytest

from client_world import begin_flower_task
from shuffler_world import here, start  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def flower_task():
    begin_flower_task()
