"""What people get wrong: each mistake is one line and status 2, before any work."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nights import by_night
from shufl.accounting import ACCOUNTANTS
from shufl.cli.__main__ import main

HERE = f"{__name__}:"
OPEN = ["privacy.noise_multiplier="]  # so that a search would be next
VECTORISED = "simulation.engine=vectorised"


def flat(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


@pytest.fixture
def refusal(monkeypatch, tmp_path, capsys):
    """What a command says, which begins no search and leaves nothing behind, with status 2.

    Here are no GPU and no cluster, whatever the machine has.
    """

    def begun(plan):
        raise AssertionError("a search has begun")

    monkeypatch.setattr("shufl.accounting.search.fitted", begun)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)

    def said(*arguments):
        before = set(tmp_path.iterdir())
        monkeypatch.setattr(sys, "argv", ["shufl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        line = capsys.readouterr().err.removesuffix("\n")
        assert ended.value.code == 2 and line.startswith("error: ") and line.isprintable()
        assert set(tmp_path.iterdir()) == before
        return line.removeprefix("error: ")

    return said


def of_run(*changes):
    return [part for change in [*OPEN, *changes] for part in ("--set", change)]


PLAN = ["-n", "9", "--check-in-rate", "1", "--noise-multiplier", "1", "--rounds", "1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["privcy.rounds=3"], "unknown key privcy; did you mean privacy?"),
        (["training.optimizer=adam"], "unknown key training.optimizer; did you mean optimiser?"),
        (["privacy.rounds"], "an override must look like section.key=value, got 'privacy.rounds'"),
        (["privacy.check_in_rate=0,5"], "must be a number in [1e-12, 1], got '0,5'"),
        (["privacy.delta=0"], 'must be "1/n" or a number in (0, 1), got 0'),
        (["privacy.delta=1"], 'must be "1/n" or a number in (0, 1), got 1'),
        (["privacy.target_epsilon=0"], "must be a number above 0, got 0"),
        (["privacy.rounds=1.5"], "privacy.rounds must be a whole number from 1 to 10^9, got 1.5"),
        (["privacy.accountant=blankets"], f"must be one of {', '.join(ACCOUNTANTS)}, got"),
        (["simulation.engine=vectorized"], "must be one of flower, vectorised, got 'vectorized'"),
        (["training.learning_rate=nan"], "must be a number in (0, 1e30], got nan"),
        (["training.optimiser=adamm"], "must be one of adadelta, adafactor, adagrad, adam, "),
        (["training.optimiser_options.momentun=0.9"], "optimiser_options are none of sgd: "),
        (["training.algorithm_options.mu=0.1"], "algorithm_options must be empty for fedsgd"),
        ([VECTORISED, "simulation.device=gpu"], "device must be one of cpu, cuda, got 'gpu'"),
        ([VECTORISED, "simulation.device=cuda"], 'device must be "cpu" here: torch '),
        ([VECTORISED, "simulation.workers=1000000"], "simulation.workers must be at most "),
        (["simulation.cpus_per_node=1e6"], "cpus_per_node must be at most "),
        (["simulation.nodes=2000"], "nodes must be at most the number of users, 1437, got 2000"),
        (["data.users=5000"], "data.users must lie in [1, 1437] (1437 training records, at least"),
        (["privacy.minimum_batch=5000"], "must be at most the number of users, 1437, got 5000"),
        (["model.name=mymodel.make"], "or module:callable, got mymodel.make"),
        (["model.name=nothing:at_all"], "could not be imported: No module named 'nothing'"),
        ([f"model.name={HERE}missing"], f"module '{__name__}' has no attribute 'missing'"),
        (["model.name=mlp", "model.options.hiden=8"], "an unexpected keyword argument 'hiden'"),
        (
            [f"model.name={HERE}flat", "model.options.hiden=8"],
            "unexpected keyword argument 'hiden'",
        ),
        *by_night(
            (
                ["model.name=mlp", "model.options.hidden=850000"],
                "model mlp has 63750010 parameters; a report holds at most 33554400",
            )
        ),
    ],
)
def test_in_a_run(refusal, changes, message):
    assert message in refusal("run", "quickstart", *of_run(*changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give either a CONFIG to run or --resume RUN_FOLDER"),
        (["run", "nowhere.toml"], "nowhere.toml cannot be read: No such file or directory; a "),
        (["run", "quickstrat"], "quickstrat cannot be read: No such file or directory; a "),
        (["run", "--resume", "."], "a run folder has a config.toml, . has none"),
        (["rnu", "quickstart"], "No such command 'rnu'. Did you mean 'run'?"),
        (["experiment", "nothing"], "nothing cannot be read: No such file or directory; an exp"),
        (["experiment", "digits", "--cpus", "0"], "cpus must be at least 1, got 0"),
        (["report", "nothing"], "nothing must be a run folder, which has a plan.json, or the "),
        (["account", "."], ". must be a run folder, which has a ledger.jsonl; a plan is given by"),
        (
            ["account", *PLAN, "--accountant", "all", "--accountant", "rdp"],
            "--accountant all stands alone, got all, rdp",
        ),
    ],
)
def test_in_a_command(refusal, arguments, message):
    said = refusal(*arguments)
    assert said.startswith(message) and said.count("?") <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--users", "9"], "plan is called calibrate now"),
        (["compare"], "compare is called account now"),
        (["account", "--n", "9"], "--n is called --users now"),
        (["account", "--n=9"], "--n is called --users now"),
        (["audit", "--gamma", "1"], "--gamma is called --check-in-rate now"),
        (["calibrate", "--noise", "1"], "--noise is called --noise-multiplier now"),
        (["account", "--blankets", "1"], "--blankets is called --shuffler-blankets now"),
        (["histogram", "a.csv", "--epsilon", "1"], "--epsilon is called --target-epsilon now"),
        (
            ["run", "quickstart", "--gamma", "1"],
            "No such option '--gamma'. Give --set privacy.check_in_rate=…",
        ),
        (["run", "quickstart", "--n", "9"], "No such option '--n'. Give --set data.users=…"),
    ],
)
def test_a_former_name(refusal, arguments, message):
    assert refusal(*arguments) == message


def test_a_former_name_of_an_option_that_another_command_had(refusal):
    said = refusal("account", "--epsilon", "1")
    assert said.startswith("No such option '--epsilon'.") and "--target-epsilon" not in said


@pytest.mark.parametrize("content", [b"name = ", b"[privacy]\ncheck_in_rate = 0,5\n", b"\xff\xfe"])
def test_in_toml(refusal, content):
    Path("run.toml").write_bytes(content)
    assert refusal("run", "run.toml").startswith("run.toml is not valid TOML: ")


@pytest.mark.parametrize(
    "arguments",
    [["run", "quickstart"], ["run", "quickstart", *of_run(VECTORISED, "simulation.workers=2")]],
)
def test_in_the_address_of_a_cluster(refusal, monkeypatch, arguments):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:1")  # nobody listens there
    message = "RAY_ADDRESS must name a running cluster, got 127.0.0.2:1: no Ray answers there"
    assert refusal(*arguments) == message


RECORDS = """
name = "own"
[privacy]
check_in_rate = 0.5
target_epsilon = 5.0
rounds = 5
[model]
name = "logistic-regression"
[training]
learning_rate = 0.5
[data.dataset]
file = "records.csv"
user = "who"
label = "ill"
classes = 2
"""
SECRET = "8675309"
ROWS = [(f"p{number}", number, number % 2) for number in range(30)]
GOOD = "\n".join(["who,age,ill", *(f"{who},{age},{ill}" for who, age, ill in ROWS), ""])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace(",", ";"), "records.csv: line 1 must name a column who, got 1 other columns"),
        (GOOD.replace("p3,3,", f"p3,x{SECRET},"), "records.csv: column age must be "),
        (None, "records.csv cannot be read as CSV or Parquet: No such file or directory"),
    ],
    ids=["separator", "text", "missing"],
)
def test_in_a_file_of_records(refusal, text, message):
    """`test_files.py` and `test_users.py` have what else may be wrong with one."""
    Path("run.toml").write_text(RECORDS)
    if text is not None:
        Path("records.csv").write_text(text)
    said = refusal("run", "run.toml")
    assert message in said and SECRET not in said
