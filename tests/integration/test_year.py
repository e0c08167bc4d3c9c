"""A year of a deployment, in minutes: everything that its operators do to it, on real processes."""

import json
import os
import re
import shutil
import signal
import ssl
import tomllib

import pytest

from deployment_world import World, deployment_of, window_here
from ports import free_port
from run_world import LIMIT, invoke, wait_until
from shufl.clients.device_ledger import load_device
from shufl.deploy.provision import provision
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.run_status import newest_run
from shufl.deploy.superlink import register
from shufl.shuffler import Credentials
from shufl.shuffler.keys import Request, make_flower_key

NODE = "node", "supernode", "clientapp"


def nobody(name, key):
    raise AssertionError(f"{name} was asked for")


class Year(World):
    """A deployment of two nodes, with room for a third."""

    def __init__(self, base):
        about = {"round_timeout": 20.0, "patience": LIMIT, "window": window_here()}
        whole = deployment_of(base, 3, 1000, **about, privacy={"minimum_batch": 3})
        first = whole.model_copy(update={"nodes": whole.nodes[:2]})
        Rehearsal.__init__(self, first, base, base / "s")
        self.base, self.server, self.command = base, self.folder / "server", None
        self.third = whole.nodes[2].model_copy(update={"port": free_port()})

    @property
    def run_folder(self):
        return newest_run(self.server / "runs") or self.server / "runs/none"

    def provision(self, approve, nodes=None):
        """What the authority does; returns what became of keys."""
        self.deployment = self.deployment.model_copy(
            update={"nodes": nodes or self.deployment.nodes}
        )
        done = provision(self.deployment, self.base, self.folder, approve, in_place=True)
        self.sites = {site.name: site for site in done.sites}
        return done

    def enrol(self, name):
        """What a new node, or one with new keys, does."""
        Request.create(name).write(self.keys(name))
        make_flower_key(self.keys(name))

    def keys(self, name):
        return self.folder / name / "keys"

    def register(self):
        """What the server does once it was told of other nodes."""
        return [line.rsplit(",")[0] for line in register(self.server / "server.toml")]

    def withdraw(self, *entries):
        """What the shuffler's operator does."""
        with (self.folder / "shuffler-1/revoked").open("a") as file:
            file.write("".join(f"{entry}\n" for entry in entries))
        self.hang_up()

    def limit(self, name, **limits):
        """What a node's owner does."""
        device = self.folder / name / "device.toml"
        text = device.read_text()
        for key, value in limits.items():
            text, done = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value!r}", text)
            assert done == 1
        device.write_text(text)

    def hang_up(self):
        os.kill(self.running["shuffler-1", "shuffler"].pid, signal.SIGHUP)

    def go_on(self):
        """What the run's service does, at the first time and at each boot."""
        self.run("run.toml", "--continue")

    def wait_for_users(self, users):
        """Waits for a round, of those that begin from now on, that was released with as many."""
        since = self.rows[-1]["round"] + 1 if self.rows else 0

        def found():
            rows = [row for row in self.rows if row["round"] > since]
            return any(
                (row["outcome"], row["users_present"]) == ("released", users) for row in rows
            )

        self.wait_until(found, f"a round of {users} users")


