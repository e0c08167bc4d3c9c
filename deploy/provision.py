"""`shufl provision`: one folder for each site of a deployment, and certificates for what they ask.

It may be run again at any time, and makes what is missing: a new node's folder, a certificate for
a request that has come. Files that are out of date are written again, unless somebody has edited
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from shufl.accounting import PrivacyPlan
from shufl.clients import DeviceLimits
from shufl.clients.device_ledger import RunOffered
from shufl.deploy.acceptance import enough
from shufl.deploy.deployment import Deployment, Process, ShufflerEntry, Site, run_process
from shufl.deploy.enrolment import AGREED_FILE, Approve, Enrolment, Provisioned
from shufl.deploy.server_app import deployed_experiment
from shufl.deploy.server_site import ServerSite
from shufl.deploy.site_templates import CONF_OF, made_of, template
from shufl.learning.config import dumps, load
from shufl.learning.data.features import data_digest
from shufl.learning.data.files import RecordFile
from shufl.learning.data.partition import load_partition
from shufl.learning.your_code import is_carried
from shufl.protocol.plan_fields import AccountantName
from shufl.protocol.text import rounded_down
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import Experiment
from shufl.shuffler.callers import Role


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
    """Makes what is missing or has changed of a deployment, and signs for approved keys.

    The configuration's path is relative to `base`, where the deployment's file is. `out` gets a
    folder for each site, and the two authorities. Certificates are valid for at most `days`. The
    keys of the names in `forget` are strangers' from now on, as if they had never come. With
    `in_place` the sites run in these folders, and not in that of the deployment's file.
    """
    experiment = experiment_of(deployment, base)
    plan = experiment.plan
    if plan.mixing == "sum" and not deployment.trusted_nodes:
        raise ConfigError(
            "trusted_nodes must be true in the deployment's file with privacy.mixing sum, where "
            "one cheating node can spoil a round and nobody can look at its report, got false"
        )
    if (users := sum(node.users for node in deployment.nodes)) > plan.users:
        raise ConfigError(
            f"the nodes speak for {users} users, data.users of the configuration is {plan.users}"
        )
    if any(node.data == "simulated" for node in deployment.numbered.values()):
        data = experiment.config.data
        load_partition(data, experiment.config.data_seed)  # refuses more users than it has
    enrolment = Enrolment(deployment, out, approve, days)
    for name in forget:
        enrolment.forget(name)
    crowds = dict.fromkeys((each.name for each in deployment.shufflers), 0)
    for node in deployment.numbered.values():
        crowds[deployment.shuffler_names[node.name]] += node.users
    done = enrolment.done
    done.short = {name: users for name, users in crowds.items() if users < plan.fewest_present}
    done.sites = _Sites(deployment, experiment, base, out if in_place else None).all()
    for site in done.sites:
        enrolment.write(site)
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
        window = experiment.plan.window
        assert window is not None
        self._deployment, self._experiment = deployment, experiment
        self._base, self._out = base, out
        self._addresses = tuple(each.address for each in deployment.shufflers)
        self._round_seconds = window.seconds

    def all(self) -> list[Site]:
        """Server, shufflers and nodes."""
        shufflers = map(self._shuffler, self._deployment.shufflers)
        return [self._server(), *shufflers, *map(self._node, self._deployment.numbered)]

    def _server(self) -> Site:
        server, name = self._deployment.server, self._deployment.name
        settings = ServerSite(
            shufflers=self._addresses,
            certificate="keys/server.pem",
            digest=self._digest(*(node.data for node in self._deployment.nodes)),
            nodes=AGREED_FILE,
            round_timeout=server.round_timeout,
            patience=server.patience,
        )
        connection = {
            "address": f"127.0.0.1:{server.local_port}",
            "root-certificates": f"{self._folder('server')}/keys/flower-authority.pem",
        }
        connections = {"superlink": {"default": name, name: connection}}
        files = self._run() | {
            "server.toml": _toml("server.toml", settings.model_dump()),
            "flower/config.toml": tomli_w.dumps(connections),
        }
        processes = server.process, run_process(self._deployment.name, self._round_seconds)
        requests = {"server": Role.SERVER, "superlink": Role.SHUFFLER}
        templates = "server.md", *CONF_OF["server"]
        values = server.values | {"accounts": "shufl, www-data"}
        values |= {"records": self._to_copy("the server tests the model on a part of it")}
        return self._site("server", requests, processes, files, templates, values)

    def _shuffler(self, entry: ShufflerEntry) -> Site:
        nodes, plan = len(self._deployment.nodes), self._experiment.plan
        values = entry.values | {
            "calls": max(256, 4 * nodes),
            "uploads": max(24, 2 * nodes),
            "connections": max(LEAST_CONNECTIONS, 2 * nodes),
            "blankets": rounded_down(plan.shuffler_blankets, 6),
            "batch": plan.minimum_batch,
            "sum_noise": rounded_down(plan.noise_of_batch, 6),
            "rounds": plan.rounds,
        }
        requests, processes = {entry.name: Role.SHUFFLER}, (entry.process,)
        templates = "shuffler.toml", "shuffler.md", *CONF_OF["shuffler"]
        return self._site(entry.name, requests, processes, {"revoked": ""}, templates, values)

    def _node(self, number: int) -> Site:
        nodes, form = self._deployment.nodes, self._experiment.form
        if is_carried(form.task):
            raise ConfigError(
                "data.task must be a name or module:callable on real machines, got a Task that the "
                "dataset holds"
            )
        entry, superlink = nodes[number], self._deployment.server.address
        settings = {
            "number": number,
            "users": entry.users,
            "config": "run.toml",
            **{key: value for key, value in asdict(form).items() if key != "task"},
            "data": entry.data,
            "first_user": sum(each.users for each in nodes[:number]),
            "device": "device.toml",
            "socket": "node.sock",
            "shufflers": self._addresses,
            "certificate": f"keys/{entry.name}.pem",
            "digest": self._digest(entry.data),
            "superlink": superlink,
        }
        files = self._run(entry.data) | {
            "node.toml": _toml("node.toml", settings),
            "device.toml": _device(self._experiment.plan, self._experiment.halting_round),
        }
        processes = entry.processes(superlink, self._round_seconds)
        templates = "node.md", *CONF_OF["node"]
        values = {"accounts": "shufl-app", "local_port": entry.port, "records": ""}
        if entry.data == "simulated":
            values["records"] = self._to_copy("a share of it is this node's data")
        return self._site(entry.name, {entry.name: Role.NODE}, processes, files, templates, values)

    def _folder(self, name: str) -> str:
        return self._deployment.folder if self._out is None else str(self._out / name)

    def _digest(self, *of_nodes: str) -> str:
        """The data's digest, if the data of one of these nodes are simulated; otherwise empty."""
        data = self._experiment.config.data
        return data_digest(data.dataset, data.features) if "simulated" in of_nodes else ""

    def _to_copy(self, why: str) -> str:
        """Asks for the file that the configuration names, where a site reads it; empty: none."""
        file = self._experiment.config.data.dataset
        asked = f"Copy `{file}` here, beside `run.toml`, which names it: {why}.\n\n"
        return asked if isinstance(file, RecordFile) else ""

    def _run(self, data: str = "") -> dict[str, str]:
        """The run's file, and modules beside the deployment's file that it or `data` names."""
        config = self._experiment.config
        dataset = config.data.dataset
        if isinstance(dataset, RecordFile) and self._out is None:  # else it is read where it lies
            dataset = dataset.model_copy(update={"file": Path(dataset.file).name})
            about = config.data.model_copy(update={"dataset": dataset})
            config = config.model_copy(update={"data": about})
        files = {"run.toml": template("run.toml", content=dumps(config))}
        for name in (*config.own_code, data):
            module = name.partition(":")[0].replace(".", "/") + ".py"
            if ":" in name and (self._base / module).is_file():
                files[module] = (self._base / module).read_text(encoding="utf-8")
        return files

    def _site(
        self,
        name: str,
        requests: dict[str, Role],
        processes: tuple[Process, ...],
        files: dict[str, str],
        templates: tuple[str, ...],
        values: dict[str, object],
    ) -> Site:
        """A site with `files`, what `templates` are made into, and a unit for each process."""
        values |= {"deployment": self._deployment.name, "site": name}
        values |= {"folder": self._folder(name), "prefix": Path(self._deployment.folder).name}
        return Site(name, files | made_of(templates, processes, values), requests, processes)


def _device(plan: PrivacyPlan, rounds: int) -> str:
    """The owner's file: as proposed, it accepts this plan, and one run of it."""
    accountant: AccountantName = "blanket" if plan.shuffler_blankets else "local"
    if plan.mixing == "sum":
        accountant = plan.accountant
    limits = DeviceLimits(
        most_epsilon=1.0, delta=plan.delta, accountant=accountant, adjacency=plan.adjacency
    )
    charge = limits.charge(RunOffered(1, "", plan, rounds))
    told: dict[str, Any] = {"ledger": "device.db", "most_epsilon": enough(charge)}
    told |= limits.model_dump(include={"delta", "accountant", "adjacency"})
    told |= {"most_rounds": rounds} if rounds > limits.most_rounds else {}
    work_until = 0.0 if plan.window is None else plan.window.work_until
    return _toml("device.toml", told | {"plans": [plan.digest()]}, work_until=f"{work_until:g}")


def _toml(name: str, content: Mapping[str, Any], /, **values: object) -> str:
    """A site's file, with the comments of its template."""
    return template(name, content=tomli_w.dumps(content), **values)
