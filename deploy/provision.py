"""`shufl provision`: one folder for each site of a deployment, and certificates for what they ask.

It may be run again at any time, and makes what is missing: a new node's folder, a certificate for
a request that has come. What is there already stays as it is.
"""

from __future__ import annotations

import importlib.resources
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from shufl.accounting import PrivacyPlan
from shufl.clients import DeviceLimits
from shufl.clients.device import RunOffered
from shufl.deploy.enrolment import AGREED_FILE, Approve, Enrolled, Enrolment
from shufl.deploy.plan import (
    Deployment,
    NodeEntry,
    Process,
    ShufflerEntry,
    node_processes,
    run_process,
    server_process,
    shuffler_process,
)
from shufl.deploy.server_app import deployed_experiment
from shufl.deploy.sites import ServerSite
from shufl.learning.config import dumps, load
from shufl.learning.data.features import data_digest
from shufl.learning.section import ConfigError, is_carried
from shufl.protocol.plan import AccountantName
from shufl.protocol.rounding import rounded_down
from shufl.results.experiment import Experiment
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import replace_file

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True)
class Site:
    """One folder that `provision` makes.

    Attributes:
        name: of the site and its folder.
        files: what is in it, by name.
        requests: names of the requests that it makes, with what their certificates are for.
        processes: what it runs.
    """

    name: str
    files: dict[str, str]
    requests: tuple[tuple[str, Role], ...]
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Provisioned:
    """What a call of `provision` did.

    Attributes:
        sites: all of them.
        enrolled: what became of keys.
        made: sites whose folders are new.
        kept: files that would be others by now, and stay as they are.
        short: by shuffler, how many users its nodes speak for, where no release is made of so few.
    """

    sites: list[Site]
    enrolled: Enrolled
    made: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    short: dict[str, int] = field(default_factory=dict)


def provision(
    deployment: Deployment,
    base: Path,
    out: Path,
    approve: Approve,
    *,
    days: float = 365,
    forget: Sequence[str] = (),
    in_place: bool = False,
) -> Provisioned:
    """Makes what is missing of a deployment's folders, and signs for the keys that are approved.

    The configuration's path is relative to `base`, where the deployment's file is. `out` gets a
    folder for each site, and the two authorities. Certificates are valid for at most `days`. The
    keys of the names in `forget` are strangers' from now on, as if they had never come. With
    `in_place` the sites run in these folders, and not in that of the deployment's file.
    """
    experiment = experiment_of(deployment, base)
    if experiment.plan.mixing == "sum" and not deployment.trusted_nodes:
        raise ConfigError(
            "trusted_nodes must be true in the deployment's file with privacy.mixing sum, where "
            "one cheating node can spoil a round and nobody can look at its report, got false"
        )
    if (users := sum(node.users for node in deployment.nodes)) > experiment.plan.users:
        raise ConfigError(
            f"the nodes speak for {users} users, data.users of the configuration is "
            f"{experiment.plan.users}"
        )
    enrolment = Enrolment(deployment, out, approve, days)
    for name in forget:
        enrolment.forget(name)
    sites = _Sites(deployment, experiment, base, out if in_place else None).all()
    crowds = dict.fromkeys((each.name for each in deployment.shufflers), 0)
    for node in deployment.numbered.values():
        crowds[deployment.shuffler_names[node.name]] += node.users
    least = experiment.plan.fewest_present
    short = {name: users for name, users in crowds.items() if users < least}
    done = Provisioned(sites, enrolment.done, short=short)
    for site in sites:
        folder = out / site.name
        if not folder.exists():
            done.made.append(site.name)
        for name, text in site.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                replace_file(path, text.encode())
            elif path.read_text(encoding="utf-8") != text:
                done.kept.append(f"{site.name}/{name}")
        enrolment.sign(site.name, site.requests)
    enrolment.tell_server()
    enrolment.look_back()
    return done


def experiment_of(deployment: Deployment, base: Path) -> Experiment:
    """The run, with everything decided."""
    path = base / deployment.config
    config = load(str(path) if path.exists() else deployment.config)
    return deployed_experiment(config, len(deployment.shufflers))


LEAST_CONNECTIONS = 64  # from one address, behind which there may be many nodes


