"""`shufl provision`: one folder for each site of a deployment, and certificates for what they ask.

It may be run again at any time, and makes what is missing: a new node's folder, a certificate for
a request that has come. What is there already stays as it is.
"""

from __future__ import annotations

import importlib.resources
import shlex
import string
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from shufl.accounting import PrivacyPlan
from shufl.accounting.plan import AccountantName
from shufl.clients import DeviceLimits
from shufl.clients.device import RunOffered
from shufl.deploy.plan import (
    Deployment,
    NodeEntry,
    Process,
    node_processes,
    server_process,
    shuffler_process,
)
from shufl.deploy.server_app import deployed_experiment
from shufl.deploy.sites import ServerSite
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority, Request, write_new
from shufl.simulator.config import Config, dumps, load
from shufl.simulator.data.features import data_digest
from shufl.simulator.experiment import Experiment
from shufl.simulator.section import ConfigError

_FOLDER = "@folder@"  # stands for a site's, until it is known
_AGREED = "nodes/agreed.toml"
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
        made: sites whose folders are new.
        signed: requests that were signed.
        waiting: requests that have not come.
        kept: files that would be others by now, and stay as they are.
    """

    made: tuple[str, ...]
    signed: tuple[str, ...]
    waiting: tuple[str, ...]
    kept: tuple[str, ...]


def provision(deployment: Deployment, base: Path, out: Path, in_place: bool = False) -> Provisioned:
    """Makes what is missing of a deployment's folders.

    The configuration's path is relative to `base`, where the deployment's file is. `out` gets a
    folder for each site, and the two authorities. With `in_place` the sites run in these folders,
    and not in /srv/shufl of their machines.

    Raises:
        ConfigError: the configuration cannot be run, or does not fit the sites.
    """
    experiment = experiment_of(deployment, base)
    if (users := sum(node.users for node in deployment.nodes)) > experiment.plan.users:
        raise ConfigError(
            f"the nodes speak for {users} users, data.users of the configuration is "
            f"{experiment.plan.users}"
        )
    parties, flower = (_authority(out / name) for name in ("authority", "authority-flower"))
    made, signed, waiting, kept = [], [], [], []
    for site in sites_of(deployment, experiment, base, out if in_place else None):
        folder = out / site.name
        keys = folder / "keys"
        if not folder.exists():
            made.append(site.name)
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in site.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != text:
                kept.append(f"{site.name}/{name}")
        _put(keys / "authority.pem", parties.certificate)
        _put(keys / "flower-authority.pem", flower.certificate)
        for name, role in site.requests:
            asked, certificate = keys / f"{name}.csr", keys / f"{name}.pem"
            if certificate.exists():
                continue
            if not asked.exists():
                waiting.append(f"{site.name}/keys/{name}.csr")
                continue
            authority = flower if name == "superlink" else parties
            _sign(asked, certificate, role, deployment, authority)
            signed.append(name)
    _tell_server_of_nodes(deployment, out / "server" / Path(_AGREED).parent)
    return Provisioned(tuple(made), tuple(signed), tuple(waiting), tuple(kept))


def sites_of(
    deployment: Deployment, experiment: Experiment, base: Path, out: Path | None
) -> list[Site]:
    """Every site, with the files that it gets; `out` is where all of them run, if it is here."""
    sites = [
        _server(deployment, experiment, base),
        *(_shuffler(deployment, number) for number in range(len(deployment.shufflers))),
        *(_node(deployment, number, experiment, base) for number in deployment.numbered),
    ]
    return [_filled(site, "/srv/shufl" if out is None else str(out / site.name)) for site in sites]


def _filled(site: Site, folder: str) -> Site:
    files = {name: text.replace(_FOLDER, folder) for name, text in site.files.items()}
    return replace(site, files=files)


def experiment_of(deployment: Deployment, base: Path) -> Experiment:
    """The run, with everything decided.

    Raises:
        ConfigError: the configuration cannot be run.
    """
    path = base / deployment.config
    config = load(str(path) if path.exists() else deployment.config)
    return deployed_experiment(config, _server_site(deployment))


def _modules(base: Path, config: Config, *others: str) -> dict[str, str]:
    """The modules beside the deployment's file that `module:callable` names, by file name."""
    named = config.data.dataset, config.data.features or "", config.model.name, *others
    files = {name.partition(":")[0].replace(".", "/") + ".py" for name in named if ":" in name}
    return {
        file: (base / file).read_text(encoding="utf-8")
        for file in sorted(files)
        if (base / file).is_file()
    }


