"""What shufl uses of Flower and Ray that they do not document, or have said that they will remove.

No other file imports such a module; ruff refuses it (`pyproject.toml`). All of it holds for Flower
1.42 and for Ray 2.55, which that Flower pins; `tests/test_packaging.py` fails with any other minor
release. Whoever moves to a newer Flower goes through this file: each part says what it stands
in for, and so what would make it unnecessary.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from flwr.common import serde
from flwr.proto import recorddict_pb2

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

# How a RecordDict becomes bytes, for which Flower has no public call. A deployed node hands
# messages from one of its processes to another.
RecordsMessage = recorddict_pb2.RecordDict
records_to_message, records_from_message = serde.recorddict_to_proto, serde.recorddict_from_proto

_ALIVE = 0  # in Ray's GcsNodeInfo


def run_simulation(
    server_app: ServerApp, client_app: ClientApp, nodes: int, cpus_per_node: float
) -> None:
    """Plays a ServerApp and `nodes` ClientApps on the Ray that this process is connected to.

    Flower 1.42 deprecates `run_simulation` in favour of `flwr run`, which does not fit here. That
    command hands the files of an app to a SuperLink, which outlives the command and loads the app
    in another process. The objects and the Ray of a notebook do not get there; what is called after
    a round, and an interrupt, do not get back. That process calls `_run_simulation`, in the module
    `flwr.simulation.run_simulation`, as this function does. When Flower removes the one, call the
    other, with the same arguments and an `exit_event`.
    """
    from flwr.simulation import run_simulation

    config: dict[str, Any] = {"client_resources": {"num_cpus": cpus_per_node, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, nodes, backend_config=config)


def answering_ray(address: str, by_client: bool, seconds: float) -> str:
    """Gives the address of a cluster's control store, once it has answered.

    Without a cluster `ray.init` tries for minutes. With `by_client` the address is a server of
    Ray's client protocol, and only its port is tried.

    Raises:
        ConnectionError, ValueError: no Ray answers at this address within so many seconds.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import canonicalize_bootstrap_address
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    if not by_client:
        address = canonicalize_bootstrap_address(address) or address
    try:
        with init_grpc_channel(address) as channel:
            if by_client:
                grpc.channel_ready_future(channel).result(seconds)
            else:
                control_store = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
                control_store.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=seconds)
    except (grpc.RpcError, grpc.FutureTimeoutError) as error:
        raise ConnectionError("no Ray answers there") from error
    return address


def nodes_of_cluster(control_store: str) -> list[dict[str, float]] | None:
    """The resources of each node of a cluster; None if they are not known.

    They are not known through Ray's client protocol, or if an autoscaler may add nodes, which
    `ray.nodes` does not list. `control_store` is the address of a cluster; "" is the one that this
    process is connected to.
    """
    from ray._private import services, worker

    if control_store:
        store = services.GcsClient(control_store)
    else:
        store = getattr(worker.global_worker, "gcs_client", None)  # none by the client protocol
    if store is None:
        return None
    said = json.loads(store.internal_kv_get(b"__autoscaling_status", None) or "{}")
    kinds = (said.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    scales = any(kind != f"node_{node}" for node, kind in kinds.items())  # each is its own, else
    if scales or store.internal_kv_get(b"__autoscaler_v2_enabled", b"__autoscaler") == b"1":
        return None
    nodes = store.get_all_node_info().values()
    return [dict(node.resources_total) for node in nodes if node.state == _ALIVE]


def worker_output_to(path: Path) -> AbstractContextManager[Any]:
    """Has what Ray's workers print go to a file; Ray would print it among our own lines."""
    from ray._private import worker

    def write(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data["pid"] != "autoscaler":  # which says every five seconds that nothing has changed
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"({data['pid']}) {line}\n" for line in data["lines"])

    return mock.patch.object(worker, "print_to_stdstream", write)
