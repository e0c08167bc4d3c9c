"""What every engine is, and what engines on Ray share."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from shufl.learning.section import ConfigError, one_line
from shufl.protocol.logs import logs_to
from shufl.results.engine import EngineFailed

if TYPE_CHECKING:
    from shufl.learning.config import Config


_CONNECT_SECONDS = 10.0  # for a cluster to answer
_NEW_AUTOSCALER = b"__autoscaler_v2_enabled", b"__autoscaler"
_ALIVE = 0  # in ray's GcsNodeInfo
_ANY_NODE = {"CPU": 1e9, "GPU": 1e9}


def check_draws(config: Config) -> None:
    """Refuses allocation from the operating system's entropy: a resumed run would draw again.

    Raises:
        ConfigError: the plan asks for it.
    """
    if config.privacy.participation == "allocation" and config.seed == "system":
        raise ConfigError(
            "seed must be a number with privacy.participation allocation, so that a "
            'run which is resumed has the same draws, got "system"'
        )


NO_GPU = 'simulation.device must be "cpu" in this Ray, which has no GPU, got "cuda"'


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
    server = "" if connected else check_cluster()
    if not (connected or server) and os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        import torch

        return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]
    from ray._private import services, worker

    gcs = getattr(worker.global_worker, "gcs_client", None)  # none by the client protocol
    if server:
        gcs = services.GcsClient(server)
    if not gcs:
        return [_ANY_NODE]
    said = json.loads(gcs.internal_kv_get(b"__autoscaling_status", None) or "{}")
    kinds = (said.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    scales = any(kind != f"node_{node}" for node, kind in kinds.items())  # each is its own, else
    if scales or gcs.internal_kv_get(*_NEW_AUTOSCALER) == b"1":
        return [_ANY_NODE]
    nodes = gcs.get_all_node_info().values()
    return [dict(node.resources_total) for node in nodes if node.state == _ALIVE]


def check_cluster() -> str:
    """Refuses a RAY_ADDRESS where no Ray answers; Ray itself would try for minutes.

    Returns the address of its control store; "" for a Ray of our own, or by the client protocol.

    Raises:
        ConfigError: none does.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):  # a Ray of our own
        return ""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import canonicalize_bootstrap_address
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    by_client, _, server = address.rpartition("://")  # "ray://": by Ray's client protocol
    try:
        if address != "auto" and not re.fullmatch(r".+:\d{1,5}", server):
            raise ValueError("it must be HOST:PORT, ray://HOST:PORT, auto or local")
        if not by_client:
            server = canonicalize_bootstrap_address(address) or server
        with init_grpc_channel(server) as channel:
            if by_client:
                grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
            else:
                gcs = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
                asks = gcs_service_pb2.CheckAliveRequest()
                gcs.CheckAlive(asks, timeout=_CONNECT_SECONDS)
    except (ConnectionError, ValueError, grpc.RpcError, grpc.FutureTimeoutError) as error:
        asked = isinstance(error, (grpc.RpcError, grpc.FutureTimeoutError))
        why = "no Ray answers there" if asked else one_line(error).partition(".")[0]
        raise ConfigError(
            f"RAY_ADDRESS must name a running cluster, got {address}: {why}"
        ) from error
    return "" if by_client else server


@contextmanager
def running_ray(log_file: Path) -> Iterator[None]:
    """Connects to the cluster at RAY_ADDRESS if that is set, else starts a Ray of our own.

    A Ray that this program has started already, as in a notebook, is used as it is and goes on.
    What another would print among a run's own lines, and what its workers print, goes to a file.

    Raises:
        ConfigError: no Ray answers at RAY_ADDRESS.
        EngineFailed: Ray does not start, as on a machine so busy that it takes half a minute.
    """
    import ray
    from ray._private import utils, worker

    if ray.is_initialized():
        with mock.patch.object(ray, "shutdown"):  # which Flower's engine calls at its end
            yield
        return
    check_cluster()

    def write(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data["pid"] != "autoscaler":  # which says every five seconds that nothing has changed
            with log_file.open("a", encoding="utf-8") as file:
                file.writelines(f"({data['pid']}) {line}\n" for line in data["lines"])

    # Without an address Ray would look for a cluster that somebody else has started here.
    address = os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    options |= {"logging_level": logging.WARNING, "log_to_driver": "://" not in address}
    with (
        logs_to(log_file, "ray"),
        mock.patch.object(worker, "print_to_stdstream", write),  # Ray has no setting for this
        mock.patch.object(utils, "set_sigterm_handler"),  # nor for this: ours stay
        mock.patch.object(worker, "connect", _handlers_kept()(worker.connect)),
    ):
        try:
            ray.init(address, **options)
        except Exception as error:  # Ray's own has no class of its own
            raise EngineFailed(f"Ray does not start: {one_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Puts our handlers back after Ray's, which print a stack trace; holds signals until then."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.getsignal(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
