"""Files that 0.1.0 wrote (`tests/fixtures/0.1.0`): this version reads them and goes on from them.

Commands and the public API alone are used, so that this file stays as it is when modules move.
"""

import csv
import importlib.metadata
import json
import shutil
import sqlite3
import struct
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import run_world
import shufl
from run_world import invoke, json_lines, model_of, summary_of
from shufl.clients import RoundRefused, load_device
from shufl.shuffler import RoundHeader

FIXTURES = Path(__file__).parents[1] / "fixtures/0.1.0"
HELD_OUT = "shufl.simulator.data.held_out:mnist"
DEPLOYED = "deployment/sites/server/runs/wards"
ROUNDS = {"runs/finished": 5, "runs/interrupted": 3, "runs/held-out": 3, DEPLOYED: 2}
"""Of each run folder, how many rounds are spent."""


@pytest.fixture
def old(tmp_path):
    """A copy of the files, which a test may change."""
    return shutil.copytree(FIXTURES, tmp_path / "old")


def command(*arguments, code=0):
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return done


def told(*arguments, code=0):
    """What a command prints as JSON."""
    return json.loads(command(*arguments, "--json", code=code).stdout)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Run folders


@pytest.mark.slow
@pytest.mark.parametrize("run", ROUNDS)
def test_a_runs_rounds_cost_what_they_cost(old, run):
    """By the accountants that have not changed since; others may state a smaller ε by now."""
    rows = json_lines(old / run / "metrics.jsonl")
    assert len(rows) == ROUNDS[run]
    found = told("account", old / run, "--accountant", "all")["epsilon"]
    before = rows[-1]["epsilons"]
    assert {*found} >= {*before}
    unchanged = {"theorem3", "rdp", "local"}.intersection(before)
    assert unchanged
    for accountant in unchanged:
        expected = before[accountant]
        assert found[accountant]["epsilon"] == pytest.approx(expected, rel=1e-6)


def test_a_finished_run_is_read_back(old):
    folder = old / "runs/finished"
    summary = summary_of(folder)
    run = shufl.load_run(folder)
    assert (len(run.metrics), run.stopped_by) == (5, "budget")
    assert (run.score_name, run.score) == ("accuracy", summary["accuracy"])
    assert json.loads(run.plan.to_json()) == json.loads((folder / "plan.json").read_bytes())
    state, kept = run.model.state_dict(), model_of(folder)
    assert {*state} == {*kept}
    assert all(torch.equal(state[name], value) for name, value in kept.items())


@pytest.mark.parametrize(
    ("run", "allowed", "state", "why"),
    [
        ("runs/finished", 5, "ended", "budget"),
        ("runs/interrupted", 5, "interrupted", ""),
        (DEPLOYED, 3, "interrupted", "interrupt"),
    ],
)
def test_the_status_of_a_run_is_known(old, run, allowed, state, why):
    found = told("status", old / run)
    assert (found["state"], found["why"]) == (state, why)
    assert (found["rounds"], found["allowed"]) == (ROUNDS[run], allowed)
    nodes = [(node["name"], node["number"], node["users"]) for node in found["nodes"]]
    assert nodes == ([("ward-1", 0, 3)] if run == DEPLOYED else [])


@pytest.mark.slow
def test_a_run_has_a_page(old):
    command("report", old / "runs/finished")
    page = (old / "runs/finished/report.html").read_text()
    assert "18.06%" in page and "shufl run finished.toml --runs runs" in page
    assert "d016f90e98" in page


def other_version():
    """Of the packages that a resumption needs as they were, one that has another version here."""
    summary = summary_of(FIXTURES / "runs/finished")
    for name in ("shufl", "torch", "numpy"):
        before, here = summary["versions"][name], importlib.metadata.version(name)
        if before != here:
            return f"{name} {before}, it cannot go on with {here}"
    return None


