"""How runs of an engine begin, and how they, their Ray and their signals end."""

import os
import re
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest
from rich.console import Console

from run_world import LIMIT, left_behind, wait_until
from shufl.learning.config import load
from shufl.results.engine_interface import ENGINES
from shufl.results.run import Run
from shufl.simulator.engines.flower import FlowerEngine


class Started(Exception):
    pass


class StartedEngine(FlowerEngine):
    """The Flower engine, up to where it would start a shuffler."""

    def run(self, training, observe, stop):
        raise Started(training.reproducible)


@pytest.mark.parametrize(("setting", "repeats"), [("seed=1", True), ("seed=system", False)])
def test_rounds_are_played_again_only_where_they_end_the_same(
    tmp_path, monkeypatch, setting, repeats
):
    monkeypatch.setitem(ENGINES, "flower", StartedEngine)
    with pytest.raises(Started) as started:
        Run.new(load("quickstart", [setting]), tmp_path, Console(quiet=True)).train()
    assert started.value.args == (repeats,)


_STARTS_RAY = """
import sys
from shufl.simulator.engines.ray_cluster import OwnRay

ray = OwnRay()
ray.start()
print(ray.address(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_ray_of_our_own_ends_with_the_program_that_started_it_though_that_is_killed(tmp_path):
    command, env = [sys.executable, "-c", _STARTS_RAY], os.environ | {"TEST_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, text=True) as program:
        assert re.fullmatch(r"\S+:\d+\n", program.stdout.readline())
        assert len(left_behind(tmp_path)) > 3
        program.kill()
    wait_until(lambda: not left_behind(tmp_path), LIMIT, "Ray to end")


# The main thread sleeps in a lock, as while Flower's engine works, and wakes for its own signals.
_SIGNAL_TO_ANOTHER_THREAD = """
import signal, sys, threading
from shufl.results.interrupts import interrupts

def get_signal():
    signal.pthread_kill(threading.get_ident(), int(sys.argv[1]))
    print(stop.wait(600))

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
stop = threading.Event()
for _ in range(2):
    stop.clear()
    with interrupts(stop):
        worker = threading.Thread(target=get_signal)
        worker.start()
        worker.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_that_another_thread_gets_ends_the_run_too(number):
    command = [sys.executable, "-c", _SIGNAL_TO_ANOTHER_THREAD, str(int(number))]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True\nTrue\n"


# The parent's own signal comes after the child's, and is passed on to its own descriptor.
_SIGNAL_IN_A_CHILD = """
import os, signal, threading
from shufl.results.interrupts import interrupts

stop, (read_end, write_end) = threading.Event(), os.pipe()
os.set_blocking(write_end, False)
signal.set_wakeup_fd(write_end)
signal.signal(signal.SIGUSR1, lambda *_: None)
with interrupts(stop):
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(os.read(read_end, 1)[0] == signal.SIGUSR1, stop.is_set())
"""


@pytest.mark.slow
def test_a_signal_to_a_child_that_was_forked_does_not_end_the_run():
    command = [sys.executable, "-c", _SIGNAL_IN_A_CHILD]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True False\n"
