"""What `shufl provision` makes: a folder for each site, certificates, and clear refusals."""

import datetime
import hashlib
import json
import os
import re
import signal
import sys
import tomllib
from contextlib import nullcontext

import numpy as np
import pytest
import tomli_w
from cryptography import x509

from run_world import invoke, json_lines, refused
from shufl.accounting import PrivacyPlan
from shufl.clients import RoundRefused, load_device
from shufl.deploy import server_app
from shufl.deploy.deployment import Deployment
from shufl.deploy.node import NodeWork, agreed_plan, node_settings
from shufl.deploy.provision import provision
from shufl.deploy.server_app import DeployedEngine, deployed_experiment
from shufl.deploy.server_site import OUTCOME_FILE, STOP_FILE, ServerSite
from shufl.deploy.site_files import NodeSite, load_site
from shufl.deploy.superlink import register
from shufl.learning.config import load
from shufl.learning.data.datasets import load_dataset
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed
from shufl.results.experiment import prepare
from shufl.results.run import Run
from shufl.results.run_folder import make_folder
from shufl.shuffler import Credentials, RoundHeader
from shufl.shuffler.callers import Role, caller_of
from shufl.shuffler.config import load_config
from shufl.shuffler.keys import Authority, Request, make_flower_key
from shufl.shuffler.store.operator_minimum import Floor

RUN = {
    "name": "digits",
    "privacy": {
        "accountant": "blanket",
        "target_epsilon": 2.0,
        "delta": 1e-5,
        "check_in_rate": 0.5,
        "clip_norm": 1.0,
        "rounds": 20,
        "shuffler_blankets": 100.0,
        "cover": True,
    },
    "data": {"dataset": "digits", "users": 100},
    "model": {"name": "mlp"},
    "training": {"learning_rate": 0.5},
}
FLOWERS = ["ward-1.flower", "ward-2.flower"]
DEPLOYMENT = {
    "name": "wards",
    "config": "run.toml",
    "server": {"host": "server.example"},
    "shufflers": [{"name": "shuffler-1", "host": "shuffler.example"}],
    "nodes": [{"name": "ward-1", "users": 30}, {"name": "ward-2", "users": 20}],
}


def configured(base, **sections):
    """Writes run.toml; a section that is given has these keys beside its usual ones."""
    changed = {name: RUN[name] | keys for name, keys in sections.items()}
    (base / "run.toml").write_text(tomli_w.dumps(RUN | changed))
    return base


@pytest.fixture
def base(tmp_path):
    return configured(tmp_path)


def nobody(name, key):
    """Approves nothing."""
    return False


def provisioned(base, approve=lambda name, key: True, days=365, forget=(), **changes):
    path = base / "deployment.toml"
    path.write_text(tomli_w.dumps(DEPLOYMENT | changes))
    return provision(
        Deployment.of_file(path), base, base / "sites", approve, days=days, forget=forget
    )


def request_everything(base, *nodes):
    keys = {name: base / "sites" / name / "keys" for name in ("server", "shuffler-1", *nodes)}
    for name in ("server", "superlink"):
        Request.create(name).write(keys["server"])
    for name in ("shuffler-1", *nodes):
        Request.create(name).write(keys[name])
    for name in nodes:
        make_flower_key(keys[name])
    return keys


def enrolled(base, **changes):
    """Folders of all sites, with keys and certificates; returns the folders of keys."""
    provisioned(base, **changes)
    keys = request_everything(base, "ward-1", "ward-2")
    provisioned(base, **changes)
    return keys


def held(keys, name="ward-1"):
    """The credentials in a party's folder of keys."""
    return Credentials.read(keys, name)


def settings_of(base, site="ward-1"):
    """What a node's process reads in its folder."""
    folder = base / "sites" / site
    return node_settings(load_site(folder / "node.toml", NodeSite), folder)


def plan_at(base, site="server"):
    return agreed_plan(load(str(base / "sites" / site / "run.toml")))