class _Sites:
    """Says what is in every site's folder.

    `out` holds the folders if the sites run on this machine, else it is None.
    """

    def __init__(
        self, deployment: Deployment, experiment: Experiment, base: Path, out: Path | None
    ):
        self._deployment, self._experiment = deployment, experiment
        self._base, self._out = base, out

    def all(self) -> list[Site]:
        """Server, shufflers and nodes."""
        shufflers = map(self._shuffler, self._deployment.shufflers, self._deployment.addresses)
        return [self._server(), *shufflers, *map(self._node, self._deployment.numbered)]

    def _server(self) -> Site:
        server, name = self._deployment.server, self._deployment.name
        folder = self._folder("server")
        connection = {
            "address": f"127.0.0.1:{server.local_port}",
            "root-certificates": f"{folder}/keys/flower-authority.pem",
        }
        told = server.model_dump(include={"round_timeout", "patience"}) | {
            "shufflers": self._deployment.addresses,
            "certificate": "keys/server.pem",
            "nodes": AGREED_FILE,
            "digest": self._digest(*self._deployment.nodes),
        }
        about = {"host": server.host, "port": server.port, "local_port": server.local_port}
        listen, accounts = _listen(server.host), "shufl, www-data"
        files = self._modules() | {
            "run.toml": self._run(),
            "server.toml": _toml("server.toml", ServerSite(**told).model_dump()),
            "flower/config.toml": tomli_w.dumps({"superlink": {"default": name, name: connection}}),
            "nginx.conf": _template("nginx.conf", folder=folder, listen=listen, **about),
            "nftables.conf": _template("nftables.conf", port=server.local_port, accounts=accounts),
        }
        requests = (("server", Role.SERVER), ("superlink", Role.SHUFFLER))
        site = Site("server", files, requests, (server_process(server),))
        return self._complete(site, "server.md", run_process(name, self._round_seconds), **about)

    def _shuffler(self, entry: ShufflerEntry, address: str) -> Site:
        nodes = len(self._deployment.nodes)
        config = {
            "listen": f"127.0.0.1:{entry.local_port}",
            "directory": "state",
            "log_file": "shuffler.log",
            "tls": {
                "certificate": f"keys/{entry.name}.pem",
                "key": f"keys/{entry.name}.key",
                "authority": "keys/authority.pem",
                "revoked": "revoked",
            },
            "limits": {"calls": max(256, 4 * nodes), "uploads": max(24, 2 * nodes)},
        }
        nginx = _template(
            "stream.conf",
            listen=_listen(entry.host),
            port=entry.port,
            local_port=entry.local_port,
            most=max(LEAST_CONNECTIONS, 2 * nodes),
        )
        plan = self._experiment.plan
        text = _toml(
            "shuffler.toml",
            config,
            blankets=rounded_down(plan.shuffler_blankets, 6),
            batch=plan.minimum_batch,
            sum_noise=rounded_down(plan.noise_of_batch, 6),
            rounds=plan.rounds,
        )
        files = {"shuffler.toml": text, "revoked": "", "nginx.conf": nginx}
        site = Site(entry.name, files, ((entry.name, Role.SHUFFLER),), (shuffler_process(),))
        return self._complete(site, "shuffler.md", address=address)

    def _node(self, number: int) -> Site:
        nodes, form = self._deployment.nodes, self._experiment.form
        if is_carried(form.task):
            raise ConfigError(
                "data.task must be a name or module:callable on real machines, got a Task that the "
                "dataset holds"
            )
        entry, superlink = nodes[number], self._deployment.server_address
        about = {
            "number": number,
            "users": entry.users,
            "config": "run.toml",
            **{key: value for key, value in asdict(form).items() if key != "task"},
            "data": entry.data,
            "first_user": sum(each.users for each in nodes[:number]),
            "device": "device.toml",
            "socket": "node.sock",
            "shufflers": list(self._deployment.addresses),
            "certificate": f"keys/{entry.name}.pem",
            "digest": self._digest(entry),
            "superlink": superlink,
        }
        files = self._modules(entry.data) | {
            "run.toml": self._run(),
            "node.toml": _toml("node.toml", about),
            "device.toml": _device(self._experiment.plan, self._experiment.halting_round),
            "nftables.conf": _template("nftables.conf", port=entry.port, accounts="shufl-app")
            + _template("nftables-app.conf", port=entry.port),
        }
        requests = ((entry.name, Role.NODE),)
        processes = node_processes(entry, superlink, self._round_seconds)
        site = Site(entry.name, files, requests, processes)
        return self._complete(site, "node.md")

    def _folder(self, name: str) -> str:
        return self._deployment.folder if self._out is None else str(self._out / name)

    def _modules(self, *others: str) -> dict[str, str]:
        """The modules beside the deployment's file that `module:callable` names, by file name."""
        named = *self._experiment.config.own_code, *others
        files = {name.partition(":")[0].replace(".", "/") + ".py" for name in named if ":" in name}
        return {
            file: (self._base / file).read_text(encoding="utf-8")
            for file in sorted(files)
            if (self._base / file).is_file()
        }

    def _digest(self, *nodes: NodeEntry) -> str:
        """The data's digest, if one of these nodes has simulated data; otherwise empty."""
        data, simulated = self._experiment.config.data, (node.data == "simulated" for node in nodes)
        return data_digest(data.dataset, data.features) if any(simulated) else ""

    def _run(self) -> str:
        return _template("run.toml", content=dumps(self._experiment.config))

    @property
    def _round_seconds(self) -> float:
        window = self._experiment.plan.window
        assert window is not None
        return window.seconds

    def _complete(self, site: Site, readme: str, *more: Process, **about: object) -> Site:
        """The site with its README and a service unit for each process and for `more`."""
        folder = self._folder(site.name)
        prefix = Path(self._deployment.folder).name
        about |= {"deployment": self._deployment.name, "site": site.name, "folder": folder}
        about |= {"prefix": prefix}
        texts = {"README.md": readme, "install.sh": "install.sh"}
        files = {name: _template(of, **about) for name, of in texts.items()}
        for process in (*site.processes, *more):
            program, *arguments = process.command
            unit = f"{prefix}-{process.name}"
            files[f"{unit}.service"] = _template(
                "unit.service",
                unit=unit,
                about=process.about[0].upper() + process.about[1:],
                user=process.user,
                home=process.home,
                writes=folder if process.user == "shufl" else f"{folder}/{process.home}",
                stop_seconds=f"{process.stop_seconds:.0f}",
                more="\n".join(process.unit),
                after=f" {prefix}-{process.after}.service" if process.after else "",
                command=shlex.join([f"{folder}/.venv/bin/{program}", *arguments]),
                **about,
            )
        return replace(site, files=site.files | files)