def resumed(folder):
    """Whether `shufl run --resume` has gone on to the end. With another version it must refuse."""
    before = contents(folder)
    done = run_world.shufl("run", "--resume", folder)
    if other := other_version():
        assert done.returncode == 1 and f"was made with {other}" in done.stderr, done.stderr
        assert contents(folder) == before
        return False
    assert done.returncode == 0, done.stderr
    assert "resumed after round 2; rounds 3 to 3 are spent and played again" in done.stdout
    return True


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_nothing_had_happened(old):
    """In `finished`, 0.1.0 played the same run without an interruption."""
    interrupted, whole = old / "runs/interrupted", old / "runs/finished"
    if not resumed(interrupted):
        return
    rows, expected = (json_lines(each / "metrics.jsonl") for each in (interrupted, whole))
    assert [row["reports"] for row in rows] == [row["reports"] for row in expected]
    losses = [row["loss"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-4)  # another processor
    models = model_of(interrupted), model_of(whole)
    for name, value in models[1].items():
        torch.testing.assert_close(models[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.fixture
def made_up_mnist(tmp_path, monkeypatch):
    """MNIST's files in a cache for this test, with the images that `held-out` was made with.

    Of the 10 060 training records, the last 10 000 are held out.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHUFL_DATA", raising=False)
    raw = tmp_path / "shufl/MNIST/raw"
    raw.mkdir(parents=True)
    images = np.arange(10_060 * 28 * 28).reshape(-1, 28, 28) ** 2 % 251
    for part, records in (("train", 10_060), ("t10k", 10)):
        for what, values in (("images-idx3", images), ("labels-idx1", np.arange(10_060) % 10)):
            sizes = records, *values.shape[1:]
            header = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)
            content = header + values[:records].astype(np.uint8).tobytes()
            (raw / f"{part}-{what}-ubyte").write_bytes(content)
    return raw


@pytest.mark.slow
def test_a_run_on_held_out_records_goes_on_under_the_name_that_they_had(old, made_up_mnist):
    folder = old / "runs/held-out"
    before = json_lines(folder / "metrics.jsonl")
    if resumed(folder):
        rows = json_lines(folder / "metrics.jsonl")
        assert len(rows) == 5 and rows[:3] == before


# Grids


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kept", ["results", "pages"])
def test_rows_of_a_grid_are_not_played_again(old, kept, monkeypatch):
    """They are in the folders of the points, or in the table alone."""
    monkeypatch.chdir(old / "grids")
    before = table(Path("pages/digits-grid.csv"))
    if kept == "results":
        shutil.rmtree("pages")
    else:
        shutil.rmtree("results")
    done = command("experiment", "digits-grid.toml", "--results", "results", "--pages", "pages")
    assert "3 runs, 3 of them already there" in done.stdout
    after = table(Path("pages/digits-grid.csv"))
    assert [new | row for row, new in zip(before, after, strict=True)] == after
    page = Path("pages/digits-grid.md").read_text()
    assert "runs: 3 of 3" in page and "| ours | 10.00 | 9.72 |" in page
    assert "shufl experiment digits-grid.toml at commit d016f90e98, shufl 0.1.0" in page


def test_a_point_on_held_out_records_is_found_under_the_name_that_they_had(old, monkeypatch):
    monkeypatch.chdir(old / "grids")
    grid = tomllib.loads(Path("held-out-grid.toml").read_text())
    assert grid["series"][0]["settings"] == {"data.dataset": HELD_OUT}
    command("report", "results/held-out-grid")
    page = Path("results/held-out-grid/report.html").read_text()
    assert "1 of 1" in page and HELD_OUT in page and "d016f90e98" in page
    assert "Runs that are missing" not in page


# A device


@pytest.fixture
def device(old):
    """The owner's file, and beside it the ledger, made of its dump."""
    restore(old / "device/device.sql")
    return old / "device/device.toml"


def restore(dump):
    """Makes a device's ledger of the statements in a file."""
    rows = sqlite3.connect(dump.with_suffix(".db"))
    rows.executescript(dump.read_text())
    rows.close()


def test_a_device_knows_what_it_was_offered(device):
    found = told("device", "status", device)
    runs = [(run["run"], run["rounds"], run["allotted"]) for run in found["runs"]]
    assert runs == [("first", 3, 50), ("second", 2, 50)]
    assert 0 < found["epsilon"] == sum(run["epsilon"] for run in found["runs"]) < 50


@pytest.mark.parametrize(("number", "last"), [(0, 3), (1, 2)], ids=["first", "second"])
def test_a_device_is_asked_for_the_rounds_that_are_left(device, number, last):
    charged = told("device", "status", device)["epsilon"]
    ledger = load_device(device)
    run = ledger.offered()[number]
    headers = [
        RoundHeader(run.run_id, round, "model", run.plan.digest(), "key")
        for round in (last, last + 1)
    ]
    with pytest.raises(RoundRefused, match=f"round must be above {last}, the last"):
        ledger.offer(headers[0], run.plan, 50)
    ledger.offer(headers[1], run.plan, 50)
    assert load_device(device).offered()[number].last_round == last + 1
    assert told("device", "status", device)["epsilon"] == charged


def test_a_device_keeps_the_secret_of_its_allocation(device):
    """From it follows in which rounds of `second` its users report."""
    key = load_device(device).allocation_key("second")
    assert len(key) == 32
    assert f"X'{key.hex().upper()}'" in device.with_name("device.sql").read_text()


# A deployment


@pytest.fixture
def sites(old):
    """The folders of its sites, whose private keys are not kept; the node's ledger of its dump."""
    restore(old / "deployment/sites/ward-1/device.sql")
    return old / "deployment/sites"


@pytest.mark.parametrize(
    ("site", "looks"),
    [
        ("server", {"certificate's role", "plan", "nodes"}),
        ("shuffler-1", {"configuration"}),
        pytest.param(
            "ward-1",
            {"certificate's role", "plan", "model and records", "owner's limits"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_site_is_understood(sites, site, looks):
    """Its keys are missing, and no other machine answers."""
    findings = told("doctor", sites / site, code=1)
    found = {each["what"].partition(" of ")[0]: each["trouble"] for each in findings}
    assert {look: found[look] for look in looks} == dict.fromkeys(looks, "")


def test_what_was_provisioned_stays_as_it_is(sites):
    """The keys, which are not kept, and the list of nodes with their certificates are new."""
    for keys in sites.glob("*/keys"):
        shutil.rmtree(keys)
    agreed = sites / "server/nodes/agreed.toml"
    agreed.unlink()
    before = contents(sites)
    done = command("provision", sites.parent / "wards.toml")
    assert "\nmade " not in f"\n{done.stdout}"
    after = contents(sites)
    assert {path: after[path] for path in before} == before
    (node,) = tomllib.loads(agreed.read_text())["nodes"]
    assert (node["name"], node["number"], node["users"]) == ("ward-1", 0, 3)


def test_a_node_knows_what_its_ledger_has(sites):
    found = {
        each.name: each.value
        for family in text_string_to_metric_families(command("metrics", sites / "ward-1").stdout)
        for each in family.samples
    }
    status = told("device", "status", sites / "ward-1/device.toml")
    assert [run["rounds"] for run in status["runs"]] == [2]
    assert found["shufl_device_epsilon"] == status["epsilon"] <= found["shufl_device_epsilon_most"]


def test_the_record_of_a_shuffler_has_what_the_node_was_offered(sites):
    record, device = sites / "shuffler-1/record.jsonl", sites / "ward-1/device.toml"
    lines = len(record.read_text().splitlines())
    done = command("record", "verify", record, "--device", device)
    assert done.stdout == f"{lines} lines follow each other\n"
    shorter = record.with_name("shorter")
    shorter.write_text("".join(record.read_text().splitlines(keepends=True)[:3]))
    done = command("record", "verify", shorter, "--device", device, code=2)
    assert "which the device was offered, is not in the record" in done.stderr
