import pytest

from shufl.accounting.accountants.local import AmplifiedAccountant


@pytest.fixture
def composition_alone(monkeypatch):
    """What an accountant's own profiles compose to, without the bound that `local` is."""
    for name in ("_epsilon", "_delta"):
        monkeypatch.delattr(AmplifiedAccountant, name)
