import math

import pytest

from accounting.accountants.local import LocalAccountant
from accounting.accountants.profile import ProfileShuffleAccountant


@pytest.fixture
def composition_alone(monkeypatch):
    """What an accountant's own profiles compose to, without the bound that `local` is."""
    theirs = ProfileShuffleAccountant._unshuffled
    monkeypatch.setattr(ProfileShuffleAccountant, "_unshuffled", lambda self, counts: math.inf)
    monkeypatch.setattr(LocalAccountant, "_unshuffled", theirs)
