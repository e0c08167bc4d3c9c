"""`import shufl` in scripts and notebooks, among files of any name: runs of objects, mistakes."""

import doctest
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import shufl
from nights import by_night
from run_world import LIMIT, only_folder, refused, same_model
from shufl import api
from shufl.accounting import privacy_plan, search
from shufl.cli.experiment import page_of
from shufl.learning.data.datasets import load_dataset
from shufl.protocol import GaussianMechanism
from shufl.results.run_folder import MetricsError
from shufl.server import CheckpointError

ROUNDS = 4
CHANGES = {
    "privacy.rounds": ROUNDS, "privacy.target_epsilon": 1e4, "privacy.minimum_batch": 1,
    "privacy.accountant": "blanket", "training.learning_rate": 0.5, "simulation.nodes": 2,
}  # fmt: skip
QUICK = CHANGES | {"simulation.engine": "vectorised"}

TRAPS = "server.py", "clients/__init__.py", "accounting.py", "configs/__init__.py", "simulator.py"

SCRIPT = """
import json, sys
from pathlib import Path
import shufl
heavy = [name for name in ("numpy", "torch", "flwr", "ray") if name in sys.modules]

import torch
from torch import nn
from tools import scaled  # a module of yours, in the script's folder

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(shape[0], classes)

    def forward(self, records):
        return self.linear(scaled(records))

def data():
    records = torch.randn(30_100, 6, generator=torch.Generator().manual_seed(0))
    labels = (records[:, 0] > 0).long()
    return shufl.Dataset(records[:200], labels[:200], records[200:], labels[200:], classes=2)

def bytes_of_a_message(changes):
    "What Flower pickles for every message, before and after the data are in Ray."
    from ray import cloudpickle
    from shufl.learning.config import load
    from shufl.learning.given_objects import carried, placeholders, with_objects
    from shufl.simulator.engines.flower import FlowerEngine
    from shufl.results.experiment import prepare

    objects = carried(data(), None, None, Net, None, None)
    config = with_objects(load("quickstart", placeholders(objects, changes)), objects)
    experiment = prepare(config)
    settings = FlowerEngine(experiment)._client_settings("run", [], Path("ledgers"))
    before = len(cloudpickle.dumps(settings))
    for each in experiment.carried:
        each.put_in_ray()
    packed = cloudpickle.dumps(settings)
    features, _ = cloudpickle.loads(packed).load_users()(7)
    assert torch.equal(features, settings.load_users()(7)[0])
    return before, len(packed)

def stop_in_round_2(result, model):
    seen.append(isinstance(model, Net))
    return shufl.STOP if len(result.metrics) == 2 else None

if __name__ == "__main__":
    changes, ray_is_ours, sizes = json.loads(sys.argv[1]), False, None
    if "ray" in sys.argv[2:]:
        import ray
        ray.init("local", num_cpus=1, include_dashboard=False)
    seen = []
    run = shufl.run("quickstart", changes, dataset=data, model=Net, on_round=stop_in_round_2)
    said = [run.epsilon["blanket"], run.epsilon_so_far["blanket"]]
    if "resume" in sys.argv[2:]:
        run = shufl.resume(run.folder, dataset=data(), model=Net, progress=False)
        said += [run.epsilon["blanket"], run.epsilon_so_far["blanket"]]
    score = run.score
    if "ray" in sys.argv[2:]:
        ray_is_ours = ray.get(ray.remote(lambda: True).remote())
        sizes = bytes_of_a_message(changes)
    print(json.dumps([heavy, seen, said, score, type(run.model).__name__, ray_is_ours, sizes]))
"""


