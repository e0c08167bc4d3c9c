"""Processes that have imported everything when they begin.

To start Python and to import torch, Flower, Ray and the accountants takes six seconds of a
processor for each command. Here one process, `warm_server`, imports them once, prices the tiny
configuration, and forks a child for each command, for each trial of a model in another process, for
the shuffler of each run, and for each worker of a Ray that tests share.

These have interpreters of their own: the run that `test_run.py` resumes, the mistake that
`test_run_faults.py` makes, the commands of `test_install.py`, trials of commands, workers of a Ray
that a run starts, shufflers that a test starts or looks at, the process of a node that forged
messages reach, what Flower starts, and by night all of a deployment.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

_ADDRESS = "TEST_WARM"
"""The variable with the path of the socket where the server listens."""

COLD = {"TEST_COLD": "1"}
"""Given to a run, its shuffler has an interpreter of its own."""


@contextlib.contextmanager
def warm_server():
    """Starts the server at the first call, whichever process makes it, and ends it."""
    folder = tempfile.mkdtemp(prefix="warm-")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        os.environ[_ADDRESS] = f"{folder}/socket"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done, closed = os.pipe()
        started = threading.Thread(target=_start_at_a_call, args=(listener, done, env, Path.cwd()))
        started.start()
        try:
            yield
        finally:
            os.close(closed)
            started.join()
            os.close(done)
            del os.environ[_ADDRESS]
            shutil.rmtree(folder)


def _start_at_a_call(listener, done, env, cwd):
    """Returns when the pipe `done` is closed, and ends the server before."""
    program = Path(__file__).with_name("warm_server.py")
    with listener:  # who then waits for the server is told when it has ended by itself
        if done in select.select([listener, done], [], [])[0]:
            return
        server = subprocess.Popen(
            [sys.executable, "-P", program, str(listener.fileno())],
            stdin=subprocess.PIPE,  # its end is the server's
            stdout=subprocess.PIPE,  # a pipe: no fork can seek in its output
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            pass_fds=[listener.fileno()],
            process_group=0,
        )
    with server:
        said = b""
        while done not in select.select([done, server.stdout], [], [])[0]:
            said += (more := os.read(server.stdout.fileno(), 2**16))
            if not more:
                sys.stderr.write(said.decode())
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


class Warm:
    """One of the server's programs with arguments, as `subprocess.Popen` would run it."""

    def __init__(
        self,
        arguments,
        program="shufl",
        cwd=None,
        env=None,
        process_group=None,
        stdin=None,
        stdout=None,
        stderr=None,
        piped=False,
    ):
        """Begins it. `piped`: its input and output are pipes, else files: empty, or kept ones.

        `process_group`: 0 gives it one of its own.
        """
        self.args = [str(argument) for argument in arguments]
        self.stdin = self.stdout = self.returncode = self._said = None
        self._kept = [given or tempfile.TemporaryFile() for given in (stdout, stderr)]  # noqa: SIM115
        call = {
            "program": program,
            "arguments": self.args,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "process_group": process_group,
        }
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ[_ADDRESS])
        with contextlib.ExitStack() as stack:
            files = [stdin or stack.enter_context(Path(os.devnull).open("rb")), *self._kept]
            if piped:
                (its_input, self.stdin), (self.stdout, its_output) = _pipe(), _pipe()
                files[:2] = map(stack.enter_context, (its_input, its_output))
            socket.send_fds(self._server, [b"."], [file.fileno() for file in files])
        self._server.sendall(json.dumps(call).encode() + b"\n")
        self._answers = self._server.makefile()
        self.pid = self._answer()

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._answer()
            self._answers.close()
            self._server.close()
        return self.returncode

    def _answer(self):
        line = self._answers.readline()
        assert line, "the process that is to fork others has ended"
        return int(line)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """What it printed and complained of, at its end."""
        self.wait(timeout)
        if self._said is None:
            self._said = tuple(map(_text, self._kept))
        return self._said


def _pipe():
    """Both ends of a pipe, as files."""
    read, write = os.pipe()
    return os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)


def _text(file):
    """What is in a file, as text; closes it."""
    with file:
        file.seek(0)
        return file.read().decode()


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
    with tempfile.TemporaryFile() as stdin:
        stdin.write(input)
        stdin.seek(0)
        done = play(command[-1:], None, program="python", stdin=stdin)
    done.stdout, done.stderr = done.stdout.encode(), done.stderr.encode()
    return done


def flwr_command(command, cwd, env, **_):
    """Does what `subprocess.run` does with a command of Flower's, and always captures text."""
    return play(command[1:], None, program="flwr", cwd=cwd, env=env)


def warm_sites():
    """What `shufl.deploy.rehearse` needs of `subprocess`; a process of a site is a fork.

    One that is to become another account is none.
    """

    def begin(command, **options):
        if "preexec_fn" in options:
            return subprocess.Popen(command, **options)
        log, given = options["stdout"], {name: options[name] for name in ("cwd", "env")}
        given |= {"program": Path(command[0]).name, "process_group": options["process_group"]}
        return Warm(command[1:], stdout=log, stderr=log, **given)

    return SimpleNamespace(
        Popen=begin,
        DEVNULL=subprocess.DEVNULL,
        STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def warm_shufflers():
    """What `shufl.shuffler.child_process` needs of `subprocess`; a shuffler it starts is a fork.

    It is none where the environment has `COLD`, or a PYTHONPATH, which may change it.
    """

    def begin(command, **options):
        env = options["env"]
        if env.keys() & {*COLD, "PYTHONPATH"}:
            return subprocess.Popen(command, **options)
        arguments = command[command.index("shuffler") :]
        given = {name: options[name] for name in ("env", "process_group", "stderr")}
        return Warm(arguments, piped=True, **given)

    return SimpleNamespace(
        Popen=begin, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
