"""`shufl device` on real ledgers: what was spent, and what a further run changes and costs."""

import math
import os
import re
import shutil
import sys
import tomllib

import pytest
import tomli_w

from deployment_world import deployment_of, moved
from rounds import make_plan
from run_world import invoke, refused, told
from shufl.cli.__main__ import app
from shufl.clients import RoundRefused, load_device
from shufl.deploy.acceptance import acceptance
from shufl.deploy.doctor import examine
from shufl.deploy.node import agreed_plan
from shufl.deploy.provision import provision
from shufl.deploy.rehearse import Rehearsal
from shufl.learning.config import load
from shufl.protocol.text import rounded_up
from shufl.results.tables import epsilon_text
from shufl.shuffler import RoundHeader

OWNER = 'ledger = "device.db"\nmost_epsilon = 50.0\ndelta = 1e-5\n'


def offer(path, plan, run_id, rounds):
    for number in range(1, rounds + 1):
        header = RoundHeader(run_id, number, "model", plan.digest(), "key")
        load_device(path).offer(header, plan, 10)


def test_the_status_tells_what_was_spent_and_for_whom(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    plan = make_plan(
        users=1000, check_in_rate=0.5, noise_multiplier=1.0, delta=1e-5, rounds=50,
        target_epsilon=50.0, minimum_batch=1, shuffler_blankets=500.0, accountant="blanket",
    )  # fmt: skip
    offer(path, plan, "first", 3)
    offer(path, plan, "second", 2)
    found = told("device status", path)
    runs = [(each["run"], each["rounds"], each["allotted"]) for each in found["runs"]]
    assert runs == [("first", 3, 10), ("second", 2, 10)]
    assert {each["plan"] for each in found["runs"]} == {plan.digest()}
    charges = [
        plan.make_accountant("blanket")
        .compose(plan.event(), 10)
        .get_epsilon(1e-5 * 6 / (math.pi * number) ** 2)
        for number in (1, 2)
    ]
    assert [each["epsilon"] for each in found["runs"]] == charges
    assert found["epsilon"] == sum(charges)
    text = invoke("device status", path).stdout
    assert "first" in text
    assert f"all runs together: {epsilon_text(sum(charges))} of at most 50" in text


def test_a_ledger_that_is_not_there_is_one_line_and_is_not_made(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER)
    assert "cannot be used: unable to open" in refused("device status", path)
    assert not (tmp_path / "device.db").exists()


class Ward:
    """A node's folder, where it was in 3 rounds of a run, and files that its authority has sent."""

    def __init__(self, folder, sites):
        self.folder, self.new = folder / "shufl", folder / "new"
        moved(sites / "before/ward-1", self.folder, sites / "s/ward-1")
        shutil.copytree(sites / "new", self.new)
        self.run, self.device = self.folder / "run.toml", self.folder / "device.toml"
        self.plan, self.next_plan = (
            agreed_plan(load(str(folder / "run.toml"))) for folder in (self.folder, self.new)
        )
        offer(self.device, self.plan, "first", 3)

    def accept(self, *more):
        return invoke("device accept", self.new / "run.toml", self.folder, *more)

    def charge(self, plan, number, rounds):
        """ε of the so-manieth run, by the owner's accountant."""
        accountant = plan.make_accountant("blanket").compose(plan.event(), rounds)
        return accountant.get_epsilon(1e-5 * 6 / (math.pi * number) ** 2)

    def limit(self, line):
        self.device.write_text(f"{line}\n{self.device.read_text()}")

    @property
    def files(self):
        names = "run.toml", "device.toml", "node.toml"
        return {name: (self.folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """The folders of a deployment before another plan, and what changes for a node by it."""
    base = tmp_path_factory.mktemp("d")
    made = Rehearsal(deployment_of(base, nodes=2, rounds=10), base, base / "s")
    shutil.copytree(made.folder, base / "before")
    deployment_of(base, nodes=2, rounds=12, privacy={"noise_multiplier": 1.5})
    done = provision(made.deployment, base, made.folder, lambda *_: False, in_place=True)
    assert done.changed["ward-1"] == ["run.toml"] and done.kept == []
    (base / "new").mkdir()
    for name in done.changed["ward-1"]:
        shutil.copy(made.folder / "ward-1" / name, base / "new")
    return base


@pytest.fixture
def ward(tmp_path, sites):
    return Ward(tmp_path, sites)


@pytest.mark.slow
def test_a_plan_that_is_accepted_is_the_nodes_and_its_owners_and_doctor_says_so(ward):
    """For one run of it, whose ε the ledger charges beside that of the run before."""
    comments = "# Mine.\nmost_rounds = 900  # too\n"
    ward.limit(comments)
    before = ward.device.read_text()
    charges = ward.charge(ward.plan, 1, 10), ward.charge(ward.next_plan, 2, 12)
    done = ward.accept("--yes")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"privacy.noise_multiplier +│ 1.0 +│ 1.5", done.stdout)
    assert re.search(r"privacy.rounds +│ 10 +│ 12", done.stdout)
    assert done.stdout.count("│ privacy.") == 2
    share = rounded_up(1e-5 * 6 / (4 * math.pi**2))
    of_run = f"ε of the run: {epsilon_text(charges[1])} by blanket (replace), δ = {share}\n"
    assert of_run in done.stdout
    limits = load_device(ward.device).limits
    now = tomllib.loads(before)["most_epsilon"]
    both = f"{epsilon_text(sum(charges))}; most_epsilon is {now:g} now"
    both = f"{both} and {limits.most_epsilon:g} then\n"
    assert f"ε of all runs together with it: {both}" in done.stdout
    assert "written device.toml, run.toml\n" in done.stdout
    assert "sudo systemctl restart shufl-node" in done.stdout

    assert ward.run.read_bytes() == (ward.new / "run.toml").read_bytes()
    assert limits.plans == (ward.next_plan.digest(), ward.plan.digest())
    assert sum(charges) <= limits.most_epsilon <= 1.02 * sum(charges)
    added = set(ward.device.read_text().splitlines()) - set(before.splitlines())
    assert added == {f"most_epsilon = {limits.most_epsilon}", f'    "{ward.next_plan.digest()}",'}
    ours = "SuperLink", "clock", "shuffler", "socket"
    troubles = [each for each in examine(ward.folder) if each.trouble]
    assert [each.what for each in troubles if not each.what.startswith(ours)] == []
    again = ward.accept()
    assert again.exit_code == 1 and load_device(ward.device).limits == limits
    assert "accepted before; nothing is written" in ward.accept("--yes").stdout

    ledger, digest = load_device(ward.device), ward.next_plan.digest()
    ledger.offer(RoundHeader("second", 1, "model", digest, "key"), ward.next_plan, 12)
    with pytest.raises(RoundRefused, match="accepts epsilon up to"):
        ledger.offer(RoundHeader("third", 1, "model", digest, "key"), ward.next_plan, 12)
    before = ward.files
    assert "accepted before; nothing is written" in ward.accept("--yes").stdout
    assert ward.files == before  # or who says yes once an hour would accept a run an hour
    lowered = re.sub("most_epsilon = .*", "most_epsilon = 0.1", ward.device.read_text())
    ward.device.write_text(lowered)
    assert ward.accept("--yes").exit_code == 1 and ward.device.read_text() == lowered


def test_whatever_is_accepted_is_shown(ward):
    """What Python takes for equal, and all of a long list."""
    shufflers = ", ".join(f'"shuffler-number-{number}.example:9000"' for number in range(5))
    for path, option, last in ((ward.run, "1", "9000"), (ward.new / "run.toml", "true", "9001")):
        text = f'[model.options]\nx = {option}\nlong = [{shufflers}, "evil.example:{last}"]\n'
        path.write_text(path.read_text().replace("[model.options]\n", text))
    shown = ward.accept("--yes").stdout
    assert re.search(r"model.options.x +│ 1 +│ True", shown)
    assert "evil.example:9001" in re.sub(r"[\s│]", "", shown)


def test_a_file_that_is_in_its_place_already_is_compared_with_the_ledgers_last_run(ward):
    """As where the owner has copied it there; a limit that is enough is not lowered."""
    shutil.copy(ward.new / "run.toml", ward.run)
    raised = re.sub("most_epsilon = .*", "most_epsilon = 5e6", ward.device.read_text())
    ward.device.write_text(raised)
    done = invoke("device accept", ward.run, ward.folder, "--yes")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"privacy.rounds +│ 10 +│ 12", done.stdout)
    assert "written device.toml\n" in done.stdout
    limits = load_device(ward.device).limits
    assert limits.most_epsilon == 5e6 and ward.next_plan.digest() in limits.plans


def test_a_file_of_records_is_where_it_was_beside_the_new_file_too(ward):
    records = '[data.dataset]\nfile = "visits.csv"\nuser = "patient"\nlabel = "ill"\n'
    for path in (ward.run, ward.new / "run.toml"):
        path.write_text(path.read_text().replace('dataset = "digits"\n', "") + records)
    changed = acceptance(ward.new / "run.toml", ward.folder).differing
    assert {*changed} == {"privacy.noise_multiplier", "privacy.rounds"}


@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_it_asks_and_writes_nothing_without_a_yes(ward, answer, monkeypatch):
    before = ward.files
    assert ward.accept().exit_code == 1 and ward.files == before  # here is no terminal
    ours, theirs = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    arguments = "device", "accept", str(ward.new / "run.toml"), str(ward.folder)
    with os.fdopen(theirs) as terminal, os.fdopen(ours):
        monkeypatch.setattr(sys, "stdin", terminal)
        code = app(arguments, standalone_mode=False)
    assert (code, ward.files == before) == ((1, True) if answer == "n" else (None, False))


def test_a_new_form_of_the_node_is_taken_with_the_owners_own_data(ward):
    mine = ward.folder / "node.toml"
    mine.write_text(mine.read_text().replace('"simulated"', '"ward.csv"'))
    form = tomllib.loads(mine.read_text())
    form |= {"input_shape": [7], "outputs": 3, "digest": "ab", "data": "simulated"}
    (ward.new / "node.toml").write_text("# A node.\n" + tomli_w.dumps(form))
    done = ward.accept("--yes")
    assert re.search(r"input_shape \(node.toml\) +│ \[1, 8, 8\] +│ \[7\]", done.stdout), done.stderr
    assert "│ data" not in done.stdout
    text = mine.read_text()
    assert tomllib.loads(text) == form | {"data": "ward.csv"} and text.startswith("# A node.\n")
    other = form | {"certificate": "keys/ward-2.pem"}
    (ward.new / "node.toml").write_text(tomli_w.dumps(other))
    said = refused("device accept", ward.new / "run.toml", ward.folder)
    assert said.endswith("must be keys/ward-1.pem, that of this node, got keys/ward-2.pem")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("least_noise = 2.0", "accepts noise multipliers of at least 2, the plan has 1.5"),
        ("most_check_in_rate = 0.9", "accepts check-in rates of at most 0.9, the plan has 1"),
        ("least_work_seconds = 11.0", "at least 11 s (window.work_until), this one gives 10"),
        ("most_runs = 1", "accepts up to 1 runs, with this one it would be 2"),
        ("most_rounds = 21", "accepts up to 21 rounds over all runs, with this one it would be 22"),
        ('accountant = "crowd"', "the device's owner counts on other users (crowd)"),
        ('ledger = "gone.db"', "gone.db is lost, and with it what its users were charged"),
        ('ledger = "run.toml"', "run.toml cannot be used: file is not a database"),
    ],
)
def test_what_the_owners_other_limits_or_the_ledger_refuse_is_one_line(ward, line, message):
    (ward.folder / "gone.db.begun").touch()
    key = line.partition(" ")[0]
    ward.device.write_text(re.sub(rf"(?m)^{key} = .*\n", "", ward.device.read_text()))
    ward.limit(line)
    before = ward.files
    done = ward.accept("--yes")
    assert (done.exit_code, done.stdout) == (1, "")
    (said,) = done.stderr.splitlines()
    assert message in said and ward.files == before


def test_what_it_cannot_read_or_write_is_one_line(ward, monkeypatch):
    before = ward.files
    ward.device.write_bytes(before["device.toml"].replace(b"plans =", b'"plans" ='))
    said = refused("device accept", ward.new / "run.toml", ward.folder)
    assert said == f"{ward.device}: most_epsilon and plans must each begin a line"
    assert "cannot be read: No such file" in refused("device accept", "nowhere.toml", ward.folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    said = refused("device accept", ward.new / "run.toml", ward.folder)
    assert said == f"the account that owns {ward.device} must run this: sudo -u shufl"