@pytest.fixture
def trapped(tmp_path):
    """A folder with files of names that are also ours, none of which may be imported."""
    for trap in TRAPS:
        (tmp_path / trap).parent.mkdir(exist_ok=True)
        (tmp_path / trap).write_text("raise SystemExit('this is your own')\n")
    (tmp_path / "tools.py").write_text("def scaled(records):\n    return 2 * records\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "also"),
    by_night(
        ({}, ["ray"]),
        ({}, ["ray", "resume"]),
        ({"simulation.engine": "vectorised", "simulation.workers": 2}, []),
    ),
    ids=["flower", "resumed", "workers"],
)
def test_objects_of_a_script_go_into_every_process(trapped, engine, also):
    """Its Ray too: the one that the script has started is used, and goes on."""
    (trapped / "go.py").write_text(SCRIPT)
    command = [sys.executable, "go.py", json.dumps(CHANGES | engine), *also]
    ended = subprocess.run(command, cwd=trapped, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    *told, sizes = json.loads(ended.stdout.splitlines()[-1])
    heavy, seen, epsilons, score, model, goes_on = told
    assert (heavy, seen, model, goes_on) == ([], [True, True], "Net", "ray" in also)
    planned, so_far, *at_the_end = epsilons
    assert so_far < planned  # a stop that looks at results saves nothing
    assert at_the_end == [planned, planned] * ("resume" in also)
    assert score > 0.55
    if sizes:  # data travel as a reference
        assert sizes[0] > 30_000 * 6 * 4 and sizes[1] < 20_000
    assert "resumed after" not in ended.stdout  # progress=False says nothing

    folder = only_folder(trapped / "runs")
    line = refused("run --resume", folder)
    assert "data.dataset object:data is an object of a Python program: give it to" in line


@pytest.fixture(scope="module")
def of_objects(tmp_path_factory):
    """A finished run on the records of digits as an object."""
    digits = load_dataset("digits")
    return shufl.run(
        "quickstart", QUICK, dataset=digits, model=nn.Sequential(nn.Flatten(), zeros(64, 10)),
        progress=False, runs=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip


def zeros(inputs, outputs):
    linear = nn.Linear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


@pytest.mark.slow
def test_a_run_of_objects_is_that_of_their_names(of_objects, tmp_path):
    named = shufl.run("quickstart", QUICK, progress=False, runs=tmp_path)
    assert same_model(named.folder, of_objects.folder)
    assert named.epsilon == of_objects.epsilon == shufl.load_run(of_objects.folder).epsilon
    assert named.score == of_objects.score == shufl.load_run(named.folder).score
    assert [row["round"] for row in named.metrics] == list(range(1, ROUNDS + 1))
    assert len(named.plot().axes[0].get_lines()) > 2
    inputs = load_dataset("digits").inputs(load_dataset("digits").test_features)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    objects = {"dataset": load_dataset("digits"), "model": model}
    read = shufl.load_run(of_objects.folder, **objects)
    for run in (shufl.load_run(named.folder), of_objects, read):
        assert run.stopped_by == "rounds"
        right = run.model(inputs).argmax(1) == load_dataset("digits").test_labels
        assert float(right.float().mean()) == pytest.approx(run.score)
    with pytest.raises(shufl.ConfigError, match="object:Dataset is an object of a Python program"):
        _ = shufl.load_run(of_objects.folder).model


def plain_sgd(parameters, gradients, start, state, learning_rate):
    return {name: own - learning_rate * gradients[name] for name, own in parameters.items()}, {}


def scaled(records):
    return records.flatten(1) / 2


def squared(outputs, labels):
    return (outputs - torch.eye(10)[labels]).square().sum(1)


SQUARED = shufl.Task(
    squared, lambda outputs, labels: {"mse": squared(outputs, labels).mean()}, "mse"
)


class Halved:
    """The mean of half of each report."""

    def __init__(self, plan, dimension):
        self.total, self.expected = np.zeros(dimension), plan.check_in_rate

    def add(self, report):
        self.total += report / 2

    def result(self, users):
        return (self.total / (self.expected * users)).astype(np.float32)


FUNCTIONS = {"features": scaled, "task": SQUARED, "algorithm": plain_sgd}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorised", *by_night("flower")])
def test_every_object_stands_for_its_name(tmp_path, monkeypatch, engine):
    """The same run by objects and by the names of a module with the same functions."""
    (tmp_path / "by_name.py").write_text("from test_api import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = FUNCTIONS | ({"aggregator": Halved} if engine == "flower" else {})
    changes = CHANGES | {"training.local_epochs": 1, "simulation.engine": engine}
    given = shufl.run("quickstart", changes, progress=False, runs=tmp_path / "given", **functions)
    keys = {"features": "data", "task": "data", "algorithm": "training", "aggregator": "training"}
    names = {
        f"{keys[name]}.{name}": f"by_name:{getattr(function, '__name__', 'SQUARED')}"
        for name, function in functions.items()
    }
    named = shufl.run("quickstart", changes | names, progress=False, runs=tmp_path / "named")
    assert same_model(given.folder, named.folder)
    assert given.score_name == named.score_name == "mse" and given.score == named.score
    resumed = shufl.resume(given.folder, progress=False, **functions)
    assert resumed.score == given.score
    for missing in functions:
        others = {name: each for name, each in functions.items() if name != missing}
        with pytest.raises(shufl.ConfigError, match="is an object of a Python program: give it"):
            shufl.resume(given.folder, progress=False, **others)
    with pytest.raises(CheckpointError, match=r"made with data\.dataset digits object:scaled"):
        shufl.resume(given.folder, progress=False, **functions | {"features": lambda x: x})


def narrow(shape, outputs, width=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, outputs))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_grid_of_objects_over_two_axes(tmp_path, monkeypatch):
    """Its rows; what is there is not played again, unless an object has changed."""
    import pandas

    monkeypatch.chdir(tmp_path)
    over = {
        "training.learning_rate": [0.1, 0.5],
        "model.options.width": np.arange(2, 4),
    }  # of numpy
    changes = {"privacy.rounds": 1, "privacy.target_epsilon": 1e4}
    changes["simulation.engine"] = "vectorised"
    asked = {"over": over, "seeds": (2,), "changes": changes, "model": narrow, "progress": False}
    rows = shufl.grid("quickstart", **asked, dataset=load_dataset("digits"))
    table = pandas.DataFrame(rows)
    axes = [*over, "seed"]
    assert list(table.columns[:4]) == [*axes, "score"]
    assert table[axes].values.tolist() == [
        [rate, width, seed] for rate in (0.1, 0.5) for width in (2, 3) for seed in (2,)
    ]
    constant = [name for name in table.columns[5:] if table[name].map(repr).nunique() == 1]
    assert list(table.columns[-len(constant) :]) == constant and "data.dataset" in constant
    assert table["epsilon_blanket"].notna().all()
    assert r"\begin{tabular}" in table[axes].to_latex()
    again = shufl.grid("quickstart", **asked, dataset=load_dataset("digits"))
    assert again == rows
    cells = shufl.grid(
        "quickstart", **asked | {"over": {"model.options.width": [2]}},
        dataset=load_dataset("digits"), features=scaled,
    )  # fmt: skip
    assert [row["seed"] for row in cells] == [2] and cells[0]["loss"] != rows[0]["loss"]
    (page,) = (tmp_path / "results").glob("*over-learning_rate-and-width/*.md")
    assert "learning_rate = 0.5" in page.read_text()
    monkeypatch.chdir("/")
    assert "learning_rate = 0.5" in page_of(page.parent)


@pytest.mark.slow
def test_only_the_same_data_go_on(of_objects):
    digits = load_dataset("digits")
    model = nn.Sequential(nn.Flatten(), zeros(64, 10))
    digits.test_features[0, 0, 0, 0] += 1.0  # the same object
    try:
        with pytest.raises(CheckpointError, match=r"made with data\.dataset object:Dataset "):
            shufl.resume(of_objects.folder, dataset=digits, model=model, progress=False)
    finally:
        digits.test_features[0, 0, 0, 0] -= 1.0


@pytest.mark.slow
def test_what_on_round_raises_comes_out_as_it_is(tmp_path):
    class Mine(Exception):
        pass

    def fail(result, model):
        nn.init.zeros_(next(model.parameters()))  # a copy: the run's own stays as it is
        result.metrics[-1]["epsilons"].clear()
        if len(result.metrics) == 2:
            raise Mine

    with pytest.raises(Mine):
        shufl.run("quickstart", QUICK, on_round=fail, progress=False, runs=tmp_path / "runs")
    folder = only_folder(tmp_path / "runs")
    run = shufl.load_run(folder)
    assert run.epsilon_so_far["blanket"] < run.epsilon["blanket"]
    told = []
    went_on = shufl.resume(folder, progress=False, on_round=lambda run, _: told.append(repr(run)))
    assert [text.split(",")[0] for text in told] == ["<run of 3 rounds", "<run of 4 rounds"]
    never_failed = shufl.run("quickstart", QUICK, progress=False, runs=tmp_path / "other")
    assert same_model(went_on.folder, never_failed.folder)
    assert went_on.epsilon == never_failed.epsilon == run.epsilon


@pytest.mark.slow
def test_a_run_says_what_stopped_it(tmp_path):
    def interrupt(result, model):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"shufl\.resume goes on"):
        shufl.run("quickstart", QUICK, on_round=interrupt, progress=False, runs=tmp_path)
    assert shufl.load_run(only_folder(tmp_path)).stopped_by == "interrupt"
    run = shufl.resume(only_folder(tmp_path), on_round=lambda *_: shufl.STOP, progress=False)
    assert run.stopped_by == shufl.load_run(run.folder).stopped_by == "on_round"
    assert len(run.metrics) == 2
    (run.folder / "summary.json").write_text("{")
    with pytest.raises(MetricsError, match=r"summary\.json is damaged"):
        shufl.load_run(run.folder)


LOCK = threading.Lock()


class Locked(nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(64, classes)
        self.lock = LOCK

    def forward(self, records):
        return super().forward(records.flatten(1))


def locked(shape, classes):
    assert not LOCK.locked()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if it were a notebook's
MECHANISM = GaussianMechanism(noise_multiplier=1.0)
PLAN = {
    "users": 10_000, "check_in_rate": 0.1, "mechanism": MECHANISM, "rounds": 50, "delta": 1e-5,
    "target_epsilon": 1.0, "minimum_batch": 100, "shuffler_blankets": 500, "accountant": "blanket",
}  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: shufl.run("quick"), "quick cannot be read"),
        (lambda: shufl.run({"name": "x"}), "the configuration: privacy"),
        (lambda: shufl.run("quickstart", {"privacy.round": 3}), "privacy.round"),
        (lambda: shufl.run("quickstart", ["privacy.rounds=2"]), "changes must be a dict"),
        (lambda: shufl.run("quickstart", {5: 5}), "a change must be of section.key, got 5"),
        (lambda: shufl.run("quickstart", {"model.options.hidden": np.zeros(2)}),
         "model.options must hold values that TOML has"),
        (lambda: shufl.run("quickstart", {"model.options": {"hidden": None}}),
         "model.options must hold values that TOML has"),
        (lambda: shufl.run("quickstart", {"data.features": "__main__:scaled"}),
         "data.features __main__:scaled is of a notebook or script, which other processes"),
        (lambda: shufl.run("quickstart", dataset=[1]),
         "object:list must be a shufl.Dataset or return one, got list"),
        (lambda: shufl.run("quickstart", dataset=lambda: 1 / 0),
         "could not be made: ZeroDivisionError"),
        (lambda: shufl.run("quickstart", QUICK, model=nn.Linear(3, 3)), "object:Linear could not"),
        (lambda: shufl.run("quickstart", QUICK, model=3), "object:int could not be built"),
        (lambda: shufl.run("quickstart", QUICK, model=locked), "cannot be sent to another process"),
        (lambda: shufl.run("quickstart", QUICK, model=Locked), "object:Locked"),
        (lambda: shufl.run("quickstart", QUICK, on_round=lambda: None), "on_round must take a"),
        (lambda: shufl.run("quickstart", QUICK, features=lambda records: records[:, :1].log()),
         "features .*lambda.* must give finite features"),
        (lambda: shufl.run("quickstart", QUICK, task=3), "must be a shufl.Task or return one"),
        (lambda: shufl.run("quickstart", algorithm="fedavg"), "algorithm= takes an object; a name"),
        (lambda: shufl.run("quickstart", {"model.options.hidden": 3}, model=nn.Linear(64, 10)),
         "changes must not have model.options.hidden"),
        (lambda: shufl.run("quickstart", {"data": {}}, dataset=load_dataset("digits")),
         "changes must not have data: the argument dataset= stands for it"),
        (lambda: shufl.run("quickstart", {"training.algorithm": "fedavg"}, algorithm=plain_sgd),
         "changes must not have training.algorithm: the argument algorithm= stands for it"),
        (lambda: shufl.run("quickstart", QUICK, runs="/dev/null"), "no run folder can be made in"),
        (lambda: shufl.grid("quickstart", over={"model.options": [{"hidden": 3}]}),
         "over must have a list of numbers, words"),
        (lambda: shufl.grid("quickstart", over={"privacy.rounds": []}), "over must have a list of"),
        (lambda: shufl.grid("quickstart", over={"privacy.rounds": 3}),
         "over must have a list of values of privacy.rounds, got 3"),
        (lambda: shufl.grid("quickstart", over={"privacy.round": [3]}), "privacy.round"),
        (lambda: shufl.grid("quickstart", over={}), "over must be a dict of lists"),
        (lambda: shufl.grid("quickstart", over={"seed": [1]}), "across must be another setting"),
        (lambda: shufl.grid("quickstart", over={"model.name": ["mlp"]}, model=nn.Linear(64, 10)),
         "changes must not have model.name: the argument model= stands for it"),
        (lambda: shufl.grid({"name": "x"}), "over must say what varies"),
        (lambda: shufl.grid("no-grid"), "no-grid cannot be read"),
        (lambda: shufl.grid("mnist", cpus=0), "cpus must be"),
        (lambda: shufl.load_run("nowhere"), "a run folder has a config.toml, .*nowhere has none"),
        (lambda: shufl.resume("nowhere"), "a run folder has a config.toml"),
        (lambda: shufl.PrivacyPlan(**PLAN | {"rounds": 0}), "rounds must be"),
        (lambda: shufl.PrivacyPlan(**PLAN).epsilon("best"), "accountant must be"),
        (lambda: shufl.calibrate(shufl.PrivacyPlan(**PLAN), epsilon=-1.0), "epsilon must be a"),
    ],
)  # fmt: skip
def test_mistakes_are_one_class_and_one_line(tmp_path, monkeypatch, mistake, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shufl.ConfigError, match=message) as error:
        mistake()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("module", [api, search, privacy_plan], ids=lambda module: module.__name__)
