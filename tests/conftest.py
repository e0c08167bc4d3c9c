"""What tests in several folders share."""

import pytest
import torch

_WITH_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=_WITH_A_GPU)])
def device(request):
    """Each device there is."""
    return request.param
