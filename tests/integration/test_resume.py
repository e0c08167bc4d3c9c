"""`shufl run --resume`: real runs, really killed, end as if nothing had happened."""

import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from run_world import (
    json_lines,
    only_folder,
    same_model,
    shufl,
    tiny_config,
)
from shufl.accounting import Ledger, LedgerError
from shufl.cli.__main__ import app
from shufl.learning.config import ConfigError, load
from shufl.results.rows import MetricsError
from shufl.results.run import Run
from shufl.server import CheckpointError, load_checkpoint
from shufl.simulator.engines.vectorised import VectorisedEngine
from tiny_disk import tiny_disk_at

ROUNDS = 30
SETTINGS = [
    "simulation.engine=vectorised", "privacy.target_epsilon=1e9", f"privacy.rounds={ROUNDS}",
    "training.checkpoint_every=7", "training.evaluate_every=3",
    "training.optimiser=adam", "training.learning_rate=0.01", "training.optimiser_options={}",
    "training.schedule=cosine", "training.averaging=0.5",
    "training.algorithm=fedavg", "training.local_epochs=2",
    "model.name=odd_models:kills_its_worker",  # which here is the run's own process
    "model.options={folder='nowhere', times=0}",
]  # fmt: skip


def in_process(tmp_path, *overrides):
    """A whole run in this process; its folder."""
    runs = tmp_path / "whole"
    runs.mkdir()
    config = load(str(tiny_config(tmp_path, 3)), [*SETTINGS, *overrides])
    Run.new(config, runs, Console(quiet=True)).train()
    return only_folder(runs)


def rows(folder):
    return json_lines(folder / "metrics.jsonl")


def killed(tmp_path, *overrides):
    """The folder of a run in a process of its own, killed with SIGKILL in round 21."""
    runs, once = tmp_path / "runs", f"model.options={{folder='{tmp_path}', times=1, first=21}}"
    sets = [part for setting in [*SETTINGS, once, *overrides] for part in ("--set", setting)]
    config = tiny_config(tmp_path, 3)
    result = shufl("run", config, "--runs", runs, *sets, cwd=Path(__file__).parent)
    assert result.returncode == -signal.SIGKILL, result.stderr
    return only_folder(runs)


def tensorboard_steps(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return [event.step for event in events.Reload().Scalars("reports")]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_model_of_one_never_killed(tmp_path):
    whole, folder = in_process(tmp_path), killed(tmp_path)
    Run.of(folder, Console(quiet=True)).train()
    assert same_model(whole, folder)
    ledgers = [Ledger.read(path / "ledger.jsonl") for path in (whole, folder)]
    assert [e.round for e in ledgers[1].entries] == [e.round for e in ledgers[0].entries]
    for ours, theirs in zip(rows(folder), rows(whole), strict=True):
        for row in (ours, theirs):
            del row["seconds"]
        assert ours.pop("epsilon") == pytest.approx(theirs.pop("epsilon"), rel=1e-12)
        assert ours.pop("epsilons").keys() == theirs.pop("epsilons").keys()
        assert ours == theirs
    assert tensorboard_steps(folder) == list(range(1, ROUNDS + 1))


@pytest.mark.slow
def test_with_the_systems_entropy_every_draw_is_spent_once(tmp_path):
    folder = killed(tmp_path, "seed=system")
    before = rows(folder)
    spent = Ledger.read(folder / "ledger.jsonl").entries[-1].round
    result = CliRunner().invoke(app, ["run", "--resume", str(folder)])
    assert result.exit_code == 0, result.output
    assert "resumed after round" in result.stdout
    assert rows(folder)[: len(before)] == before
    assert rows(folder)[len(before)]["round"] == spent + 1
    entries = Ledger.read(folder / "ledger.jsonl").entries
    assert [entry.round for entry in entries] == list(range(1, ROUNDS + 1))


@pytest.mark.slow
def test_a_finished_run_resumed_stays_as_it_is(five, tmp_path):
    folder = shutil.copytree(five, tmp_path / "five")
    kept = ("ledger.jsonl", "metrics.jsonl", "summary.json")
    before = {name: (folder / name).read_bytes() for name in kept}
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"round": 5, "eps')  # cut short by a crash
    assert Run.of(folder, Console(quiet=True)).train().rounds == 5
    assert {name: (folder / name).read_bytes() for name in kept} == before


@pytest.mark.slow
def test_a_disk_too_full_for_a_checkpoint_ends_the_run_in_one_line(tmp_path):
    sets = ["simulation.engine=vectorised", "privacy.rounds=4", "model.options={hidden=1500}"]
    given = [part for setting in sets for part in ("--set", setting)]
    with tiny_disk_at(tmp_path / "runs") as runs:
        result = shufl("run", tiny_config(tmp_path, 4), "--runs", runs, *given)
        shutil.copytree(only_folder(runs), folder := tmp_path / "with_room")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith("checkpoint.pt: No space left on device")
    assert "ended early: 2 rounds spent" in result.stdout
    assert not (folder / "checkpoint.tmp").exists()
    assert Run.of(folder, Console(quiet=True)).train().rounds == 4


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """The folder of a run of five rounds, which tests copy."""
    return in_process(tmp_path_factory.mktemp("five"), "privacy.rounds=5")


def other_plan(folder, tmp_path):
    change(folder, "check_in_rate = 0.5", "check_in_rate = 0.25")


def other_seed(folder, tmp_path):
    change(folder, "seed = 5", "seed = 6")


def change(folder, old, new):
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))


