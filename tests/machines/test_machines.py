"""Six machines, from nothing to the plot, and what befalls them: `make machines`.

Each test plays what its first line says; docs/deployment.md lists these lines. They follow one
another: what one leaves, the next finds. `Operators.type` types commands of the pages alone;
`Machine.run` is what befalls a machine, and what a page leaves to whoever reads it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib

import numpy as np
import pytest
from cryptography import x509

from machines_world import (
    BUILT,
    INSTALLED,
    ROOT,
    Containers,
    Machines,
    here,
    wait_until,
)
from shufl.shuffler.credentials import fingerprint_of

pytestmark = pytest.mark.machines
WARDS = {"ward-1": 200, "ward-2": 200, "ward-3": 600}
KEYS = {"server": ("server", "superlink")}
PARTIES = "server", "shuffler-1", "ward-1", "ward-2"
RUN = """\
name = "wards"

[privacy]
accountant = "blanket"
target_epsilon = 1000.0
noise_multiplier = 1.0
delta = 1e-5
check_in_rate = 0.5
clip_norm = 1.0
rounds = 500
shuffler_blankets = 40
minimum_batch = 100
cover = true

[data]
users = 1200

[data.dataset]
file = "visits.csv"
user = "patient"
label = "ill"
classes = 2
mean = [50.0, 80.0]
std = [15.0, 20.0]

[model]
name = "logistic-regression"

[training]
learning_rate = 0.5

[window]
work_until = 20
send_after = 21
send_spread = 3
grace = 6
query_every = 3
"""
DEPLOYMENT = """\
name = "wards"
config = "run.toml"

[server]
host = "server.example"
round_timeout = 60

