"""A Ray that runs share, and runs in the background."""

import pytest

from run_world import LongRun, ray_of_its_own


@pytest.fixture(scope="session")
def ray_address():
    with ray_of_its_own(num_cpus=1) as address:
        yield address


@pytest.fixture(scope="module")
def shared_ray(ray_address):
    """Has Flower's runs of a module use one Ray: its start takes as long as a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_address)
        yield


@pytest.fixture
def long_run(tmp_path):
    run = LongRun(tmp_path, ray="own")
    yield run
    run.clean_up()


@pytest.fixture
def long_vectorised_run(tmp_path):
    run = LongRun(tmp_path, "--engine", "vectorised", "--set", "privacy.rounds=100000")
    yield run
    run.clean_up()
