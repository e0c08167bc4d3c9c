"""`shufl run --resume`: real runs, really killed, end as if nothing had happened."""

import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from run_world import (
    invoke,
    json_lines,
    only_folder,
    same_model,
    set_options,
    shufl,
    tiny_config,
    trained,
)
from shufl.accounting import Ledger, LedgerError
from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.results.run import Run
from shufl.results.run_folder import MetricsError
from shufl.server import CheckpointError, load_checkpoint
from shufl.simulator.engines.vectorised import VectorisedEngine
from tiny_disk import tiny_disk_at

pytestmark = pytest.mark.slow
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
    config = load(str(tiny_config(tmp_path, 3)), [*SETTINGS, *overrides])
    return trained(config, tmp_path / "whole")


def rows(folder):
    return json_lines(folder / "metrics.jsonl")


def killed(tmp_path, *overrides):
    """The folder of a run in a process of its own, killed with SIGKILL in round 21."""
    runs, once = tmp_path / "runs", f"model.options={{folder='{tmp_path}', times=1, first=21}}"
    sets = set_options(*SETTINGS, once, *overrides)
    config = tiny_config(tmp_path, 3)
    result = shufl("run", config, "--runs", runs, *sets, cwd=Path(__file__).parent)
    assert result.returncode == -signal.SIGKILL, result.stderr
    return only_folder(runs)


def tensorboard_steps(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return [event.step for event in events.Reload().Scalars("reports")]


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


def test_with_the_systems_entropy_every_draw_is_spent_once(tmp_path):
    folder = killed(tmp_path, "seed=system")
    before = rows(folder)
    spent = Ledger.read(folder / "ledger.jsonl").entries[-1].round
    result = invoke("run --resume", folder)
    assert result.exit_code == 0, result.output
    assert "resumed after round" in result.stdout
    assert rows(folder)[: len(before)] == before
    assert rows(folder)[len(before)]["round"] == spent + 1
    entries = Ledger.read(folder / "ledger.jsonl").entries
    assert [entry.round for entry in entries] == list(range(1, ROUNDS + 1))


def test_a_finished_run_resumed_stays_as_it_is(five, tmp_path):
    folder = shutil.copytree(five, tmp_path / "five")
    kept = ("ledger.jsonl", "metrics.jsonl", "summary.json")
    before = {name: (folder / name).read_bytes() for name in kept}
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"round": 5, "eps')  # cut short by a crash
    assert Run.of(folder, Console(quiet=True)).train().rounds == 5
    assert {name: (folder / name).read_bytes() for name in kept} == before


def test_a_disk_too_full_for_a_checkpoint_ends_the_run_in_one_line(tmp_path):
    sets = "simulation.engine=vectorised", "privacy.rounds=4", "model.options={hidden=1500}"
    with tiny_disk_at(tmp_path / "runs") as runs:
        result = shufl("run", tiny_config(tmp_path, 4), "--runs", runs, *set_options(*sets))
        shutil.copytree(only_folder(runs), folder := tmp_path / "with_room")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith("checkpoint.pt: No space left on device")
    assert "ended early: 2 rounds spent" in result.stdout
    assert not list(folder.glob(".*"))
    assert Run.of(folder, Console(quiet=True)).train().rounds == 4


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """The folder of a run of five rounds, which tests copy."""
    return in_process(tmp_path_factory.mktemp("five"), "privacy.rounds=5")


def replaced(name, old, new):
    def spoil(folder):
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new))

    return spoil


def missing(name):
    return lambda folder: (folder / name).unlink()


def cut(name, length):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def longer(name, line):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + line)


def models_file(folder):
    shutil.copy(folder / "model.pt", folder / "checkpoint.pt")


def other_runs_checkpoint(folder):
    (folder.parent / "other").mkdir()
    other = in_process(folder.parent / "other", "privacy.rounds=5")
    shutil.copy(other / "checkpoint.pt", folder / "checkpoint.pt")


def other_torch(folder):
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    checkpoint.origin["torch"] = "1.0"
    checkpoint.save(folder / "checkpoint.pt")


def other_layers(folder):
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    checkpoint.model.popitem()
    checkpoint.save(folder / "checkpoint.pt")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CONFIG, LEDGER, METRICS, CHECKPOINT = (
    "config.toml", "ledger.jsonl", "metrics.jsonl", "checkpoint.pt",
)  # fmt: skip
SPOILT = {
    "other plan": (
        replaced(CONFIG, b"check_in_rate = 0.5", b"check_in_rate = 0.25"),
        LedgerError, "ledger .* belongs to plan .*, not",
    ),
    "other seed": (
        replaced(CONFIG, b"seed = 5", b"seed = 6"),
        CheckpointError, "made with config.toml .*, it cannot go on with",
    ),
    "no configuration": (
        missing(CONFIG), ConfigError, "a run folder has a config.toml, .* has none"
    ),
    "damaged ledger": (
        replaced(LEDGER, b'"round":2', b'"round":3'), LedgerError, "ledger .* is damaged at line 3"
    ),
    "no checkpoint": (missing(CHECKPOINT), CheckpointError, "checkpoint .* is missing"),
    "damaged checkpoint": (
        cut(CHECKPOINT, 1000), CheckpointError, "is damaged: its digest does not match"
    ),
    "damaged metrics": (  # as after a power cut
        longer(METRICS, b"\0\0\n"), MetricsError, "metrics.jsonl is damaged at line 6"
    ),
    "model's file": (models_file, CheckpointError, "checkpoint .* cannot be read"),
    "other run's checkpoint": (
        other_runs_checkpoint, CheckpointError, "is of run .*, the ledger of run"
    ),
    "other torch": (other_torch, CheckpointError, "made with torch 1.0, it cannot go on with"),
    "other layers": (
        other_layers, CheckpointError, "does not fit model .*: its code has changed"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "error", "message"), SPOILT.values(), ids=SPOILT)
def test_what_is_not_this_run_is_refused_and_left_alone(five, tmp_path, spoil, error, message):
    folder = shutil.copytree(five, tmp_path / "five")
    spoil(folder)
    before = contents(folder)
    with pytest.raises(error, match=message) as raised:
        Run.of(folder, Console(quiet=True)).train()
    assert "\n" not in str(raised.value)
    assert contents(folder) == before


SHUFFLERS_LINE = '{"time": "t", "event": "round opened", "run": "0", "round": 5}\n'


@pytest.mark.parametrize("cut_to", [0, 4])
@pytest.mark.parametrize(
    "witness", ["metrics.jsonl", "summary.json", "checkpoint.pt", "tensorboard", "shuffler.log"]
)
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
    before = contents(folder)
    for command in ("run --resume", "account", "report", "status"):
        result = invoke(command, folder)
        assert result.exit_code != 0 and result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and message in line
    assert contents(folder) == before
    ledger.unlink()  # a page may be made before the first round, and a deployed run begin
    assert "tells of round 5" in invoke("report", folder).stderr
    with pytest.raises(LedgerError, match="tells of round 5"):
        Run.of(folder, Console(quiet=True), VectorisedEngine).train()
    assert not ledger.exists()


def test_a_run_at_work_cannot_be_resumed_a_second_time(long_vectorised_run):
    run = long_vectorised_run
    run.wait_for_rounds(1)
    with pytest.raises(LedgerError, match=r"ledger .* is in use by another process"):
        Run.of(run.folder, Console(quiet=True)).train()
    assert run.process.poll() is None
