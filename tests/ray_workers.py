"""Ray's workers as forks of a process that has imported everything: as `warm` has commands.

Ray starts Python twice for each worker, which imports Ray twice, then Flower and torch: six seconds
of a processor. Here what it starts is this file. It asks `serve` for a fork that plays the worker,
and ends when that ends.
"""

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

_ADDRESS = "TEST_RAY_WORKERS"
"""The variable with the path of the socket where `serve` listens."""


def needed():
    """Variables that Ray reads when it is imported: no job yet, and a process that lives."""
    return {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}


def setup(address):
    """Lines of a program that starts Ray: its workers are those of `serve` there."""
    return (
        "import os\n"
        "from ray._private import ray_constants\n"
        f"os.environ[{_ADDRESS!r}] = {str(address)!r}\n"
        f"ray_constants.SETUP_WORKER_FILENAME = {__file__!r}\n"
    )


def serve(address, found):
    """Listens there, and forks a worker for each call, until it is killed.

    `found` is the path of modules of a process that has just begun.
    """
    sys.path[:] = found
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
        while True:
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _play(caller)
            caller.close()


def _play(caller):
    """What Ray's own program does, which replaces itself by the worker's."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, outputs, *_ = socket.recv_fds(caller, 1, 2)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    arguments, folder, environment = json.loads(caller.makefile().readline())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for_setup = "--language=", "--serialized-runtime-env-context="
    sys.argv = [each for each in arguments if not each.startswith(for_setup)]
    program = sys.argv[0]
    sys.path.insert(0, str(Path(program).parent))
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_ADDRESS])
        socket.send_fds(server, [b"."], [1, 2])
        call = sys.argv[1:], str(Path.cwd()), dict(os.environ)
        server.sendall(json.dumps(call).encode() + b"\n")
        server.recv(1)  # nothing comes: the worker's end of the connection is closed with it
