import math

import pytest

from accounting.accountants.profile import ProfileShuffleAccountant


@pytest.fixture
def composition_alone(monkeypatch):
    """What an accountant's own profiles compose to, without the bound that `local` is."""
    monkeypatch.setattr(ProfileShuffleAccountant, "_unshuffled", lambda self, counts: math.inf)
