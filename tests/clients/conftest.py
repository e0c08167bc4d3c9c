"""What tests of clients share."""

import pytest

from shufl.clients import worker


@pytest.fixture(scope="session", autouse=True)
def quick_starts():
    """A deployed node's child is forked from a process that has imported what tests import too."""
    more = "pytest", "flwr.serverapp", "shufl.accounting.registry", worker.__name__
    worker._PROCESSES.set_forkserver_preload([*more])