[[shufflers]]
name = "shuffler-1"
host = "fd09:8::3"
"""
SHUFL = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [
    (ROOT / "docs" / name).read_text() for name in ("deployment.md", "second-run.md", "recovery.md")
]


def node_entry(name):
    """A node in deployment.toml."""
    return f'\n[[nodes]]\nname = "{name}"\nusers = {WARDS[name]}\ndata = "visits.csv"\n'


def visits(users, seed):
    """A file of records: one or two of each patient."""
    random = np.random.default_rng(seed)
    lines = ["patient,age,weight,ill"]
    for user in range(users):
        for _ in range(random.integers(1, 3)):
            age, weight = random.normal(50, 15), random.normal(80, 20)
            ill = int(age / 15 + weight / 20 + random.normal() > 22 / 3)
            lines.append(f"p{seed}-{user},{age:.1f},{weight:.1f},{ill}")
    return "\n".join(lines) + "\n"


class Operators:
    """Who sits before the machines, and types what the pages say.

    Attributes:
        machines: by their names.
        typed: by the machine's name, what was typed there.
        keys: by their names, what was told by telephone of the keys that were made.
        wards: the nodes that take part.
    """

    def __init__(self, machines):
        self.machines, self.typed, self.keys = machines, {}, {}
        self.wards = ["ward-1", "ward-2"]

    def __getitem__(self, name):
        return self.machines[name]

    @property
    def present(self):
        """For how many users the nodes speak that take part."""
        return sum(WARDS[name] for name in self.wards)

    def type(self, name, command, check=True):
        """Types a command of a page, or of a site's README.md, and returns what it prints."""
        readme = self[name].path("README.md")
        pages = [*PAGES, readme.read_text() if readme.exists() else ""]
        shown = re.sub(r"\b[0-9a-f]{64}\b|\bward-[23]\b|(?<=--name )\S+", "ward-1", command)
        shown = re.sub(r" --approve \S+| --yes\b", "", shown)
        assert any(each in page for page in pages for each in (command, shown)), shown
        self.typed.setdefault(name, []).append(command)
        umask = "umask 077; " if name == "ward-2" else ""
        activated = "[ ! -f .venv/bin/activate ] || . .venv/bin/activate\n"
        return self[name].run(f"{umask}{activated}{command}", check)

    def send(self, sender, receiver, name, to=""):
        """Sends a file, or all of a folder, as by e-mail; who has such a file keeps its owner."""
        path = self[sender].path(name)
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        for each in files:
            target = self[receiver].path(to or name) / each.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(each.read_bytes())

    def make_keys(self, name):
        """Makes a party's keys; requests go to the authority, and fingerprints by telephone."""
        wanted = {each: f"shufl keys request keys --name {each}" for each in KEYS.get(name, [name])}
        if name in WARDS:
            wanted[f"{name}.flower"] = "shufl keys flower keys"
        for key, command in wanted.items():
            if not self[name].path(f"keys/{key.replace(f'{name}.', '')}.key").exists():
                self.keys[key] = re.search(r"(?m)^key (\w+): ", self.type(name, command))[1]
        for path in self[name].path("keys").iterdir():
            if path.suffix in (".csr", ".pub"):
                self.send(name, "authority", f"keys/{path.name}", f"sites/{name}/keys/{path.name}")

    def provision(self, *names):
        """The authority signs for these names and no other, which were told by telephone."""
        approved = "".join(f" --approve {name}={self.keys[name]}" for name in names)
        said = self.type("authority", f"shufl provision deployment.toml{approved}")
        assert {*re.findall(r"(?m)^signed +(\S+)", said)} == {*names}
        return said

    def bring_back(self, name):
        """The authority's certificates come back to a party."""
        for path in self["authority"].path(f"sites/{name}/keys").glob("*.pem"):
            self.send("authority", name, f"sites/{name}/keys/{path.name}", f"keys/{path.name}")

    def tell_server(self):
        """The server gets what the authority says of nodes, and tells Flower."""
        self.send("authority", "server", "sites/server/nodes", "nodes")
        return self.type("server", "sudo -u shufl .venv/bin/shufl register")

    def install(self, name):
        """Has doctor look at what root will run, and root run it."""
        assert "ok      files for root" in self.type(name, "shufl doctor .", check=False)
        self.type(name, "sudo sh install.sh")

    def start_node(self, name):
        """Gives a node its records, and starts it."""
        self[name].write("visits.csv", visits(WARDS[name], int(name[-1])))
        self.install(name)
        self.type(name, "sudo systemctl enable --now shufl-node shufl-supernode shufl-clientapp")

    def doctor(self, name):
        """What doctor says at a site."""
        said = self.type(name, "sudo -u shufl .venv/bin/shufl doctor .", check=False)
        assert said.startswith(("ok ", "problem ")), said
        return said

    def runs(self, unit):
        """Whether a service of the server runs."""
        state = self["server"].run(f"systemctl is-active {unit}", check=False).strip()
        return state in ("active", "activating", "reloading")

    def status(self):
        return json.loads(self["server"].run("sudo -u shufl .venv/bin/shufl status --json"))

    def fingerprint(self, name):
        """That of a site's certificate."""
        pem = self[name].path(f"keys/{name}.pem").read_bytes()
        return fingerprint_of(x509.load_pem_x509_certificate(pem))

    def withdraw(self, *entries):
        """What the shuffler's operator does."""
        for entry in entries:
            self.type("shuffler-1", f"echo {entry} >> revoked")
        self.type("shuffler-1", "sudo systemctl kill --signal HUP shufl-shuffler")

    def wait_for_phase(self, phase):
        """Waits for the next round: its work, its reports, or what comes after it."""
        log = self["shuffler-1"].path("shuffler.log")
        before = log.stat().st_size

        def begun(event):
            with log.open() as file:
                file.seek(before)
                return f'"event": "{event}"' in file.read()

        wait_until(lambda: begun("round opened"), "a round")
        if phase == "reports":
            reports = self.reports
            wait_until(lambda: self.reports > reports, "reports")
        if phase == "between":
            wait_until(lambda: begun("round ended"), "a round's end")

    @property
    def reports(self):
        """How many the shuffler has answered, by what it tells its own operator."""
        told = self["shuffler-1"].run("curl --silent http://127.0.0.1:9464/metrics")
        return sum(map(float, re.findall(r"(?m)^shufl_reports_total\{.*\} (\S+)$", told)))

    @property
    def rows(self):
        """What is known of the newest run's rounds."""
        found = list(self["server"].path("runs").glob("*/metrics.jsonl"))
        found.sort(key=lambda path: path.stat().st_mtime)
        return [json.loads(line) for line in found[-1].read_text().splitlines()] if found else []

    def wait_for_round(self, users=None):
        """Waits for a round that is released, of those that begin from now on."""
        since = self.rows[-1]["round"] + 1 if self.rows else 0

        def found():
            return [
                row
                for row in self.rows
                if row["round"] > since
                and row["outcome"] == "released"
                and users in (None, row["users_present"])
            ]

        return wait_until(found, f"a round of {users or 'some'} users")[-1]


