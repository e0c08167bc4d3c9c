"""What tests in several folders share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import accounting

# The same examples each time; HYPOTHESIS_PROFILE=default looks for others.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_LONGEST = "test_deployment", "test_strangers", "integration"

_WITH_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first, so that the workers of `make test` end together."""

    def rank(item: pytest.Item) -> int:
        return next((i for i, part in enumerate(_LONGEST) if part in item.nodeid), len(_LONGEST))

    items.sort(key=rank)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=_WITH_A_GPU)])
def device(request):
    """Each device there is."""
    return request.param


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory where there is such a place: every report is synced to disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


class FixedSizeOnly(accounting.LocalAccountant):
    """Refuses every round but one kind."""

    name = "fixed-size-only"
    participations = (accounting.FixedSize,)


@pytest.fixture
def fixed_size_only(monkeypatch):
    """An accountant of the registry that does not price check-in rounds, by name."""
    monkeypatch.setitem(accounting.ACCOUNTANTS, FixedSizeOnly.name, FixedSizeOnly)
    return FixedSizeOnly.name
