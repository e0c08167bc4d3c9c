"""`shufl metrics`: what a site's own operator watches, as text for Prometheus.

It is read from the site's files at each call. So no process of the site serves it, and nobody sees
it but who may read the files: in particular not the server's code on a node.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from shufl.clients.device_ledger import read_device, runs_of
from shufl.deploy.run_status import health_of, newest_run, status_of
from shufl.deploy.server_site import ServerSite
from shufl.deploy.site_files import NodeSite, load_site, role_of
from shufl.shuffler.credentials import read_certificate, renew_from

_Sample = tuple[str, str, float, dict[str, str]]
"""A metric's name, what it tells, its value and its labels."""


def metrics_of(folder: Path) -> str:
    """Gauges of a site, in Prometheus' text format.

    Raises:
        ConfigError, OSError, ValueError: a file of the site is missing or damaged.
    """
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    samples, role = list(_of_every_site(folder)), role_of(folder)
    if role in _OF_ROLE:
        samples += _OF_ROLE[role](folder)
    for name, about, value, labels in samples:
        if name not in gauges:
            gauges[name] = Gauge(name, about, list(labels), registry=registry)
        (gauges[name].labels(**labels) if labels else gauges[name]).set(value)
    return generate_latest(registry).decode()


def _of_every_site(folder: Path) -> Iterator[_Sample]:
    """The disk and the certificates."""
    free = shutil.disk_usage(folder).free
    yield "shufl_disk_free_bytes", "Free on the site's disk", free, {}
    for path in sorted((folder / "keys").glob("*.pem")):
        certificate, label = read_certificate(path), {"certificate": path.stem}
        for name, about, moment in (
            ("shufl_certificate_end_seconds", "ends", certificate.not_valid_after_utc),
            ("shufl_certificate_renew_seconds", "should be renewed", renew_from(certificate)),
        ):
            about = f"When a certificate {about}, in seconds since 1970"
            yield name, about, moment.timestamp(), label


def _of_server(folder: Path) -> Iterator[_Sample]:
    """The shufflers; the newest run, if there is one."""
    site = load_site(folder / "server.toml", ServerSite)
    for address in site.shufflers:
        well = not health_of(address, site.credentials)
        serves = "1 for a shuffler that serves; shufl status says why one does not"
        yield "shufl_shuffler_up", serves, well, {"shuffler": address}
    if (run := newest_run(folder / "runs")) is None:
        return
    status = status_of(run, None)
    state = status.state
    yield "shufl_run_running", "1 while the newest run goes on", state == "running", {}
    yield "shufl_run_interrupted", "1 if it is to be resumed", state == "interrupted", {}
    waits = "For how many seconds it has waited for nodes or shufflers; shufl status says for which"
    yield "shufl_run_waiting_seconds", waits, status.waits_seconds, {}
    yield "shufl_run_rounds", "Its rounds that are spent", status.rounds, {}
    yield "shufl_run_rounds_allowed", "Rounds that its budget allows", status.allowed, {}
    yield "shufl_run_epsilon", "ε spent, by the halting accountant", status.epsilon, {}
    yield "shufl_run_epsilon_budget", "Its budget", status.target, {}
    for node in status.nodes:
        silent, label = bool(node["trouble"]), {"node": node["name"]}
        yield "shufl_node_silent", "1 for a node in trouble", silent, label


def _of_node(folder: Path) -> Iterator[_Sample]:
    """What the owner's ledger says."""
    site = load_site(folder / "node.toml", NodeSite)
    path, limits = read_device(Path(site.device))
    charged, most = sum(map(limits.charge, runs_of(path, limits))), limits.most_epsilon
    yield "shufl_device_epsilon", "ε charged to the owner, over all runs", charged, {}
    yield "shufl_device_epsilon_most", "The most that the owner accepts", most, {}


_OF_ROLE = {"server": _of_server, "node": _of_node}