@pytest.fixture(scope="module")
def they():
    """The operators, before machines that were just switched on."""
    machines = Machines("authority", "server", "shuffler-1", *WARDS, ipv6_only=["ward-3"])
    for machine in machines:
        machine.boot()
    return Operators(machines)


def test_provision(they):
    """`shufl provision` makes a folder for each site, and signs what was approved, nothing else."""
    they["authority"].write(
        "deployment.toml", DEPLOYMENT + node_entry("ward-1") + node_entry("ward-2")
    )
    they["authority"].write("run.toml", RUN)
    they["authority"].write("visits.csv", visits(100, 9))
    said = they.type("authority", "shufl provision deployment.toml")
    assert {*re.findall(r"(?m)^made .*sites/(\S+):", said)} == {*PARTIES}
    for name in PARTIES:
        they.send("authority", name, f"sites/{name}", to=".")
        they.make_keys(name)
    assert "\nsigned" not in they.type("authority", "shufl provision deployment.toml")
    they.provision(*they.keys)
    for name in PARTIES:
        they.bring_back(name)
    they.send("authority", "server", "sites/server/nodes", to="nodes")
    they.send("authority", "server", "visits.csv")


def test_services(they):
    """Every service starts by the README.md of its site; a hospital types seven at most."""
    they["shuffler-1"].run("sed -i 's/^# metrics/metrics/' shuffler.toml")
    for name, unit in (("shuffler-1", "shufl-shuffler"), ("server", "shufl-superlink")):
        they.install(name)
        they.type(name, f"sudo systemctl enable --now {unit}")
        they.type(name, "sudo nginx -t && sudo systemctl reload nginx")
    said = they.type("server", "sudo -u shufl .venv/bin/shufl register")
    assert len(re.findall("(?m)^registered ward-", said)) == 2
    for name in ("ward-1", "ward-2"):
        they.start_node(name)
        assert len(they.typed[name]) + len(INSTALLED) <= 7


def test_doctors(they):
    """`shufl doctor` finds nothing at any site."""
    for name in ("shuffler-1", "server", "ward-1", "ward-2"):
        wait_until(lambda name=name: "problem" not in they.doctor(name), f"{name} well", 60)


def test_loopback(they):
    """Other accounts do not reach Flower's port on a machine, nor strangers what nodes need not."""
    for name, address, account in (
        ("server", "https://127.0.0.1:8000", "www-data"),
        ("ward-1", "http://127.0.0.1:9094", "shufl-app"),
    ):
        ask = f"curl --insecure --http2-prior-knowledge --silent --output /dev/null {address}"
        assert "exit 7" in they[name].run(f"sudo -u nobody {ask} || echo exit $?")
        reached = they[name].run(f"sudo -u {account} {ask} || echo exit $?")
        assert reached in ("", "exit 52\n")  # the answer may be empty
    ask = "curl --insecure --silent --output /dev/null --write-out '%{http_code}'"
    assert they["ward-1"].run(f"{ask} https://server.example:8443/v1/control/list") == "403"
    assert "exit 7" in they["ward-1"].run(f"{ask} https://server.example:8000 || echo exit $?")
    for address in they["shuffler-1"].addresses:
        url = f"https://[{address}]:9001" if ":" in address else f"https://{address}:9001"
        assert "exit 7" in they["ward-1"].run(f"{ask} {url} || echo exit $?")