def _digest(experiment: Experiment, *nodes: NodeEntry) -> str:
    """Of the data, where one of the nodes holds a share of them."""
    data, simulated = experiment.config.data, any(node.data == "simulated" for node in nodes)
    return data_digest(data.dataset, data.features) if simulated else ""


def _server_site(deployment: Deployment) -> ServerSite:
    server = deployment.server
    return ServerSite(
        shufflers=deployment.addresses,
        certificate="keys/server.pem",
        nodes=_AGREED,
        least_nodes=server.least_nodes,
        round_timeout=server.round_timeout,
        patience=server.patience,
    )


def _server(deployment: Deployment, experiment: Experiment, base: Path) -> Site:
    server, name = deployment.server, deployment.name
    connection = {
        "superlink": {
            "default": name,
            name: {
                "address": f"127.0.0.1:{server.local_port}",
                "root-certificates": f"{_FOLDER}/keys/flower-authority.pem",
            },
        }
    }
    processes = (server_process(server),)
    files = _modules(base, experiment.config) | {
        "run.toml": dumps(experiment.config),
        "server.toml": tomli_w.dumps(
            _server_site(deployment).model_dump()
            | {"digest": _digest(experiment, *deployment.nodes)}
        ),
        "flower/config.toml": tomli_w.dumps(connection),
    }
    requests = (("server", Role.SERVER), ("superlink", Role.SHUFFLER))
    about = {"host": server.host, "port": server.port, "local_port": server.local_port}
    nginx = _template("nginx.conf", folder=_FOLDER, listen=_listen(server.host), **about)
    accounts = _template("nftables.conf", port=server.local_port, accounts="shufl, www-data")
    files |= {"nginx.conf": nginx, "nftables.conf": accounts}
    site = Site("server", files, requests, processes)
    return _complete(site, deployment, "server.md", **about)


def _listen(host: str) -> str:
    return "127.0.0.1" if host in _LOOPBACK else "0.0.0.0"


_LEAST_CONNECTIONS = 64  # from one address, behind which there may be many nodes


def _shuffler(deployment: Deployment, number: int) -> Site:
    entry = deployment.shufflers[number]
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
        "limits": {"streams": max(24, 4 * len(deployment.nodes))},
    }
    nginx = _template(
        "stream.conf",
        listen=_listen(entry.host),
        port=entry.port,
        local_port=entry.local_port,
        most=max(_LEAST_CONNECTIONS, 2 * len(deployment.nodes)),
    )
    files = {"shuffler.toml": tomli_w.dumps(config), "revoked": "", "nginx.conf": nginx}
    site = Site(entry.name, files, ((entry.name, Role.SHUFFLER),), (shuffler_process(),))
    return _complete(site, deployment, "shuffler.md", address=deployment.addresses[number])


def _node(deployment: Deployment, number: int, experiment: Experiment, base: Path) -> Site:
    entry, plan = deployment.nodes[number], experiment.plan
    about = {
        "number": number,
        "users": entry.users,
        "config": "run.toml",
        "input_shape": list(experiment.dataset.input_shape),
        "classes": experiment.dataset.classes,
        "data": entry.data,
        "first_user": sum(each.users for each in deployment.nodes[:number]),
        "device": "device.toml",
        "socket": "node.sock",
        "shufflers": list(deployment.addresses),
        "certificate": f"keys/{entry.name}.pem",
        "digest": _digest(experiment, entry),
        "superlink": deployment.server_address,
        "reply_after": entry.reply_after,
    }
    files = _modules(base, experiment.config, entry.data) | {
        "run.toml": dumps(experiment.config),
        "node.toml": tomli_w.dumps(about),
        "device.toml": _device(plan, experiment.halting_round),
        "nftables.conf": _template("nftables.conf", port=entry.port, accounts="shufl-flower"),
    }
    processes = node_processes(entry, deployment.server_address)
    site = Site(entry.name, files, ((entry.name, Role.NODE),), processes)
    return _complete(site, deployment, "node.md")