@pytest.mark.nightly
def test_a_year(tmp_path):
    with Year(tmp_path) as year:
        year.go_on()
        year.wait_for_users(6)

        # A node more, while the run goes on.
        year.provision(nobody, (*year.deployment.nodes, year.third))
        year.enrol("ward-3")
        assert year.provision(lambda name, key: True).signed == ["ward-3", "ward-3.flower"]
        assert year.register() == ["registered ward-3"]
        year.start_node("ward-3")
        year.wait_for_users(9)

        # A node less.
        one, two, three = year.deployment.nodes
        year.kill("ward-2", *NODE)
        year.provision(nobody, (one, two.model_copy(update={"withdrawn": True}), three))
        assert year.register() == ["unregistered ward-2"]
        year.withdraw("ward-2")
        year.wait_for_users(6)
        assert [node["name"] for node in year.status()["nodes"]] == ["ward-1", "ward-3"]

        # Certificates are renewed; those before are withdrawn.
        parties = "ward-1", "shuffler-1", "server"
        before = {name: Credentials.read(year.keys(name), name).fingerprint for name in parties}
        for name in parties:
            renewed = invoke("keys renew", year.keys(name), "--name", name)
            assert renewed.exit_code == 0, renewed.stderr
        assert sorted(year.provision(nobody).signed) == sorted(parties)
        year.withdraw(before["ward-1"], before["server"])
        year.wait_for_users(6)
        own = (year.keys("shuffler-1") / "shuffler-1.pem").read_text()
        port = year.deployment.shufflers[0].port
        assert ssl.get_server_certificate(("127.0.0.1", port)).split() == own.split()

        # A node's keys may have been stolen.
        stolen = Credentials.read(year.keys("ward-3"), "ward-3").fingerprint
        year.kill("ward-3", *NODE)
        year.withdraw(stolen)
        for path in (*year.keys("ward-3").glob("ward-3.*"), *year.keys("ward-3").glob("flower.*")):
            path.unlink()
        year.enrol("ward-3")
        asked = year.provision(lambda name, key: False)
        assert {*asked.unapproved} == {"ward-3", "ward-3.flower"}
        assert year.provision(lambda name, key: True).signed == ["ward-3", "ward-3.flower"]
        assert year.register() == ["unregistered ward-3", "registered ward-3"]
        year.start_node("ward-3")
        year.wait_for_users(6)

        # The server's machine starts again, without a word before, and Flower's database is lost.
        spent = year.rounds_spent
        year.command.kill()
        year.command.communicate()
        year.kill("server", "superlink")
        backup = shutil.copytree(year.run_folder, tmp_path / "backup")
        for path in (year.server / "flower").glob("superlink.db*"):
            path.unlink()
        year.start("server", "superlink")
        year.wait_for_superlink()
        assert year.register() == ["registered ward-1", "registered ward-3"]
        year.go_on()
        year.wait_for_users(6)
        assert year.rounds_spent[: len(spent)] == spent

        # The shuffler's disk is new.
        year.kill("shuffler-1", "shuffler")
        shutil.rmtree(year.folder / "shuffler-1/state")
        year.start("shuffler-1", "shuffler")
        year.wait_for_users(6)

        # The run is ended. Its folder comes from a backup: what that has forgotten is refused.
        year.command.send_signal(signal.SIGTERM)
        code, _, err = year.finish()
        assert (code, err) == (130, ""), year.tell()
        first = year.run_folder
        offered = year.rounds_offered("ward-1")
        assert len(offered) == len({*offered}) and {*offered} <= {*year.rounds_spent}
        kept = shutil.move(first, tmp_path / "kept")
        shutil.copytree(backup, first)
        year.run("--resume", first)
        code, _, err = year.finish()
        assert code == 1 and "this round does not follow the last one" in err, err
        shutil.rmtree(first)
        shutil.move(kept, first)

        # A node's ledger is lost: its owner takes what was charged off the limits.
        device = year.folder / "ward-3/device.toml"
        ledger = load_device(device)
        charged = sum(ledger.limits.charge(run) for run in ledger.offered())
        year.kill("ward-3", "node")
        for path in device.parent.glob("device.db*"):
            path.unlink()
        limits = tomllib.loads(device.read_text())
        most, delta = limits["most_epsilon"], limits["delta"]
        year.limit("ward-3", most_epsilon=most - charged, delta=delta * 0.6 / (1 + 1))
        year.start("ward-3", "node")

        # Another run is begun with the same users, by another plan: docs/second-run.md.
        names = "ward-1", "ward-3"
        text = (year.base / "run.toml").read_text()
        second = text.replace('name = "wards"', 'name = "second"')
        second = second.replace("noise_multiplier = 1.0", "noise_multiplier = 1.25")
        (year.base / "run.toml").write_text(second)
        done = year.provision(nobody)
        assert done.changed == {site: ["run.toml"] for site in ("server", *names)}
        assert done.kept == ["shuffler-1/revoked"]  # which is its operator's
        year.go_on()
        wait_until(lambda: year.run_folder != first, LIMIT, "the second run")
        differs = "privacy.noise_multiplier: 1.0 at the node, 1.25 at the server"
        wait_until(lambda: differs in year.shown, LIMIT, "ward-1's word of its former plan")
        for name in names:
            year.kill_process(name, "node")  # and it starts with the new one, as ward-3 may have
        waiting = [f"{name}: this device does not take part in this run" for name in names]
        wait_until(lambda: all(each in year.shown for each in waiting), LIMIT, "owners' refusals")
        assert not year.rows
        year.command.send_signal(signal.SIGTERM)
        assert year.finish()[0] == 130, year.tell()
        for name in names:
            run = year.folder / name / "run.toml"
            accepted = invoke("device accept", run, run.parent, "--yes")
            assert accepted.exit_code == 0, accepted.stderr
            year.kill_process(name, "node")
        year.go_on()
        year.wait_for_users(6)

        log = year.folder / "authority/log.jsonl"
        told = [json.loads(line)["did"] for line in log.read_text().splitlines()]
        assert told.count("signed") == 5 + 1 + 3 + 1 and told.count("withdrew") == 1
        told = [json.loads(line)["did"] for line in (year.server / "log.jsonl").open()]
        assert [told.count(did) for did in ("stops", "registered")] == [2, 6]
