"""What tests in several folders share."""

import os
import re

# OpenMP reads it when torch is imported: threads that wait leave the processors to other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import functools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from ports import free_ports
from run_world import ray_of_its_own
from shufl import accounting, protocol
from shufl.accounting import registry
from tiny_disk import in_memory
from warm import flwr_command, run_code, warm_server, warm_sites

# How many examples hypothesis tries, and that no example has a deadline. They are the same each
# time; HYPOTHESIS_PROFILE=others draws others, and a failure then prints how to play it again.
# A test whose examples take seconds asks for a quarter: `settings().max_examples // 4`.
settings.register_profile("day", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("night", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("others", max_examples=100, deadline=None, print_blob=True)

# Ray's workers are nice by default; beside the other tests' processes they hardly got a turn.
os.environ.setdefault("RAY_worker_niceness", "0")

_DEPLOYMENTS = "/test_deployment", "/test_strangers.py"

_CI_INSTALLS = "nginx|nft"

_WITH_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def pytest_configure(config):
    """Before any test is imported: the profile, and what xdist's workers share."""
    usual = "night" if _is_night(config) else "day"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))
    if hasattr(config, "workerinput"):
        return
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # else each worker takes all processors
    stack = ExitStack()
    stack.enter_context(warm_server())  # one for all of xdist's workers
    config.add_cleanup(stack.close)


def pytest_xdist_auto_num_workers():
    """One more than there are processors: tests of deployments wait as long as they compute.

    At most nine, as each holds torch and the longest file takes as long as an eighth of all.
    """
    return min(os.cpu_count() or 1, 8) + 1


def pytest_collection_modifyitems(config, items):
    """By night every test that draws examples runs again, with more of them.

    Puts first what takes longest, so that the workers of `make test` end together. Tests of a
    deployment keep the order of their file: they share one, which takes a minute to start.
    """
    if _is_night(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("nightly")

    def rank(item):
        if any(part in item.nodeid for part in _DEPLOYMENTS):
            return 0, *item.location[:2]
        return (1,) if "integration" in item.nodeid else (2,)

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A test that is skipped in CI because what `.ci/run` installs is not there has failed."""
    report = yield
    if report.skipped and os.environ.get("CI") and isinstance(report.longrepr, tuple):
        *_, reason = report.longrepr
        if re.search(rf"\b({_CI_INSTALLS})\b.* not installed", reason):
            report.outcome, report.longrepr = "failed", f"{reason}: .ci/run installs it"
    return report


def _is_night(config):
    """Whether this is `make nightly`, or `pytest -m nightly` of some files."""
    return config.option.markexpr == "nightly"


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=_WITH_A_GPU)])
def device(request):
    """Each device there is, where float32 is as exact as the engine has it."""
    from shufl.learning.model_trial import exact_float32

    exact_float32()
    return request.param


@pytest.fixture(autouse=True)
def seeded(request):
    """What a test itself draws depends on none before it; `-p randomly` has a seed of its own."""
    if not request.config.pluginmanager.hasplugin("randomly"):
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def inside_a_task():
    """Flower's messages are made inside a task, as its runtime does."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 7


@pytest.fixture(scope="session", autouse=True)
def warm_trials():
    """Has a trial of a model in another process be a fork; trials of commands are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shufl.learning.model_trial.subprocess", SimpleNamespace(run=run_code))
        yield


@pytest.fixture(scope="session", autouse=True)
def ports_of_its_own():
    """Has deployments on loopback take ports that nothing takes before they listen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shufl.deploy.rehearse.free_ports", free_ports)
        yield


@pytest.fixture(scope="module")
def warm_deployment(request):
    """By day, the processes of a module's deployments are forks, and Flower's commands too."""
    with pytest.MonkeyPatch.context() as patch:
        if not _is_night(request.config):
            flwr = SimpleNamespace(run=flwr_command, DEVNULL=None)
            patch.setattr("shufl.deploy.superlink.subprocess", flwr)
            patch.setattr("shufl.deploy.rehearse.subprocess", warm_sites())
        yield


@pytest.fixture
def shuffler_here(request):
    """A shuffler of this process; a test may give options to it as an indirect parameter."""
    from shuffler_world import ShufflerHere

    with ShufflerHere(**getattr(request, "param", {})) as here:
        yield here


@pytest.fixture
def make_round(request, shuffler_here):
    """Makes rounds of a run on this shuffler; see `client_world.Round`."""
    from client_world import Round
    from shufl.clients import client_app
    from shufl.shuffler import ControlClient

    run_id, here = request.node.name[:200], shuffler_here
    with ControlClient(here.address, here.control) as control:
        yield functools.partial(Round, here.address, here.submit, control, run_id=run_id)
    client_app._nodes.clear()


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
def memory_path():
    """A directory in memory where there is such a place: every report is synced to disk."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        yield Path(folder)


class FixedSizeOnly(accounting.LocalAccountant):
    """Refuses every round but one kind."""

    name = "fixed-size-only"
    participations = (protocol.FixedSize,)


@pytest.fixture
def fixed_size_only(monkeypatch):
    """An accountant of the registry that does not price check-in rounds, by name."""
    monkeypatch.setitem(registry.CLASSES, FixedSizeOnly.name, FixedSizeOnly)
    return FixedSizeOnly.name