def _device(plan: PrivacyPlan, rounds: int) -> str:
    """The owner's file: as proposed, it accepts this plan, and one run of it."""
    accountant: AccountantName = "blanket" if plan.shuffler_blankets else "local"
    limits = DeviceLimits(
        most_epsilon=1.0, delta=plan.delta, accountant=accountant, adjacency=plan.adjacency
    )
    charge = limits.charge(RunOffered(1, "", plan, rounds))
    about = {"ledger": "device.db", "most_epsilon": float(f"{charge * 1.01:.3g}")}
    about |= {"delta": plan.delta, "accountant": accountant, "adjacency": plan.adjacency}
    return tomli_w.dumps(about | {"plans": [plan.digest()]})


def _complete(site: Site, deployment: Deployment, readme: str, **about: object) -> Site:
    """The site with its README and a service unit for each process."""
    about |= {"deployment": deployment.name, "site": site.name, "folder": _FOLDER}
    files = {"README.md": _template(readme, **about)}
    for process in site.processes:
        unit = f"shufl-{process.name}"
        files[f"{unit}.service"] = _template(
            "unit.service",
            unit=unit,
            about=process.about[0].upper() + process.about[1:],
            user="shufl-flower" if process.name == "supernode" else "shufl",
            command=shlex.join([f"{_FOLDER}/.venv/bin/{process.command[0]}", *process.command[1:]]),
            **about,
        )
    return replace(site, files=site.files | files)


def _template(name: str, **values: object) -> str:
    text = importlib.resources.files("shufl.deploy") / "templates" / name
    return string.Template(text.read_text(encoding="utf-8")).substitute(values)


def _authority(folder: Path) -> Authority:
    """The authority in a folder, made if there is none."""
    try:
        if not (folder / "authority.pem").exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            Authority.create().write(folder)
        return Authority.read(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}") from error


def _sign(
    asked: Path, certificate: Path, role: Role, deployment: Deployment, authority: Authority
) -> None:
    """Signs a request; for what is the deployment's to say, and the name must be the one asked.

    Raises:
        ConfigError: it is no such request.
    """
    name = certificate.stem
    hosts = {each.name: each.host for each in deployment.shufflers}
    hosts["superlink"] = deployment.server.host
    users = {each.name: each.users for each in deployment.nodes}
    try:
        request = Request.read(asked)
        if request.name != name:
            raise ValueError(f"{asked}: a request for {name} is due here, got {request.name}")
        signed = authority.sign(
            request,
            role,
            hosts=sorted({hosts[name], "127.0.0.1", "localhost"}) if role is Role.SHUFFLER else (),
            users=users.get(name, 0),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    write_new(certificate, signed)


def _put(path: Path, content: bytes) -> None:
    """Writes a certificate that every site has; refuses another one that is there.

    Raises:
        ConfigError: there is another.
    """
    if not path.exists():
        path.write_bytes(content)
    elif path.read_bytes() != content:
        raise ConfigError(
            f"{path} is of another authority than the one here: put that one back, or move the "
            "sites' folders away and enrol everybody anew"
        )


def _tell_server_of_nodes(deployment: Deployment, folder: Path) -> None:
    """Puts there which nodes there are by now, and their public keys for Flower."""
    folder.mkdir(exist_ok=True)
    agreed = [
        {"name": node.name, "number": number, "users": node.users}
        for number, node in deployment.numbered.items()
    ]
    (folder / Path(_AGREED).name).write_text(tomli_w.dumps({"nodes": agreed}), encoding="utf-8")
    for node in deployment.nodes:
        theirs, ours = folder.parents[1] / node.name / "keys/flower.pub", f"{node.name}.pub"
        if node.withdrawn:
            (folder / ours).unlink(missing_ok=True)
        elif theirs.exists():
            (folder / ours).write_bytes(theirs.read_bytes())
