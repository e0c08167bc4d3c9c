"""This module makes Ray's workers forks of a process that has imported everything.

Ray starts Python twice for each worker, which imports Ray twice, then Flower and torch: that takes
six seconds of a processor. Here Ray starts this file, which asks `serve` for a fork that plays the
worker, and ends when the fork ends.
"""

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from multiprocessing import connection, parent_process
from pathlib import Path

_ADDRESS = "TEST_RAY_WORKERS"
"""The variable with the path of the socket where `serve` listens."""


def variables():
    """Ray reads these when it is imported: they name no job, and a process that outlives it."""
    return {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}


def first_lines(address):
    """A program that begins with these lines starts a Ray which gets its workers from `serve`."""
    return (
        "import os\n"
        "from ray._private import ray_constants\n"
        f"os.environ[{_ADDRESS!r}] = {str(address)!r}\n"
        f"ray_constants.SETUP_WORKER_FILENAME = {__file__!r}\n"
    )


def serve(address, found):
    """Forks a worker for each call at a socket, until its process group is killed or pytest ends.

    `found` is where a process that has just begun finds modules.
    """
    os.setpgid(0, 0)
    sys.path[:] = found
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        Path(f"{address}.new").rename(address)
        while listener in connection.wait([listener, parent_process().sentinel]):
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _play(caller)
            caller.close()


def _play(caller):
    """Does what Ray's program for a worker's setup does before it becomes the worker."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, outputs, *_ = socket.recv_fds(caller, 1, 2)
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
            os.close(output)
        arguments, folder, environment = json.loads(caller.makefile().readline())
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for_setup = "--language=", "--serialized-runtime-env-context="
        sys.argv = [each for each in arguments if not each.startswith(for_setup)]
        program = sys.argv[0]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_ADDRESS])
        socket.send_fds(server, [b"."], [1, 2])
        call = sys.argv[1:], str(Path.cwd()), dict(os.environ)
        server.sendall(json.dumps(call).encode() + b"\n")
        server.recv(1)  # nothing comes: the worker's end of the connection is closed with it