def test_run(they):
    """A round of all users is released, and for its whole length nobody is said to be away."""
    they.type("server", "sudo systemctl enable --now shufl-run")
    they.wait_for_round(they.present)
    last, troubles = they.rows[-1]["round"], []

    def next_round():
        status = they.status()
        troubles.extend(node["trouble"] for node in status["nodes"] if node["trouble"])
        return they.rows[-1]["round"] > last

    wait_until(next_round, "the next round")
    assert not troubles and "problem" not in they.doctor("ward-1")
    assert set(they.status()["shufflers"].values()) == {""}


def test_firewall(they):
    """Doctor says that the firewall is not loaded; its command or a unit's start loads it."""
    command = "sudo nft --file /etc/shufl/shufl.nft"
    for name in ("server", "ward-1"):
        they[name].run("nft flush ruleset")
        assert re.search(f"problem firewall: .*\n +{command}", they.doctor(name))
        they[name].run(command)
        assert "problem" not in they.doctor(name)
    they["ward-1"].run("nft flush ruleset; systemctl restart shufl-supernode")
    assert "problem" not in they.doctor("ward-1")
    they.wait_for_round(they.present)


def test_nginx(they):
    """Doctor at home says that nginx is down; nginx that is killed comes back by itself."""
    for name in ("server", "shuffler-1"):
        they[name].run("systemctl stop nginx")
        assert "problem nginx" in they.doctor(name)
        they[name].run("systemctl start nginx")
        assert "problem" not in they.doctor(name)
        they[name].run("kill -9 $(systemctl show --property MainPID --value nginx)")
        wait_until(lambda name=name: "ok      nginx" in they.doctor(name), "nginx", 60)
    they.wait_for_round(they.present)


def test_port(they):
    """Doctor at home says that another program has the port of its process, or nginx's."""
    other = "systemd-run --unit other python3 -m http.server --bind"
    for name, unit, bind in (
        ("shuffler-1", "shufl-shuffler", "127.0.0.1 9001"),
        ("shuffler-1", "nginx", ":: 9000"),
        ("server", "nginx", "0.0.0.0 8443"),
    ):
        they[name].run(f"systemctl stop {unit}; {other} {bind}")
        port = bind.rpartition(" ")[2]
        taken = f"(no certificate comes from|another program has) port {port}"
        assert re.search(taken, they.doctor(name))
        they[name].run(f"systemctl stop other; systemctl start {unit}")
        wait_until(lambda name=name: "problem" not in they.doctor(name), f"{name} well", 60)
    they.wait_for_round(they.present)


def test_test_records(they):
    """Doctor says that the server's test records are gone."""
    they["server"].run("mv visits.csv elsewhere.csv")
    assert "problem test records" in they.doctor("server")
    they["server"].run("mv elsewhere.csv visits.csv")
    assert "problem" not in they.doctor("server")


def test_shufflers_disk(they):
    """Doctor and status name a shuffler whose disk is full; the run waits, and goes on."""
    they["shuffler-1"].run("cat /dev/zero > /full || true")
    assert "problem disk" in they.doctor("shuffler-1")
    wait_until(lambda: "disk" in they.status()["waits_for"], "a wait for the shuffler's disk")
    assert "disk" in "".join(they.status()["shufflers"].values())
    they["shuffler-1"].run("rm /full")
    they.wait_for_round(they.present)
    assert "problem" not in they.doctor("shuffler-1")


def test_servers_disk(they):
    """A run whose disk is full says so and ends; with room it goes on, and forgets no round."""
    spent, ended = they.rows, "error: the run's disk is full; "
    they["server"].run("cat /dev/zero > /full || true")
    wait_until(lambda: ended in they["server"].run("journalctl --unit shufl-run"), "the run's end")
    they["server"].run("rm /full")
    they.wait_for_round(they.present)
    assert they.rows[: len(spent)] == spent


