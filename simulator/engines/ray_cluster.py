"""The Ray of a run: the cluster at RAY_ADDRESS, one that this program has started, or our own."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from shufl.learning.config import Config
from shufl.learning.your_code import one_line
from shufl.protocol.text import logs_to
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed

NO_GPU = 'simulation.device must be "cpu" in this Ray, which has no GPU, got "cuda"'

_CONNECT_SECONDS = 10.0  # for a cluster to answer
_ANY_NODE = {"CPU": 1e9, "GPU": 1e9}


def check_cpus(key: str, asked: float, gpus: int = 0) -> None:
    """Refuses more CPUs than a node of Ray has, beside a GPU if `gpus`: Ray would wait for ever.

    Raises:
        ConfigError: with the key; or there is no GPU; or no Ray answers.
    """
    fit = [each.get("CPU", 0.0) for each in nodes_of_ray() if each.get("GPU", 0.0) >= gpus]
    if gpus and not fit:
        raise ConfigError(NO_GPU)
    if asked > (most := max(fit, default=0.0)):
        which = f"largest node{' with a GPU' * gpus}"
        raise ConfigError(
            f"{key} must be at most {most:g}, the CPUs of Ray's {which}, got {asked:g}"
        )


def nodes_of_ray() -> list[dict[str, float]]:
    """What each node has by resource, of the Ray to which this process is or would be connected.

    With an autoscaler, or by Ray's client protocol, nodes are not known: then it is one that has
    more than anybody needs.

    Raises:
        ConfigError: no Ray answers at RAY_ADDRESS.
    """
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    control_store = "" if connected else check_cluster()
    if not (connected or control_store) and _given_address() == "local":
        import torch

        return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]
    from shufl.vendor_internals import nodes_of_cluster

    nodes = nodes_of_cluster(control_store)
    return [_ANY_NODE] if nodes is None else nodes


def check_cluster() -> str:
    """Refuses a RAY_ADDRESS where no Ray answers.

    Returns the address of its control store; "" for a Ray of our own, or by the client protocol.

    Raises:
        ConfigError: none does.
    """
    address = _given_address()
    if address == "local":
        return ""
    from shufl.vendor_internals import answering_ray

    by_client, _, server = address.rpartition("://")  # "ray://": by Ray's client protocol
    try:
        if address != "auto" and not re.fullmatch(r".+:\d{1,5}", server):
            raise ValueError("it must be HOST:PORT, ray://HOST:PORT, auto or local")
        server = answering_ray(server, bool(by_client), _CONNECT_SECONDS)
    except (ConnectionError, ValueError) as error:
        why = one_line(error).partition(".")[0]
        raise ConfigError(
            f"RAY_ADDRESS must name a running cluster, got {address}: {why}"
        ) from error
    return "" if by_client else server


def _given_address() -> str:
    """What RAY_ADDRESS says; without it Ray would look for a cluster of somebody else's here."""
    return os.environ.get("RAY_ADDRESS") or "local"


_OWN_RAY = """
import signal, sys, ray
ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # in order, which Ray's does not
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()  # until whoever started this has ended
"""


class OwnRay:
    """A Ray of this program's own, in a child process, which starts while other work is done.

    The child ends when this process does, even if that is killed, and Ray with it.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the child, if it was not started before; Ray then starts by itself."""
        self._child = self._child or subprocess.Popen(
            [sys.executable, "-P", "-c", _OWN_RAY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # Ctrl-C at the terminal is for the run
        )

    def address(self) -> str:
        """Waits until the Ray that was started is ready.

        Raises:
            EngineFailed: it does not start, as on a machine so busy that it takes half a minute.
        """
        assert self._child is not None and self._child.stdout is not None
        line = ""
        for line in self._child.stdout:
            if line.startswith("address "):
                return line.split()[1]
        raise EngineFailed(f"Ray does not start: {line.strip()}")

    def stop(self) -> None:
        """Ends the child and its Ray, however far they are."""
        if self._child is not None:
            self._child.terminate()
            self._child.communicate()
            self._child = None


_own_ray = OwnRay()


@contextmanager
def early_ray(config: Config) -> Iterator[None]:
    """Has the Ray that a run will need start while its configuration is still tried."""
    keys = config.simulation
    if (keys.engine == "flower" or keys.workers > 1) and _given_address() == "local":
        _own_ray.start()
    try:
        yield
    finally:
        _own_ray.stop()


@contextmanager
def running_ray(log_file: Path) -> Iterator[None]:
    """Connects to the cluster at RAY_ADDRESS if that is set, else to a Ray of our own.

    A Ray that this program is connected to already, as in a notebook, is used as it is and goes on.
    What another would print among a run's own lines, and what its workers print, goes to a file.

    Raises:
        ConfigError: no Ray answers at RAY_ADDRESS.
        EngineFailed: Ray does not start.
    """
    import ray

    if ray.is_initialized():
        with mock.patch.object(ray, "shutdown"):  # which Flower's engine calls at its end
            yield
        return
    from shufl.vendor_internals import worker_output_to

    check_cluster()
    address = _given_address()
    with logs_to(log_file, "ray"), worker_output_to(log_file), ExitStack() as stack:
        if address == "local":
            stack.callback(_own_ray.stop)
            _own_ray.start()
            address = _own_ray.address()
        stack.callback(ray.shutdown)
        try:
            with _handlers_kept():
                ray.init(address, logging_level=logging.WARNING, log_to_driver="://" not in address)
        except Exception as error:  # Ray's own has no class of its own
            raise EngineFailed(f"Ray does not start: {one_line(error)}") from error
        yield


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Puts our handlers back after Ray's, which print a stack trace; holds signals until then."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