def test_what_docstrings_show_is_true(tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 1) == (0, True)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "path", by_night(*sorted(EXAMPLES.glob("*.ipynb"))), ids=lambda path: path.stem
)
def test_a_notebook_runs_as_it_stands(trapped, monkeypatch, path):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(trapped / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # of another version, perhaps
    NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": trapped}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)


def outputs_of(cells, folder):
    """What the cells of a notebook show, by kind, played by a real kernel."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    about = {"timeout": LIMIT, "allow_errors": True, "resources": {"metadata": {"path": folder}}}
    NotebookClient(notebook, **about).execute()
    return [cell["outputs"] for cell in notebook.cells]


@pytest.mark.slow
def test_in_a_notebook_progress_is_one_line_and_so_is_a_mistake(trapped, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(trapped / "ipython"))
    changes = QUICK | {"privacy.accountant": "local"}
    played, mistaken = outputs_of(
        [f"import shufl\nrun = shufl.run('quickstart', {changes})", "shufl.run('quick')"], trapped
    )
    rounds = [
        text
        for output in played
        if (text := str(output.get("data", output).get("text/plain", output.get("text", ""))))
        and text.lstrip().startswith("round ")
    ]
    assert len(rounds) == 1 and rounds[0].startswith(f"round {ROUNDS}/{ROUNDS}  ")
    (error,) = mistaken
    (line,) = error["traceback"]
    assert line.startswith("ConfigError: quick cannot be read") and "\n" not in line