def _listen(host: str) -> str:
    if host in _LOOPBACK:
        return "127.0.0.1"
    return "[::]" if ":" in host else "0.0.0.0"


def _device(plan: PrivacyPlan, rounds: int) -> str:
    """The owner's file: as proposed, it accepts this plan, and one run of it."""
    accountant: AccountantName = "blanket" if plan.shuffler_blankets else "local"
    if plan.mixing == "sum":
        accountant = plan.accountant
    limits = DeviceLimits(
        most_epsilon=1.0, delta=plan.delta, accountant=accountant, adjacency=plan.adjacency
    )
    charge = limits.charge(RunOffered(1, "", plan, rounds))
    about = {"ledger": "device.db", "most_epsilon": float(f"{charge * 1.01:.3g}")}
    about |= {"delta": plan.delta, "accountant": accountant, "adjacency": plan.adjacency}
    about |= {"most_rounds": rounds} if rounds > limits.most_rounds else {}
    work_until = 0.0 if plan.window is None else plan.window.work_until
    return _toml("device.toml", about | {"plans": [plan.digest()]}, work_until=f"{work_until:g}")


def _toml(name: str, content: Mapping[str, Any], **values: object) -> str:
    """A site's file, with the comments of its template."""
    return _template(name, content=tomli_w.dumps(content), **values)


def _template(name: str, **values: object) -> str:
    text = importlib.resources.files("shufl.deploy") / "templates" / name
    return string.Template(text.read_text(encoding="utf-8")).substitute(values)