def change(path, old, new):
    """Puts another text into a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_requests_that_have_come_are_signed_for_what_the_deployment_says(base):
    first = provisioned(base)
    assert first.made == ["server", "shuffler-1", "ward-1", "ward-2"]
    assert len(first.waiting) == 5
    keys = request_everything(base, "ward-1", "ward-2")
    second = provisioned(base)
    assert (second.made, second.waiting) == ([], [])
    assert set(second.signed) == {*keys, "superlink", *FLOWERS}
    node = caller_of(held(keys["ward-2"], "ward-2").certificate)
    assert (node.role, node.name, node.users) == (Role.NODE, "ward-2", 20)
    assert caller_of(held(keys["server"], "server").certificate).role is Role.SERVER
    with pytest.raises(ValueError, match="not issued by"):  # Flower's is another authority
        held(keys["server"], "superlink")
    registered = (base / "sites/server/nodes").glob("*.pub")
    assert {path.name for path in registered} == {"ward-1.pub", "ward-2.pub"}


def test_what_nobody_has_approved_is_not_signed(base):
    """A request, and a node's key for Flower; also a new one that takes the place of the old."""
    provisioned(base)
    keys = request_everything(base, "ward-1", "ward-2")
    asked: dict[str, str] = {}

    def only_the_server(name, key):
        asked[name] = key
        return name == "server"

    done = provisioned(base, only_the_server)
    assert done.signed == ["server"]
    assert list(done.unapproved) == ["superlink", "shuffler-1", "ward-1", "ward-2", *FLOWERS]
    assert asked["ward-1"] == Request.read(keys["ward-1"] / "ward-1.csr").fingerprint
    assert not (keys["ward-1"] / "ward-1.pem").exists()
    assert not list((base / "sites/server/nodes").glob("*.pub"))
    assert set(provisioned(base).signed) == {*done.unapproved}
    assert not provisioned(base, only_the_server).unapproved  # what is there is not asked for again
    (keys["ward-1"] / "flower.pub").write_bytes(b"another\n")
    assert list(provisioned(base, only_the_server).unapproved) == ["ward-1.flower"]
    assert (base / "sites/server/nodes/ward-1.pub").read_bytes() != b"another\n"
    printed = invoke("keys flower", base).stdout
    key = hashlib.sha256((base / "flower.pub").read_bytes()).hexdigest()
    assert f"key {key}: the authority must be shown the same\n" in printed


def unasked(name, key):
    raise AssertionError(f"{name} was asked for")


def test_who_asks_anew_with_the_same_key_gets_another_certificate_unasked(base):
    """As often as there is a new request; a certificate that lies there proves nothing."""
    keys = enrolled(base, days=30)["ward-1"]
    before = held(keys)
    assert provisioned(base, unasked).signed == []
    Request.renew(keys, "ward-1")
    assert provisioned(base, unasked).signed == ["ward-1"]
    assert provisioned(base, unasked).signed == []
    after = held(keys)
    assert after.private_key == before.private_key
    ends = [ends_of(each.certificate) for each in (before, after)]
    assert ends[1] - ends[0] > datetime.timedelta(days=250)
    # Somebody else's key, with a certificate of it beside it, which no authority has signed.
    (keys / "ward-1.csr").unlink()
    (keys / "ward-1.key").unlink()
    Request.create("ward-1").write(keys)
    own = Authority.create().sign(Request.read(keys / "ward-1.csr"), Role.NODE, users=30)
    (keys / "ward-1.pem").write_bytes(own)
    unsigned = provisioned(base, nobody)
    assert (unsigned.signed, list(unsigned.unapproved)) == ([], ["ward-1"])
    done = provisioned(base)  # approved: the new key takes its place
    assert (done.signed, len(done.to_withdraw)) == (["ward-1"], 2)
    assert done.to_withdraw[1] == after.fingerprint
    (keys / "ward-1.key").write_bytes(before.private_key)
    stolen = Request.renew(keys, "ward-1")
    unsigned = provisioned(base, nobody)
    assert unsigned.unapproved == {"ward-1": stolen.fingerprint}


def test_a_certificate_that_says_what_no_longer_holds_is_to_be_withdrawn(base):
    """Else a node would report at its former shuffler too, or for its former users."""
    keys = enrolled(base)
    assert provisioned(base).short == {}
    before = {name: held(keys[name], name) for name in ("ward-1", "ward-2")}
    changed = {
        "shufflers": [*DEPLOYMENT["shufflers"], {"name": "shuffler-2", "host": "other.example"}]
    }
    for name in before:
        Request.renew(keys[name], name)
    done = provisioned(base, unasked, **changed)
    assert done.short == {"shuffler-2": 20}  # where 50 users are expected, and 25 needed
    assert {*done.signed} == {*before}
    assert done.to_withdraw == [before["ward-2"].fingerprint]
    says = [caller_of(held(keys[name], name).certificate) for name in before]
    assert [each.shuffler for each in says] == ["shuffler-1", "shuffler-2"]
    changed["nodes"] = [{"name": "ward-1", "users": 1}, DEPLOYMENT["nodes"][1]]
    Request.renew(keys["ward-1"], "ward-1")
    done = provisioned(base, unasked, **changed)
    assert before["ward-1"].fingerprint in done.to_withdraw


def test_a_key_that_may_be_stolen_is_known_no_more(base):
    """All its valid certificates are named, which withdraw it at the shufflers."""
    keys = enrolled(base)["ward-1"]
    first = held(keys).fingerprint
    Request.renew(keys, "ward-1")
    provisioned(base, unasked)
    second = held(keys).fingerprint
    done = provisioned(base, unasked, forget=["ward-1"])
    assert done.to_withdraw == [first, second]
    Request.renew(keys, "ward-1")
    for _ in range(2):
        unsigned = provisioned(base, nobody)
        assert ({*unsigned.unapproved}, unsigned.to_withdraw) == ({"ward-1"}, [first, second])
    with pytest.raises(ConfigError, match=r"--forget must name a key that was signed .*ward-1$"):
        provisioned(base, forget=["ward-1"])
    done = provisioned(base, nobody, forget=["shuffler-1"])
    assert done.to_withdraw == [first, second]  # a shuffler's own cannot be withdrawn