def test_nodes_disk(they):
    """A node whose disk is full takes no part, and the others go on; with room it is in again."""
    they["ward-2"].run("cat /dev/zero > /full || true")
    they.wait_for_round(they.present - WARDS["ward-2"])
    (node,) = (each for each in they.status()["nodes"] if each["name"] == "ward-2")
    assert node["trouble"]
    they["ward-2"].run("rm /full")
    they.wait_for_round(they.present)


def test_power(they):
    """All machines lose power, and boot in another order; the run goes on, and nobody types."""
    spent = they.rows
    for machine in they.machines:
        machine.power_off()
    for name in ("ward-2", "authority", "server", "ward-3", "ward-1", "shuffler-1"):
        they[name].boot()
    they.wait_for_round(they.present)
    assert they.rows[: len(spent)] == spent


@pytest.mark.parametrize("phase", ["work", "reports", "between"])
@pytest.mark.parametrize("name", ["ward-2", "shuffler-1", "server"])
def test_cut(they, name, phase):
    """A cut of five minutes, of each party in each phase of a round, costs rounds and no run."""
    spent = they.rows
    they.wait_for_phase(phase)
    they[name].cut_off()
    time.sleep(300)
    they[name].connect()
    they.wait_for_round(they.present)
    assert they.rows[: len(spent)] == spent and they.runs("shufl-run")


def test_a_node_more(they):
    """A node is added amid the run; it has IPv6 alone, and no /dev/shm."""
    deployment = they["authority"].path("deployment.toml")
    deployment.write_text(deployment.read_text() + node_entry("ward-3"))
    they.type("authority", "shufl provision deployment.toml")
    they.send("authority", "ward-3", "sites/ward-3", to=".")
    they.make_keys("ward-3")
    they.provision("ward-3", "ward-3.flower")
    they.bring_back("ward-3")
    they["ward-3"].run("umount /dev/shm; chmod 0 /dev/shm")
    they.start_node("ward-3")
    assert "registered ward-3" in they.tell_server()
    they.wards.append("ward-3")
    they.wait_for_round(they.present)
    assert "problem" not in they.doctor("ward-3")


def test_renewal(they):
    """Certificates are renewed amid the run, and nobody is let in by the old ones."""
    they["ward-1"].run("cp -r . /var/tmp/before")
    old = {name: they.fingerprint(name) for name in ("ward-1", "shuffler-1", "server")}
    for name in old:
        they.type(name, f"sudo -u shufl .venv/bin/shufl keys renew keys --name {name}")
        they.send(name, "authority", f"keys/{name}.csr", f"sites/{name}/keys/{name}.csr")
    they.keys |= dict.fromkeys(old, "0" * 64)  # nobody is called: the keys are known
    they.provision(*old)
    for name in old:
        they.bring_back(name)
        assert they.fingerprint(name) != old[name]
    they.withdraw(old["ward-1"], old["server"])
    they.wait_for_round(they.present)
    said = they["ward-1"].run(".venv/bin/shufl doctor /var/tmp/before", check=False)
    assert "takes no calls with this certificate" in said


def test_a_stolen_key(they):
    """A stolen key is withdrawn: its node comes back with another, and the thief is refused."""
    stolen = they.fingerprint("ward-2")
    they["ward-2"].run("cp -r . /var/tmp/thief")
    said = they.type("authority", "shufl provision deployment.toml --forget ward-2")
    assert stolen in said
    they.withdraw(stolen)
    they.wait_for_round(they.present - WARDS["ward-2"])
    they["ward-2"].run("rm keys/ward-2.*")
    they.make_keys("ward-2")
    they.provision("ward-2")
    they.bring_back("ward-2")
    they.type("ward-2", "sudo sh install.sh")
    they.wait_for_round(they.present)
    said = they["ward-2"].run(".venv/bin/shufl doctor /var/tmp/thief", check=False)
    assert "takes no calls with this certificate" in said


