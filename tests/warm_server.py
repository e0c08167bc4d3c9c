"""The process that has imported everything: it forks a child for each call at a socket (`warm`).

A call is a JSON object with `program`, `arguments`, `cwd`, `env` and `process_group`; with it come
the files that the child has as standard input, output and error. The answers are the child's
process id and, when it has ended, its exit code. The server ends with the pytest process that
started it.
"""

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing import connection
from pathlib import Path

_FOUND = list(sys.path)
"""Where a process that has just begun finds modules."""

_IMPORTED = [
    "shufl",  # sets variables that Flower and Ray read when they are imported
    "flwr.simulation",
    "flwr.cli.app",
    "flwr.superlink.cli.flower_superlink",
    "flwr.supernode.cli.flower_supernode",
    "flwr.supercore.cli.flower_superexec",
    "ray",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "matplotlib.backends.backend_agg",
    "tiny_prices",
    "warm",
]
"""And every module of shufl: a command imports what it needs when it needs it."""

_PROGRAMS = {
    "shufl": "shufl.cli:main",
    "flwr": "flwr.cli.app:app",
    "flower-superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "shufl-supernode": "shufl.deploy.supernode:main",
    "flower-superexec": "flwr.supercore.cli.flower_superexec:flower_superexec",
    "python": f"{__name__}:_python",
    "ray worker": f"{__name__}:_ray_worker",
}


def _serve(listener):
    children = {}
    while True:
        ready = connection.wait([listener, 0, *children])
        if 0 in ready:
            return
        for each in ready:
            if each is not listener:
                pid, caller = children.pop(each)
                os.close(each)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), caller:
                    caller.sendall(b"%d\n" % code)
                continue
            caller, _ = listener.accept()
            if (pid := os.fork()) == 0:
                listener.close()
                for other, (_, its_caller) in children.items():
                    os.close(other)
                    its_caller.close()
                code = 1
                try:
                    code = _played(caller)
                finally:
                    os._exit(code)
            children[os.pidfd_open(pid)] = pid, caller


def _played(caller):
    """Plays the program that a caller asks for, in this fork; its exit code."""
    try:
        _, files, *_ = socket.recv_fds(caller, 1, 3)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        with caller, caller.makefile() as lines:
            call = json.loads(lines.readline())
            if call["process_group"] is not None:
                os.setpgid(0, call["process_group"])
            caller.sendall(b"%d\n" % os.getpid())
        os.chdir(call["cwd"])
        os.environ.clear()
        os.environ.update(call["env"])
        tempfile.tempdir = None  # as the variables say
        path = call["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, path), *_FOUND]
        sys.argv = [call["program"], *call["arguments"]]
        module, _, function = _PROGRAMS[call["program"]].partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        finally:
            threading._shutdown()
            atexit._run_exitfuncs()  # both of which a forked process leaves out
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _python():
    """What `python -c CODE` does."""
    exec(sys.argv[1], {"__name__": "__main__"})


def _ray_worker():
    """Does what Ray's program for a worker's setup does before it becomes the worker."""
    for_setup = "--language=", "--serialized-runtime-env-context="
    sys.argv[:] = [each for each in sys.argv[1:] if not each.startswith(for_setup)]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _main():
    # Ray reads these when it is imported: they name no job, and a process that outlives it.
    os.environ |= {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getppid())}
    sys.path.insert(0, str(Path(__file__).parent))
    for name in _IMPORTED:
        importlib.import_module(name)
    for _, name, _ in pkgutil.walk_packages(sys.modules["shufl"].__path__, "shufl."):
        importlib.import_module(name)
    sys.path[:] = _FOUND
    from shufl.shuffler import child_process
    from warm import warm_shufflers

    child_process.subprocess = warm_shufflers()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