def test_what_is_to_be_withdrawn_is_said_though_the_call_before_ended_early(base):
    keys = enrolled(base)
    before = held(keys["ward-1"]).fingerprint
    (keys["ward-2"] / "ward-2.csr").write_text("no request")
    with pytest.raises(ValueError, match=r"ward-2\.csr"):
        provisioned(base, forget=["ward-1"])
    Request.create("ward-2").write(base)
    (base / "ward-2.csr").replace(keys["ward-2"] / "ward-2.csr")
    assert provisioned(base, nobody).to_withdraw == [before]


def test_after_the_authority_s_disk_is_lost_everybody_is_enrolled_anew(base):
    """As docs/recovery.md says: with the keys that parties have, read out once more."""
    keys = enrolled(base)
    before = {name: held(keys[name], name) for name in keys}
    lost = base / "sites"
    lost.rename(base / "lost")
    provisioned(base)
    for name, folder in keys.items():
        old = base / "lost" / name / "keys"
        for path in (*old.glob("*.key"), *old.glob("flower.pub")):  # what the party has
            (folder / path.name).write_bytes(path.read_bytes())
        Request.renew(folder, name)
    Request.renew(keys["server"], "superlink")
    asked = provisioned(base, nobody).unapproved
    assert {*asked} == {"superlink", *keys, *FLOWERS}
    assert {*provisioned(base).signed} == {*asked}
    for name, folder in keys.items():
        after = held(folder, name)
        assert after.private_key == before[name].private_key
        assert after.authority != before[name].authority


def test_the_authority_keeps_a_log_of_what_it_did(base):
    keys = enrolled(base)
    nodes = [DEPLOYMENT["nodes"][0], DEPLOYMENT["nodes"][1] | {"withdrawn": True}]
    provisioned(base, nodes=nodes)
    log = base / "sites/authority/log.jsonl"
    lines = json_lines(log)
    assert all(line["by"] and line["time"].endswith("Z") for line in lines)
    wrote = {name: hash for line in lines for name, hash in line.get("files", {}).items()}
    files = {name: hashlib.sha256((base / "sites" / name).read_bytes()) for name in wrote}
    assert wrote == {name: content.hexdigest() for name, content in files.items()}
    assert {"server/run.toml", "ward-2/device.toml", "shuffler-1/revoked"} <= {*wrote}
    lines = [line for line in lines if line["did"] != "wrote"]
    told = [(line["did"], line["name"]) for line in lines]
    assert told[:2] == [("made", "authority"), ("made", "authority-flower")]
    assert set(told[2:7]) == {("signed", name) for name in (*keys, "superlink")}
    assert told[7:] == [*(("told the server of", name) for name in FLOWERS), ("withdrew", "ward-2")]
    (node,) = [line for line in lines if (line["did"], line["name"]) == ("signed", "ward-1")]
    assert node["certificate"] == held(keys["ward-1"]).fingerprint
    assert node["key"] == Request.read(keys["ward-1"] / "ward-1.csr").fingerprint
    with log.open("a") as file:
        file.write('{"did": "sig')
    with pytest.raises(ConfigError, match=r"log.jsonl: line 15 is damaged; remove it, or restore"):
        provisioned(base)


def test_certificates_do_not_all_end_on_one_day_and_say_when_they_end_soon(base):
    keys = enrolled(base, days=100)
    assert provisioned(base).ending == {}
    now = datetime.datetime.now(datetime.UTC)
    paths = [folder / f"{name}.pem" for name, folder in keys.items()]
    left = [(ends_of(path.read_bytes()) - now).days for path in paths]
    assert all(89 <= each <= 100 for each in left) and len(set(left)) > 1
    path, authority = keys["ward-2"] / "ward-2.pem", Authority.read(base / "sites/authority")
    request = Request.read(path.with_suffix(".csr"))
    path.write_bytes(authority.sign(request, Role.NODE, users=20, days=0.0001))
    assert [*provisioned(base).ending] == ["ward-2"]
    out = invoke("provision", base / "deployment.toml").stdout
    assert "ending  ward-2: its certificate is valid until " in out
    assert "shufl keys renew keys --name ward-2" in out
    said = refused("provision", base / "deployment.toml", "--days", "0")
    assert said == "--days lies in (0, 36500], got 0"