def test_a_node_less(they):
    """A node that is withdrawn is unregistered, and the shuffler takes no calls of it."""
    deployment, entry = they["authority"].path("deployment.toml"), node_entry("ward-2")
    deployment.write_text(deployment.read_text().replace(entry, f"{entry}withdrawn = true\n"))
    they.type("authority", "shufl provision deployment.toml")
    assert "unregistered ward-2" in they.tell_server()
    they.withdraw("ward-2")
    they.wards.remove("ward-2")
    they.wait_for_round(they.present)
    assert "takes no calls with this certificate" in they.doctor("ward-2")


def test_a_fault_in_the_records(they):
    """Records that do not fit end a node's service, once; doctor says where, and what starts it."""
    records = they["ward-1"].path("visits.csv")
    good = records.read_text()
    lines = good.splitlines()
    patient, _, weight, ill = lines[4].split(",")
    records.write_text("\n".join([*lines[:4], f"{patient},forty,{weight},{ill}", *lines[5:], ""]))
    they["ward-1"].run("systemctl restart shufl-node")
    show = "systemctl show shufl-node --property ActiveState,NRestarts --value"
    wait_until(
        lambda: sorted(they["ward-1"].run(show).split()) == ["0", "failed"], "the service's end"
    )
    said = they["ward-1"].run("journalctl --unit shufl-node --lines 5")
    assert "visits.csv: column age" in said and "forty" not in said
    assert re.search("problem model and records.*column age", they.doctor("ward-1"))
    records.write_text(good)
    assert "sudo systemctl start shufl-node" in they.doctor("ward-1")
    they.type("ward-1", "sudo systemctl start shufl-node")
    they.wait_for_round(they.present)


def test_a_shufflers_new_disk(they):
    """A shuffler that has lost its state serves the run's next round."""
    they["shuffler-1"].run("systemctl stop shufl-shuffler; rm -r state")
    they["shuffler-1"].run("systemctl start shufl-shuffler")
    they.wait_for_round(they.present)


def test_a_nodes_backup(they):
    """A node without its ledger takes no part; with one from a backup it is in again."""
    they["ward-1"].run("cp -p device.db /var/tmp/device.db")
    they.wait_for_round(they.present)
    they["ward-1"].run("systemctl stop shufl-node; rm device.db; systemctl start shufl-node")
    assert re.search("problem owner's limits.* is lost", they.doctor("ward-1"))
    they.wait_for_round(they.present - WARDS["ward-1"])
    they["ward-1"].run("cp -p /var/tmp/device.db device.db")
    they.type("ward-1", "sudo systemctl start shufl-node")
    they.wait_for_round(they.present)


def test_the_servers_backup(they):
    """Without Flower's database the server registers all anew; a run's old folder is refused."""
    stop = "systemctl stop shufl-run; systemctl stop shufl-superlink"
    they["server"].run(f"{stop}; cp -rp runs /var/tmp/runs; rm flower/superlink.db*")
    they["server"].run("systemctl start shufl-superlink")
    registered = they.type("server", "sudo -u shufl .venv/bin/shufl register")
    assert len(re.findall("(?m)^registered ward-", registered)) == len(they.wards)
    they["server"].run("systemctl start shufl-run")
    they.wait_for_round(they.present)
    they["server"].run(
        "systemctl stop shufl-run; mv runs /var/tmp/newer; cp -rp /var/tmp/runs runs"
    )
    they["server"].run("systemctl start shufl-run")
    wait_until(lambda: not they.runs("shufl-run"), "the run's end")
    said = they["server"].run("journalctl --unit shufl-run --lines 3")
    assert "this round does not follow the last one" in said
    they["server"].run("rm -r runs; mv /var/tmp/newer runs; systemctl start shufl-run")
    they.wait_for_round(they.present)


def test_the_authoritys_backup(they):
    """The authority goes on from its backup: it knows every key, and signs nothing anew."""
    they["authority"].run("cp -rp sites /var/tmp/sites; rm -r sites; cp -rp /var/tmp/sites sites")
    they.provision()


