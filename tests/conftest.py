"""What tests in several folders share."""

import os

import pytest
import torch
from hypothesis import settings

# The same examples each time; HYPOTHESIS_PROFILE=default looks for others.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_WITH_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=_WITH_A_GPU)])
def device(request):
    """Each device there is."""
    return request.param