def ends_of(certificate):
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def test_every_site_has_files_that_its_process_reads(base):
    keys = enrolled(base)
    sites = base / "sites"
    assert load_config(sites / "shuffler-1/shuffler.toml").listen == "127.0.0.1:9001"
    nginx = (sites / "shuffler-1/nginx.conf").read_text()
    assert "listen [::]:9000 ipv6only=off;" in nginx and "proxy_pass 127.0.0.1:9001;" in nginx
    assert load_site(sites / "server/server.toml", ServerSite).credentials == Credentials.read(
        keys["server"], "server"
    )
    settings = settings_of(base, "ward-2")
    assert settings.plan == plan_at(base)
    assert (settings.policy.number, settings.policy.users) == (1, 20)
    features, labels = settings.load_users()(19)
    assert features.shape[1:] == (1, 8, 8) and len(labels) == len(features)


def test_files_explain_themselves_and_what_they_propose_is_taken(base):
    provisioned(base)
    sites = base / "sites"
    shuffler = sites / "shuffler-1/shuffler.toml"
    text = shuffler.read_text()
    proposed = re.sub(r"^# (metrics|\[floor\]|least_|most_)", r"\1", text, flags=re.MULTILINE)
    shuffler.write_text(proposed)
    plan, config = plan_at(base), load_config(shuffler)
    config.floor.check(plan)
    assert config.floor == Floor(least_blankets=100, least_batch=plan.minimum_batch, most_rounds=20)
    assert config.metrics == "127.0.0.1:9464"
    device = sites / "ward-1/device.toml"
    device.write_text(device.read_text().replace("# least_work_seconds", "least_work_seconds"))
    limits = load_device(device).limits
    assert limits.least_work_seconds == plan.window.work_until
    limits.check(plan)
    for name in ("server/server.toml", "ward-1/node.toml", "ward-1/run.toml", "server/run.toml"):
        assert (sites / name).read_text().startswith("# W")


def test_a_second_deployment_has_sites_on_the_same_machine(base):
    """In another folder, with units of other names."""
    provisioned(base, folder="/srv/wards")
    server = base / "sites/server"
    units = {path.name for path in server.glob("*.service")}
    assert units == {"wards-superlink.service", "wards-run.service"}
    run = (server / "wards-run.service").read_text()
    assert "ExecStart=/srv/wards/.venv/bin/shufl run run.toml --on wards --continue\n" in run
    assert "After=network-online.target wards-superlink.service\n" in run
    texts = "".join(contents(server)[path].decode() for path in server.glob("*.*"))
    assert "/srv/shufl" not in texts and "shufl-superlink" not in texts
    with pytest.raises(ConfigError, match="folder must be an absolute path"):
        provisioned(base, folder="srv/wards")


@pytest.mark.slow
def test_modules_of_yours_come_to_whoever_runs_them(base):
    model = "from shufl.learning.models import mlp\n\nwide = mlp\n"
    records = "def of_ward(user):\n    return features[user], labels[user]\n"
    (base / "own").mkdir()
    (base / "own/models.py").write_text(model)
    (base / "own_records.py").write_text(records)
    configured(base, model={"name": "own.models:wide"})
    first = {"name": "ward-1", "users": 30, "data": "own_records:of_ward"}
    sys.path.append(str(base))
    try:
        provisioned(base, nodes=[first, {"name": "ward-2", "users": 20}])
    finally:
        sys.path.remove(str(base))
    sites = base / "sites"
    modules = {str(path.relative_to(sites)): path.read_text() for path in sites.rglob("*.py")}
    assert modules == {
        "server/own/models.py": model,
        "ward-1/own/models.py": model,
        "ward-1/own_records.py": records,
        "ward-2/own/models.py": model,
    }


def test_a_nodes_owner_accepts_this_plan_and_one_run_of_it(base):
    provisioned(base)
    plan = plan_at(base, "ward-1")
    ledger = load_device(base / "sites/ward-1/device.toml")
    ledger.offer(RoundHeader("one", 1, "m", plan.digest(), "k"), plan, plan.rounds)
    with pytest.raises(RoundRefused, match="accepts epsilon up to"):
        ledger.offer(RoundHeader("two", 1, "m", plan.digest(), "k"), plan, plan.rounds)
    other = PrivacyPlan.from_json(plan.to_json()).replace(check_in_rate=0.4)
    with pytest.raises(RoundRefused, match="has not accepted the plan"):
        ledger.limits.check(other)


def test_the_server_is_told_for_how_many_users_each_node_speaks(base):
    enrolled(base)
    server = base / "sites/server"
    site = load_site(server / "server.toml", ServerSite)
    assert site.agreed == {0: ("ward-1", 30, None), 1: ("ward-2", 20, None)}
    gone, left, new = (
        {"name": "ward-1", "users": 30, "withdrawn": True},
        {"name": "ward-2", "users": 20},
        {"name": "ward-3", "users": 50},
    )
    provisioned(base, nodes=[gone, left, new])
    assert site.agreed == {1: ("ward-2", 20, None), 2: ("ward-3", 50, None)}
    assert [path.name for path in server.glob("nodes/*.pub")] == ["ward-2.pub"]
    (server / "nodes/agreed.toml").write_text("nodes = [{ name = 'ward-1', number = 0 }]")
    with pytest.raises(ConfigError, match=r"agreed\.toml: nodes\.0\.users is missing"):
        _ = site.agreed


