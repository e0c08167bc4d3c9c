"""`shufl metrics`: what a site's own operator watches, as text for Prometheus.

It is read from the site's files at each call. So no process of the site serves it, and nobody sees
it but who may read the files: in particular not the server's code on a node.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from shufl.clients.device import read_device, runs_of
from shufl.deploy.run_status import health_of, newest_run, status_of
from shufl.deploy.site_files import NodeSite, ServerSite, load_site, role_of
from shufl.shuffler.keys import read_certificate, renew_from


def metrics_of(folder: Path) -> str:
    """Gauges of a site, in Prometheus' text format.

    Raises:
        ConfigError, OSError, ValueError: a file of the site is missing or damaged.
    """
    gauges = _Gauges()
    gauges.add("shufl_disk_free_bytes", "Free on the site's disk", shutil.disk_usage(folder).free)
    for path in sorted((folder / "keys").glob("*.pem")):
        certificate = read_certificate(path)
        for name, about, moment in (
            ("shufl_certificate_end_seconds", "ends", certificate.not_valid_after_utc),
            ("shufl_certificate_renew_seconds", "should be renewed", renew_from(certificate)),
        ):
            about = f"When a certificate {about}, in seconds since 1970"
            gauges.add(name, about, moment.timestamp(), certificate=path.stem)
    role = role_of(folder)
    if role == "server":
        _of_server(folder, gauges)
    if role == "node":
        _of_node(folder, gauges)
    return generate_latest(gauges.registry).decode()


class _Gauges:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Gauge] = {}

    def add(self, name: str, about: str, value: float, **labels: str) -> None:
        if name not in self._made:
            self._made[name] = Gauge(name, about, list(labels), registry=self.registry)
        gauge = self._made[name]
        (gauge.labels(**labels) if labels else gauge).set(value)


def _of_server(folder: Path, gauges: _Gauges) -> None:
    """The shufflers; the newest run, if there is one."""
    site = load_site(folder / "server.toml", ServerSite)
    add = gauges.add
    for address in site.shufflers:
        well = not health_of(address, site.credentials)
        add("shufl_shuffler_up", "1 for a shuffler that serves", well, shuffler=address)
    if (run := newest_run(folder / "runs")) is None:
        return
    status = status_of(run, None)
    state = status.state
    add("shufl_run_running", "1 while the newest run goes on", state == "running")
    add("shufl_run_interrupted", "1 if it is to be resumed", state == "interrupted")
    add("shufl_run_rounds", "Its rounds that are spent", status.rounds)
    add("shufl_run_rounds_allowed", "Rounds that its budget allows", status.allowed)
    add("shufl_run_epsilon", "ε spent, by the halting accountant", status.epsilon)
    add("shufl_run_epsilon_budget", "Its budget", status.target)
    for node in status.nodes:
        in_trouble = bool(node["trouble"])
        add("shufl_node_silent", "1 for a node in trouble", in_trouble, node=node["name"])


def _of_node(folder: Path, gauges: _Gauges) -> None:
    """What the owner's ledger says."""
    site = load_site(folder / "node.toml", NodeSite)
    path, limits = read_device(Path(site.device))
    runs = runs_of(path, limits)
    charged = sum(limits.charge(run) for run in runs)
    gauges.add("shufl_device_epsilon", "ε charged to the owner, over all runs", charged)
    gauges.add("shufl_device_epsilon_most", "The most that the owner accepts", limits.most_epsilon)
    gauges.add("shufl_device_runs", "Runs that were offered", len(runs))
    offered = sum(run.offered for run in runs)
    gauges.add("shufl_device_rounds", "Rounds that were offered", offered)