def no_configuration(folder, tmp_path):
    (folder / "config.toml").unlink()


def no_ledger(folder, tmp_path):
    (folder / "ledger.jsonl").unlink()


def damaged_ledger(folder, tmp_path):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":2', b'"round":3'))


def shorter_ledger(folder, tmp_path):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]))


def no_checkpoint(folder, tmp_path):
    (folder / "checkpoint.pt").unlink()


def damaged_checkpoint(folder, tmp_path):
    (folder / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes()[:1000])


def damaged_metrics(folder, tmp_path):
    with (folder / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\0\0\n")  # as after a power cut


def foreign_metrics(folder, tmp_path):
    with (folder / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"round": 5}\n')


def models_file(folder, tmp_path):
    shutil.copy(folder / "model.pt", folder / "checkpoint.pt")


def other_runs_checkpoint(folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = in_process(tmp_path / "other", "privacy.rounds=5")
    shutil.copy(other / "checkpoint.pt", folder / "checkpoint.pt")


def other_torch(folder, tmp_path):
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    checkpoint.origin["torch"] = "1.0"
    checkpoint.save(folder / "checkpoint.pt")


def other_layers(folder, tmp_path):
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    checkpoint.model.popitem()
    checkpoint.save(folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (other_plan, LedgerError, "ledger .* belongs to plan .*, not"),
        (other_seed, CheckpointError, "made with config.toml .*, it cannot go on with"),
        (no_configuration, ConfigError, "a run folder has a config.toml, .* has none"),
        (no_ledger, LedgerError, "tells of round 5: it lacks rounds"),
        (damaged_ledger, LedgerError, "ledger .* is damaged at line 3"),
        (shorter_ledger, LedgerError, r"ends at round 2, but metrics.jsonl tells of round 5"),
        (no_checkpoint, CheckpointError, "checkpoint .* is missing"),
        (
            damaged_checkpoint,
            CheckpointError,
            "checkpoint .* is damaged: its digest does not match",
        ),
        (damaged_metrics, MetricsError, "metrics.jsonl is damaged at line 6"),
        (foreign_metrics, MetricsError, "metrics.jsonl is damaged at line 6"),
        (models_file, CheckpointError, "checkpoint .* cannot be read"),
        (other_runs_checkpoint, CheckpointError, "is of run .*, the ledger of run"),
        (other_torch, CheckpointError, "made with torch 1.0, it cannot go on with"),
        (other_layers, CheckpointError, "does not fit model .*: its code has changed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.slow
def test_what_is_not_this_run_is_refused_and_left_alone(five, tmp_path, spoil, error, message):
    folder = shutil.copytree(five, tmp_path / "five")
    spoil(folder, tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(error, match=message) as raised:
        Run.of(folder, Console(quiet=True)).train()
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


SHUFFLERS_LINE = '{"time": "t", "event": "round opened", "run": "0", "round": 5}\n'


@pytest.mark.parametrize("cut_to", [0, 4])
@pytest.mark.parametrize(
    "witness", ["metrics.jsonl", "summary.json", "checkpoint.pt", "tensorboard", "shuffler.log"]
)
@pytest.mark.slow
def test_a_ledger_that_was_cut_is_refused_whatever_else_is_left(five, tmp_path, witness, cut_to):
    folder = shutil.copytree(five, tmp_path / "five")
    (folder / "shuffler.log").write_text(SHUFFLERS_LINE)
    for name in {"metrics.jsonl", "summary.json", "checkpoint.pt", "shuffler.log"} - {witness}:
        (folder / name).unlink()
    if witness != "tensorboard":
        shutil.rmtree(folder / "tensorboard")
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[: 1 + cut_to]))
    message = f"ends at round {cut_to}, but {witness} tells of round 5: it lacks rounds"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["run", "--resume"], ["account"], ["report"], ["status"]):
        result = CliRunner().invoke(app, [*command, str(folder)])
        assert result.exit_code != 0 and result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and message in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    ledger.unlink()  # a page may be made before the first round, and a deployed run begin
    assert "tells of round 5" in CliRunner().invoke(app, ["report", str(folder)]).stderr
    with pytest.raises(LedgerError, match="tells of round 5"):
        Run.of(folder, Console(quiet=True), VectorisedEngine).train()
    assert not ledger.exists()


@pytest.mark.slow
def test_a_run_at_work_cannot_be_resumed_a_second_time(long_vectorised_run):
    run = long_vectorised_run
    run.wait_for_rounds(1)
    with pytest.raises(LedgerError, match=r"ledger .* is in use by another process"):
        Run.of(run.folder, Console(quiet=True)).train()
    assert run.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a CONFIG to run or --resume RUN_FOLDER"),
        (["quickstart", "--resume", "folder"], "give either a CONFIG to run or --resume"),
        (["--resume", "folder", "--set", "seed=1"], "--resume goes alone"),
        (["--resume", "folder"], "a run folder has a config.toml"),
    ],
)
def test_what_resume_does_not_take_is_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