def test_a_node_that_is_added_changes_nobody_elses_folder(base):
    enrolled(base)
    (base / "sites/server/nodes/agreed.toml").unlink()  # the one file that says who takes part
    log = base / "sites/authority/log.jsonl"
    before = contents(base / "sites")
    del before[log]
    added = provisioned(base, nodes=[*DEPLOYMENT["nodes"], {"name": "ward-3", "users": 50}])
    assert (added.made, added.changed, added.kept) == (["ward-3"], {}, [])
    after = contents(base / "sites")
    del after[log]
    assert {path: after[path] for path in before} == before
    assert {path.relative_to(base / "sites").parts[0] for path in set(after) - set(before)} == {
        "server",
        "ward-3",
    }
    site = load_site(base / "sites/ward-3/node.toml", NodeSite)
    assert (site.number, site.first_user) == (2, 50)


def test_requests_and_authorities_that_do_not_belong_are_refused(base):
    provisioned(base)
    keys = base / "sites/ward-1/keys"
    Request.create("ward-2").write(keys)
    (keys / "ward-2.csr").rename(keys / "ward-1.csr")
    with pytest.raises(ConfigError, match="a request for ward-1 is due here, got ward-2"):
        provisioned(base)
    (keys / "ward-1.csr").unlink()
    (keys / "authority.pem").write_bytes(Authority.create().certificate)
    with pytest.raises(ConfigError, match="is of another authority than the one here"):
        provisioned(base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sever": {}}, "unknown key sever; did you mean server"),
        ({"server": {"host": "https://a.b"}}, "server.host must be a DNS name or an IP address"),
        ({"server": {"host": "a", "port": 70000}}, "server.port must be a whole number"),
        ({"nodes": []}, "nodes must be one table of values at least, got"),
        ({"nodes": {"name": "a"}}, r"table of values or several, each below \[\[nodes\]\], got"),
        ({"nodes": [{"name": "server"}]}, "every site has a name of its own, got server twice"),
        ({"nodes": [{"name": "superlink"}]}, "must be another than superlink, which is taken"),
        ({"nodes": [{"name": "w", "withdrawn": True}]}, "one node at least must not be withdrawn"),
        ({"nodes": [{"name": "a b"}]}, "nodes.0.name must be at most 40 letters"),
        ({"nodes": [{"name": "w", "users": 101}]}, "the nodes speak for 101 users, data.users"),
        ({"config": "nowhere.toml"}, "nowhere.toml cannot be read"),
    ],
)
def test_mistakes_in_a_deployment_are_one_line_before_any_work(base, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        provisioned(base, **changes)
    assert "\n" not in str(error.value)
    assert not (base / "sites").exists()


@pytest.mark.slow
def test_the_command_says_what_it_waits_for(base):
    file = base / "deployment.toml"
    file.write_text(tomli_w.dumps(DEPLOYMENT))
    done = invoke("provision", file)
    assert done.exit_code == 0, done.stderr
    assert "README.md says what to do there" in done.stdout
    assert f"waiting for {base}/sites/ward-2/keys/ward-2.csr" in done.stdout
    keys = request_everything(base, "ward-1", "ward-2")
    key = Request.read(keys["ward-1"] / "ward-1.csr").fingerprint
    said = invoke("provision", file).stdout
    assert f"not signed ward-1: its key is {key}; --approve ward-1=… what the party reads" in said
    came = f"and the key that has come is {key}: it may be another's"
    wrong = refused("provision", file, "--approve", "ward-1=12ab")
    assert wrong == f"--approve ward-1: the party has read out 12ab, {came}"
    typo = refused("provision", file, "--approve", f"ward1={key}")
    assert typo.startswith("--approve must name one of server, shuffler-1, ")
    assert typo.endswith(", ward-2.flower, got ward1")
    certificates = [keys[name] / f"{name}.pem" for name in ("ward-1", "ward-2")]
    assert not certificates[0].exists()
    right = invoke("provision", file, "--approve", f"ward-1={key.upper()}")
    assert "signed  ward-1\n" in right.stdout
    assert [path.exists() for path in certificates] == [True, False]
    file.write_text(tomli_w.dumps(DEPLOYMENT | {"nodes": [{"name": "ward-1", "users": 1}]}))
    few = invoke("provision", file).stdout
    assert "too few shuffler-1: its nodes speak for 1 users, and no release is made of so " in few
    assert "add nodes, or lower data.users or privacy.minimum_batch" in few
    file.write_text("name =")
    refused("provision", file)


def test_records_from_a_folder_are_checked_before_any_round(base):
    """`test_node_records.py` has what they may be."""
    enrolled(base)
    folder = base / "sites/ward-1"
    change(folder / "node.toml", '"simulated"', '"records"')
    change(folder / "node.toml", "users = 30", "users = 2")
    (folder / "records").mkdir()
    for user in range(2):
        with pytest.raises(ConfigError, match=f"the records of user {user} cannot be read"):
            settings_of(base)
        features, labels = np.full((2, 1, 8, 8), 0.5), np.array([1, 2])
        np.savez(folder / "records" / f"{user}.npz", features=features, labels=labels)
    features, labels = settings_of(base).load_users()(1)
    assert features.shape == (2, 1, 8, 8) and labels.tolist() == [1, 2]


@pytest.mark.slow
def test_a_node_maps_its_own_records_to_the_features_that_the_model_takes(base):
    enrolled(configured(base, data={"features": "scattering"}))
    folder = base / "sites/ward-1"
    text = (folder / "node.toml").read_text()
    own = text.replace('"simulated"', '"records"').replace("users = 30", "users = 1")
    (folder / "records").mkdir()
    raw = np.random.default_rng(1).normal(size=(2, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "records" / "0.npz", features=raw, labels=np.array([1, 2]))
    for users, node in (1, own), (30, text):
        (folder / "node.toml").write_text(node)
        settings = settings_of(base)
        assert settings.policy.users == users
        features, labels = settings.load_users()(0)
        assert features.shape == (len(labels), 81, 2, 2)
        assert settings.make_model()(features).shape == (len(labels), 10)


@pytest.mark.parametrize(
    ("line", "changed", "sections", "message"),
    [
        pytest.param(
            "[model.options]", "[model.options]\nhidden = 450000",
            {"model": {"options": {"hidden": 450_000}}},
            "^model mlp has 33750010 parameters; a report holds at most 33554400$",
            marks=pytest.mark.slow,
        ),
        # The server's code on a node's machine would see who sends.
        ("cover = true", "cover = false", {"privacy": {"cover": False}},
         r"privacy\.cover must be true on real machines"),
    ],
    ids=["model", "cover"],
)  # fmt: skip
def test_what_no_deployment_may_have_is_refused_on_both_sides(
    base, line, changed, sections, message
):
    provisioned(base)
    change(base / "sites/ward-1/run.toml", line, changed)
    with pytest.raises(ConfigError, match=message):
        settings_of(base)
    with pytest.raises(ConfigError, match=message):
        provisioned(configured(base, **sections))


def test_data_that_differ_between_machines_are_refused_on_both_sides(base, monkeypatch):
    """Each loads them anew: with another split, nodes would train on the server's test records."""
    (base / "cuts.py").write_text(
        "import numpy as np\n"
        "from shufl.learning.data.datasets import Dataset\n"
        "def at_random():\n"
        "    x, y = np.random.default_rng().random((200, 4), np.float32), np.arange(200) % 2\n"
        "    return Dataset(x[:150], y[:150], x[150:], y[150:], classes=2)\n"
    )
    monkeypatch.syspath_prepend(base)
    provisioned(configured(base, data={"dataset": "cuts:at_random"}))
    node = load_site(base / "sites/ward-1/node.toml", NodeSite)
    server = load_site(base / "sites/server/server.toml", ServerSite)
    load_dataset.cache_clear()
    message = "data.dataset cuts:at_random differs between calls: it must be the same at every call"
    with pytest.raises(ConfigError, match=message):
        NodeWork.checked(node, base)
    experiment = prepare(load(str(base / "sites/server/run.toml")))
    with pytest.raises(ConfigError, match=message):
        DeployedEngine(experiment, server, grid=None, tell=print)
    load_dataset.cache_clear()


class _Interrupting:
    """Flower's grid after `flwr stop`, or a grid amid which the operator asks to stop."""

    def __init__(self, asked):
        self._asked = asked

    def get_node_ids(self):
        if self._asked is not None:
            self._asked.touch()
        os.kill(os.getpid(), signal.SIGINT)
        return []


@pytest.mark.parametrize("when", ["asked", "amid rounds", "before"])
def test_an_interrupted_run_has_failed_unless_it_was_asked_to_stop(base, when, monkeypatch):
    here = {"shufflers": [{"name": "shuffler-1", "host": "127.0.0.1", "port": 1}]}  # nobody's
    provisioned(base, **here)
    request_everything(base)
    provisioned(base, **here)
    site = load_site(base / "sites/server/server.toml", ServerSite)
    config = load(str(base / "sites/server/run.toml"))
    folder = make_folder(base / "runs", deployed_experiment(config, len(site.shufflers)))
    grid = _Interrupting(folder / STOP_FILE if when == "asked" else None)
    monkeypatch.setattr(server_app, "_PARENT_SECONDS", 0.0)
    monkeypatch.setattr(server_app, "_end_with_parent", lambda parent: None)
    if when == "before":
        monkeypatch.setattr(Run, "of", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Flower has a handler of its own too
    try:
        with nullcontext() if when == "asked" else pytest.raises(RuntimeError):
            server_app.play(folder, site, grid, "1")
    finally:
        signal.signal(signal.SIGINT, before)
    outcome = json.loads((folder / OUTCOME_FILE).read_text())
    ended = {"error": "the run was ended from outside, as by flwr stop"}
    assert outcome == {"attempt": "1"} | ({"stopped_by": "interrupt"} if when == "asked" else ended)


def test_sums_need_a_word_that_the_nodes_software_is_trusted(base):
    """Then the owner's file names the plan's accountant, without which its device takes no part."""
    sums = {"mixing": "sum", "shuffler_blankets": 0.0, "accountant": "sum-central"}
    configured(base, privacy=sums)
    with pytest.raises(ConfigError, match=r"trusted_nodes must be true .* got false"):
        provisioned(base)
    assert not (base / "sites").exists()
    provisioned(base, trusted_nodes=True)
    assert 'accountant = "sum-central"' in (base / "sites/ward-1/device.toml").read_text()
    run = base / "sites/ward-1/run.toml"
    change(run, "noise_multiplier = 0.0", "noise_multiplier = 1e-3")
    message = r"noise_multiplier must be 0 or at least .*nodes of 30 users"
    with pytest.raises(ConfigError, match=message):
        settings_of(base)


@pytest.mark.parametrize("key", ["data.most_records", "window"])
def test_a_node_needs_the_window_and_how_many_records_count(base, key):
    provisioned(base)
    run = base / "sites/ward-1/run.toml"
    config = tomllib.loads(run.read_text())
    section, _, name = key.partition(".")
    del (config[section] if name else config)[name or section]
    run.write_text(tomli_w.dumps(config))
    with pytest.raises(ConfigError, match=f"^{key} is left open: a node needs the file that"):
        settings_of(base)


@pytest.mark.slow
def test_what_nobody_has_changed_is_made_anew_and_all_else_is_kept_and_named(base):
    """A folder of an earlier version has no lines in the log; then what is as made is known."""
    provisioned(base)
    keys, sites, log = request_everything(base, "ward-1"), base / "sites", "authority/log.jsonl"
    assert provisioned(base).changed == {}
    assert (keys["ward-1"] / "ward-1.pem").exists()  # so its owner's file is not made anew
    (sites / "shuffler-1/revoked").write_text("ward-9\n")  # which its operator alone writes
    owners = (sites / "ward-1/device.toml").read_bytes()
    change(sites / "server/server.toml", "round_timeout = 120.0", "round_timeout = 90.0")
    lines = (sites / log).read_text().splitlines(keepends=True)
    (sites / log).write_text("".join(each for each in lines if '"did": "wrote"' not in each))
    provisioned(base)
    slower = {"work_until": 90.0, "send_after": 95.0}
    configured(base, privacy={"rounds": 10})
    run = tomllib.loads((base / "run.toml").read_text()) | {"window": slower}
    (base / "run.toml").write_text(tomli_w.dumps(run))
    server = DEPLOYMENT["server"] | {"patience": 60.0}
    done = provisioned(base, server=server)
    node = ["run.toml", "shufl-node.service"]
    assert done.changed == {
        "server": ["run.toml", "shufl-run.service"],
        "shuffler-1": ["shuffler.toml"],
        "ward-1": node,
        "ward-2": [node[0], "device.toml", node[1]],  # which was signed nothing so far
    }
    assert done.kept == ["server/server.toml"]
    assert plan_at(base, "ward-2") == plan_at(base) and plan_at(base).rounds == 10
    assert load_device(sites / "ward-2/device.toml").limits.plans == (plan_at(base).digest(),)
    assert (sites / "ward-1/device.toml").read_bytes() == owners
    assert provisioned(base, server=server).changed == {}
    configured(base)
    said = invoke("provision", base / "deployment.toml").stdout
    assert f"changed {sites}/ward-1: run.toml, shufl-node.service\n" in said
    assert said.count("docs/second-run.md says what it does") == 1
    kept = rf"kept    {sites}/server/server.toml: .* to have it made anew, remove it and run this"
    assert re.search(kept, said)
    (sites / "server/server.toml").unlink()
    done = provisioned(base, server=server)
    assert (done.kept, done.changed) == ([], {"server": ["server.toml"]})
    assert (sites / "shuffler-1/revoked").read_text() == "ward-9\n"
    assert load_site(sites / "server/server.toml", ServerSite).patience == 60.0


def test_two_nodes_with_one_key_for_flower_are_refused_before_any_work(base):
    """Flower would tell them apart by nothing; also where the key's comment is another."""
    keys = enrolled(base)
    key = (keys["ward-1"] / "flower.pub").read_bytes()
    (keys["ward-2"] / "flower.pub").write_bytes(key.strip() + b" of ward-2\n")
    before = contents(base / "sites")
    said = refused("provision", base / "deployment.toml")
    paths = [base / f"sites/ward-{number}/keys/flower.pub" for number in (2, 1)]
    told = "is the same key as {}: each node makes its own (shufl keys flower)"
    assert said == f"{paths[0]} {told.format(paths[1])}"
    assert contents(base / "sites") == before


def public_file(base):
    """Writes a file of 40 patients to train on, and 10 for testing; its `[data.dataset]`."""
    lines = [f"{number // 2},{40 + number % 21},{number % 2}" for number in range(100)]
    (base / "public.csv").write_text("patient,age,ill\n" + "\n".join(lines) + "\n")
    return {
        "file": "public.csv", "user": "patient", "label": "ill", "features": ["age"],
        "classes": 2, "mean": [50.0], "std": [10.0],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("data", "users"), [("ward.csv", 100), ("simulated", 40)])
def test_a_file_is_named_beside_run_toml_and_bounds_the_users_of_nodes_that_read_it(
    base, data, users
):
    """Where nodes have records of their own, the server's file says nothing of how many."""
    configured(base, data={"dataset": public_file(base), "users": users})
    provisioned(base, nodes=[{"name": "ward-1", "users": 40, "data": data}])
    sites = base / "sites"
    told = {name: "Copy `public.csv` here" in (sites / name / "README.md").read_text()
            for name in ("server", "ward-1", "shuffler-1")}  # fmt: skip
    assert told == {"server": True, "ward-1": data == "simulated", "shuffler-1": False}
    for path in sites.rglob("*"):
        assert not path.is_file() or str(base) not in path.read_text(), path
    config = load(str(sites / "server/run.toml"))
    with pytest.raises(ConfigError, match=r"/sites/server/public.csv cannot be read .*: No such"):
        load_dataset(config.data.dataset)
    here = base / "here"
    provision(Deployment.of_file(base / "deployment.toml"), base, here, nobody, in_place=True)
    assert load(str(here / "server/run.toml")).data.dataset.file == str(base / "public.csv")
    (base / "public.csv").rename(sites / "server/public.csv")
    assert prepare(config, real_nodes=True).plan.users == users
    more = config.model_copy(update={"data": config.data.model_copy(update={"users": 41})})
    with pytest.raises(ConfigError, match=r"data.users must lie in \[1, 40\]"):
        prepare(more)
    (sites / "server/public.csv").rename(base / "public.csv")
    configured(base, data={"dataset": public_file(base), "users": 41})
    nodes = [{"name": "ward-1", "users": 40}]
    with pytest.raises(ConfigError, match=r"data.users must lie in \[1, 40\]"):
        provisioned(base, nodes=nodes)


@pytest.mark.slow
def test_a_node_reads_a_file_whose_columns_the_configuration_names(base, caplog):
    """The server's file is public; a ward's has patients of its own."""
    configured(base, data={"dataset": public_file(base), "users": 40})
    nodes = [{"name": "ward-1", "users": 3, "data": "ward.csv"}, {"name": "ward-2", "users": 37}]
    enrolled(base, nodes=nodes)
    folder = base / "sites/ward-1"

    def records(*lines):
        (folder / "ward.csv").write_text("\n".join(["ill,patient,other,age", *lines]))
        return settings_of(base).load_users()

    with caplog.at_level("INFO"):
        read = records("1,b,x,60", "0,a,y,40", "1,c,z,50", "0,b,x,55")
    assert "3 users by column patient of ward.csv" in caplog.messages
    assert [labels.tolist() for _, labels in map(read, range(3))] == [[1, 0], [0], [1]]
    assert [features.flatten().tolist() for features, _ in map(read, range(3))] == [
        [1.0, 0.5], [-1.0], [0.0]
    ]  # fmt: skip
    for lines, message in (
        (["1,b,x,60", "0,a,y,40"], "users must be 2, those of ward.csv, got 3"),
        (["1,a,x,60", "2,b,y,50", "0,c,y,50"], "column ill must be from 0 to 1, got others at"),
    ):
        with pytest.raises(ConfigError, match=message):
            records(*lines)
    assert load_site(base / "sites/ward-2/node.toml", NodeSite).data == "simulated"


@pytest.mark.parametrize(
    ("host", "listens"), [("2001:db8::7", "[::]:9000 ipv6only=off"), ("192.0.2.7", "0.0.0.0:9000")]
)
def test_a_shuffler_whose_host_is_an_address_is_listened_for_there(base, host, listens):
    provisioned(base, shufflers=[DEPLOYMENT["shufflers"][0] | {"host": host}])
    assert f"listen {listens};" in (base / "sites/shuffler-1/nginx.conf").read_text()


@pytest.mark.slow
def test_what_flower_does_not_do_is_one_line_of_the_server(base, warm_deployment):
    """With no SuperLink at its address, whose loss Flower's command tells and ends well."""
    enrolled(base)
    with pytest.raises(EngineFailed, match=r"^flwr supernode list wards: .*") as failed:
        list(register(base / "sites/server/server.toml"))
    assert "\n" not in str(failed.value)