def test_an_upgrade(they):
    """Node and shuffler take another version amid the run; the server refuses another."""
    own = SHUFL["project"]["version"]
    for name in ("ward-1", "shuffler-1"):
        they[name].install("0.1.99")
    they["ward-1"].run("systemctl restart shufl-node shufl-supernode shufl-clientapp")
    they["shuffler-1"].run("systemctl restart shufl-shuffler")
    they.wait_for_round(they.present)
    they["server"].run("systemctl stop shufl-run")
    they["server"].install("0.1.99")
    they["server"].run("systemctl start shufl-run")
    wait_until(lambda: not they.runs("shufl-run"), "the run's end")
    said = they["server"].run("journalctl --unit shufl-run --lines 3")
    assert f"was made with shufl {own}, it cannot go on with 0.1.99" in said
    they["server"].install(own)
    (folder,) = they["server"].path("runs").iterdir()
    resume = f".venv/bin/shufl run --resume runs/{folder.name} --on wards"
    about = "--unit resumed --uid shufl --working-directory /srv/shufl"
    they["server"].run(f"systemd-run {about} {resume}")
    they.wait_for_round(they.present)
    they["server"].run("systemctl stop resumed; systemctl start shufl-run")
    they.wait_for_round(they.present)


def test_a_second_run(they):
    """A run by another plan: no file is edited at a site, owners accept it, it ends in a plot."""
    they["server"].run("systemctl stop shufl-run")
    run = they["authority"].path("run.toml")
    text = run.read_text().replace('name = "wards"', 'name = "wards-2"')
    run.write_text(text.replace("rounds = 500", "rounds = 2").replace("r = 1.0", "r = 1.5"))
    said = they.type("authority", "shufl provision deployment.toml")
    changed = dict(re.findall(r"(?m)^changed .*sites/(\S+): (.*)$", said))
    assert {"server", "shuffler-1", *they.wards} <= {*changed}
    for name in changed:
        for file in changed[name].split(", "):
            they.send("authority", name, f"sites/{name}/{file}", f"/srv/sent/{file}")
        they[name].run("chmod -R a+rX /srv/sent")
    for name in they.wards:
        accept = "sudo -u shufl .venv/bin/shufl device accept /srv/sent/run.toml"
        said = they.type(name, f"{accept} --yes")
        assert "privacy.noise_multiplier" in said and "ε of all runs together with it" in said
        they.type(name, "systemctl restart shufl-node")
        assert "problem" not in they.doctor(name)
    for name in ("shuffler-1", "server"):
        they.type(name, "sudo -u shufl cp -r /srv/sent/. .")
        assert "ok      files for root" in they.doctor(name)
        they.type(name, "sh install.sh")
    they.type("shuffler-1", "systemctl restart shufl-shuffler")
    they.type("server", "systemctl start shufl-run")
    wait_until(lambda: not they.runs("shufl-run"), "the run's end")
    (folder,) = they["server"].path("runs").glob("wards-2-*")
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "rounds"
    assert (folder / "score_epsilon.png").exists() and len(they.rows) == 2
    spent = json.loads(
        they["ward-1"].run("sudo -u shufl .venv/bin/shufl device status device.toml --json")
    )
    assert len(spent["runs"]) == 2 and spent["epsilon"] <= spent["limits"]["most_epsilon"]


def test_containers(they, tmp_path):
    """deploy/Dockerfile builds on the same Debian; its entry points set up a site, and start it."""
    containers = Containers(BUILT / "run/containers", they.machines.release)
    for name, process, ready in (
        ("shuffler-1", "shuffler", "shuffler listening on 127.0.0.1:9001"),
        ("ward-1", "node", "listening on /srv/shufl/node.sock"),
    ):
        site = tmp_path / name
        shutil.copytree(they["authority"].path(f"sites/{name}"), site)
        for path in they[name].path("keys").iterdir():
            shutil.copy(path, site / "keys")
        if process == "node":
            shutil.copy(they[name].path("visits.csv"), site)
        here(*containers.command(site, "install", user="root"))
        output = tmp_path / f"{name}.out"
        with output.open("w") as said:
            command = containers.command(site, "start", process)
            running = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            wait_until(lambda path=output, ready=ready: ready in path.read_text(), ready)
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            running.wait()
