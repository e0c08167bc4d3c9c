"""Processes that have imported everything when they begin.

To start Python and to import torch, Flower, Ray and the accountants takes six seconds of a
processor for each command. Here one process imports them once, prices the tiny configuration, and
forks a child for each command, for each trial of a model in another process (`trial`), and for each
worker of a Ray that tests share. In an interpreter of its own `test_run.py` resumes a run,
`test_run_faults.py` makes a mistake, and `test_install.py` tries each command of the wheel; trials
of the commands themselves, and workers of a Ray that a run starts, have their own too.
"""

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

import shufl.simulator  # noqa: F401  sets variables that Flower and Ray read when they are imported
from warm_ray import first_lines, serve, variables

_OURS = [Path(__file__).parents[1] / name for name in ("tests", "benchmarks", "examples")]
"""Folders whose modules pytest finds, and a command does not."""

_FOUND = [each for each in sys.path if not any(map(Path(each).is_relative_to, _OURS))]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "flwr.simulation",
        "flwr.cli.app",
        "ray",
        "torch._dynamo",
        "matplotlib.figure",
        "shufl.simulator.run",
        "tiny_prices",
    ]
)

_PROGRAMS = {
    "shufl": "shufl.cli.__main__:main",
    "flwr": "flwr.cli.app:app",
    "python": f"{__name__}:_python",
}


class Warm:
    """One of these programs with arguments, as `subprocess.Popen` would run it."""

    def __init__(self, arguments, program="shufl", cwd=None, env=None, process_group=None):
        """Begins it; `process_group`: 0 gives it one of its own."""
        self.args = [str(argument) for argument in arguments]
        self._output, self._said = tempfile.TemporaryDirectory(), None
        self._paths = [Path(self._output.name) / name for name in ("stdout", "stderr")]
        for path in self._paths:
            path.touch()
        given = program, self.args, cwd or Path.cwd(), dict(env or os.environ), _FOUND
        self._process = _forked(_play, *given, self._paths, process_group)
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def kill(self):
        self._process.kill()

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """What it printed and complained of, at its end."""
        self.wait(timeout)
        if self._said is None:
            self._said = tuple(path.read_text(encoding="utf-8") for path in self._paths)
            self._output.cleanup()
        return self._said


def play(arguments, timeout, **options):
    """The end of such a process."""
    process = Warm(arguments, **options)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_code(command, input, capture_output):
    """Does what `subprocess.run` does with `python -P -c CODE`, and always captures the output."""
    with tempfile.NamedTemporaryFile() as stdin:
        stdin.write(input)
        stdin.flush()
        done = play([command[-1], stdin.name], None, program="python")
    done.stdout, done.stderr = done.stdout.encode(), done.stderr.encode()
    return done


def _python():
    _, code, stdin = sys.argv
    with Path(stdin).open() as sys.stdin:
        exec(code, {"__name__": "__main__"})


@contextlib.contextmanager
def forked_workers():
    """Has workers for a Ray; gives the first lines of the program that starts it."""
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "workers"
        server = _forked(serve, str(address), _FOUND)
        try:
            while not address.exists():
                assert server.exitcode is None
                time.sleep(0.05)
            yield first_lines(address)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.join()


@functools.cache
def _begin_server():
    """Starts the process that imports everything, which has some variables of its own."""
    where = {"PYTHONPATH": str(Path(__file__).parent)}  # there is `tiny_prices`
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables() | where).items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def _forked(function, *arguments):
    """Starts a fork that calls this function."""
    _begin_server()
    process = _FORKS.Process(target=function, args=arguments)
    process.start()
    return process


def _play(program, arguments, cwd, env, found, outputs, process_group):
    if process_group is not None:
        os.setpgid(0, process_group)
    for number, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *found]
    sys.argv = [program, *arguments]
    multiprocessing.set_start_method(None, force=True)  # else what it starts is forked here too
    module, _, function = _PROGRAMS[program].partition(":")
    try:
        getattr(importlib.import_module(module), function)()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # both of which a forked process leaves out
