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
        ("privcy.rounds=3", "unknown key privcy; did you mean privacy?"),
        ("training.optimizer=adam", "unknown key training.optimizer; did you mean optimiser?"),
        ("privacy.rounds", "an override must look like section.key=value, got 'privacy.rounds'"),
        ("privacy.check_in_rate=0,5", "must be a number in [1e-12, 1], got '0,5'"),
        ("privacy.clip_norm=9e-19", "privacy.clip_norm must be a number in [1e-18, 1e15]"),
        ("privacy.shuffler_blankets=-1",
         'shuffler_blankets must be "least-error" or a number from 0 to 10^7, got -1'),
        ("privacy.shuffler_blankets=least-error",
         "shuffler_blankets must be a number with accountant theorem3, which does"),
        ("privacy.noise_multiplier=1 privacy.delta=4.9e-20",
         "privacy.delta of a plan of 500 rounds must be at least 5e-20"),
        ("privacy.delta=0", 'must be "1/n" or a number in (0, 1), got 0'),
        ("privacy.target_epsilon=0", "must be a number above 0, got 0"),
        ("privacy.rounds=1.5", "privacy.rounds must be a whole number from 1 to 10^9, got 1.5"),
        ("privacy.accountant=blankets", f"must be one of {', '.join(ACCOUNTANTS)}, got"),
        ("simulation.engine=vectorized", "must be one of flower, vectorised, got 'vectorized'"),
        ("training.learning_rate=nan", "must be a number in (0, 1e30], got nan"),
        ("training.optimiser=adamm", "must be one of adadelta, adafactor, adagrad, adam, "),
        ("training.optimiser_options.momentun=0.9", "optimiser_options are none of sgd: "),
        ("training.algorithm_options.mu=0.1", "algorithm_options must be empty for fedsgd"),
        (f"{VECTORISED} simulation.device=gpu", "device must be one of cpu, cuda, got 'gpu'"),
        (f"{VECTORISED} simulation.device=cuda", 'device must be "cpu" here: torch '),
        (f"{VECTORISED} simulation.workers=1000000", "simulation.workers must be at most "),
        ("simulation.cpus_per_node=1e6", "cpus_per_node must be at most "),
        ("simulation.nodes=2000", "nodes must be at most the number of users, 1437, got 2000"),
        ("simulation.nodes=1000001", "simulation.nodes must be a whole number from 1 to 10^6"),
        ("simulation.round_timeout=1.1e9", "simulation.round_timeout must be a number in (0, 10"),
        ("simulation.records_per_chunk=1000001",
         "records_per_chunk must be a whole number from 1 to 10^6, got 1000001"),
        ("simulation=3", "simulation must be a table of values, got 3"),
        ("shuffler.number=0", "shuffler.number must be a whole number from 1 to 64, got 0"),
        *((f"shuffler.number=4 {few}", "at most the number of nodes and of users, 3, got 4")
          for few in ("simulation.nodes=3", "data.users=3")),
        ("seed=-1", 'seed must be a whole number in [0, 2^63), or "system"'),
        ("name=../up", "name must be at most 100 letters, digits, "),
        ("name.first=1", "name is not a section"),
        ("learning_rate=1.0", "unknown key learning_rate; allowed: name, seed"),
        ("data.dataset=mnits", "module:callable, or a table "),
        ("data.features=wavelets", "data.features must be one of scattering, or module:"),
        ("data.users=1000000000001",
         "data.users must be a whole number from 1 to 10^12 or left out, got 1"),
        ("data.users=5000", "data.users must lie in [1, 1437] (1437 training records, at least"),
        ("privacy.minimum_batch=5000", "must be at most the number of users, 1437, got 5000"),
        ("model.name=mymodel.make", "or module:callable, got mymodel.make"),
        ("model.name=nothing:at_all", "could not be imported: No module named 'nothing'"),
        (f"model.name={HERE}missing", f"module '{__name__}' has no attribute 'missing'"),
        ("model.name=mlp model.options.hiden=8", "an unexpected keyword argument 'hiden'"),
        (f"model.name={HERE}flat model.options.hiden=8", "unexpected keyword argument 'hiden'"),
        ("model.name=small-cnn", "could not be built for records of float32 of shape"),
        ("privacy.noise_multiplier=1 privacy.target_epsilon=1e-6",
         "privacy.target_epsilon must be at least"),
        *by_night(("model.name=mlp model.options.hidden=850000",
                   "model mlp has 63750010 parameters; a report holds at most 33554400")),
    ],
)  # fmt: skip
def test_in_a_run(refusal, changes, message):
    assert message in refusal("run", "quickstart", *of_run(*changes.split()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("privacy.rounds=2", "privacy.rounds must be 1 with mechanism randomised-response, got 2"),
        ("privacy.categories=9", "privacy.categories must be 10, the classes of digits, got 9"),
        ("privacy.categories=", "privacy.categories must be given with mechanism randomised"),
        ("privacy.noise_multiplier=1", "privacy.noise_multiplier must be left out with mechanism"),
        ("privacy.mechanism=gaussian", "privacy.categories must be left out with mechanism gauss"),
        ("privacy.local_epsilon=21", "local_epsilon must be a number in [1e-9, 20] or left out"),
        ("privacy.accountant=theorem3", "must be 'blanket' or 'crowd' or 'local'"),
        ("training.learning_rate=0.5", "training.learning_rate must be 1.0 with mechanism"),
        ("model.name=mlp", "model.name must be histogram with mechanism randomised-response"),
        ("simulation.engine=vectorised", "simulation.engine must be flower with mechanism"),
    ],
)
def test_in_a_run_of_a_histogram(refusal, setting, message):
    assert message in refusal("run", "histogram", "--set", setting)


IDLE = "must be left out with a run folder"
END_TO_END = "audit --end-to-end"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run", "give either a CONFIG to run or --resume RUN_FOLDER"),
        ("run nowhere.toml", "nowhere.toml cannot be read: No such file or directory; a "),
        ("run quickstrat", "quickstrat cannot be read: No such file or directory; a "),
        ("run quickstart --resume .", "give either a CONFIG to run or --resume"),
        ("run --resume . --set seed=1", "--resume goes alone"),
        ("run quickstart --json --on wards", "--json goes without --on"),
        ("run --resume .", "a run folder has a config.toml, . has none"),
        ("rnu quickstart", "No such command 'rnu'. Did you mean 'run'?"),
        ("experiment nothing", "nothing cannot be read: No such file or directory; an exp"),
        ("experiment digits --cpus 0", "--cpus must be at least 1, got 0"),
        ("node --log-file /nowhere/log", "/nowhere/log: No such file or directory"),
        ("status .", "cannot read ledger ledger.jsonl: No such file or directory"),
        ("report nothing", "nothing must be a run folder, which has a plan.json, or the "),
        *((f"account . {flag}", f"{flag.split()[0]} {IDLE}")
          for flag in ("--delta 0.001", "--noise-multiplier 3", "--adjacency replace")),
        *((f"histogram . {flag}", f"{flag.split()[0]} {IDLE}")
          for flag in ("--column town", "--other", "--delta 1/n")),
        ("histogram .", "cannot read ledger ledger.jsonl: No such file or directory"),
        (f"{END_TO_END} nowhere.toml", "nowhere.toml cannot be read"),
        (f"{END_TO_END} quickstart --users 10", "--users must be left out with --end-to-end"),
        (f"{END_TO_END} quickstart --samples 3", "--samples must be at least 4"),
        (f"{END_TO_END} quickstart --confidence 2", "--confidence must lie"),
        (f"{END_TO_END} quickstart --epsilon 1e9", "--epsilon must lie"),
        (f"{END_TO_END} quickstart --seed {2**62}", "--seed must be"),
        ("keys sign x a.csr --role wrong", "Invalid value for '--role'"),
    ],
)  # fmt: skip
def test_in_a_command(refusal, command, message):
    said = refusal(*command.split())
    assert said.startswith(message) and said.count("?") <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "a\nb\x1b[31m.toml"], "a b\\x1b[31m.toml cannot be read: "),
        (["run", "--no-such\n\x1b[31mthing"], "No such option '--no-such"),
        (["no\nsuch"], "No such command 'no"),
        (["audit", "--samples", "f\nive"], "Invalid value for '--samples': 'f"),
        (["keys", "sign", "no\nfolder", "a.csr", "--role", "node"], "a.csr"),
    ],
)
def test_in_words_that_would_move_the_cursor(refusal, arguments, message):
    assert refusal(*arguments).startswith(message)


NINE = "account -n 9 --check-in-rate 1 --noise-multiplier 5 --rounds 1"
HUNDRED = "account -n 100 --noise-multiplier 5 --rounds 10"
OPEN_PLAN = "calibrate --target-epsilon 1 -n 9 --check-in-rate 1"
COMPARED = "calibrate -n 3000 --target-epsilon 1.5 --delta 1e-6"
AUDIT = "audit -n 10 --noise-multiplier 2"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("account", "users is missing: a whole number from 1 to 10^12"),
        (HUNDRED, "check_in_rate is missing; shufl cal"),
        (f"{HUNDRED} --check-in-rate 1.5", "--check-in-rate must be a number in [1e-12, 1] or "),
        (f"{NINE} --users many", "--users must be a whole number from 1 to 10^12, got 'many'"),
        (f"{NINE} --users 1", "delta must be a number when there is one user"),
        (f"{NINE} --rounds 2.5", "rounds must be a whole number from 1 to 10^9 or "),
        (f"{NINE} --adjacency x", "adjacency must be one of replace, zero-out, got 'x'"),
        (f"{NINE} --mechanism laplace", "mechanism must be one of gaussian, ldp-sgd, "),
        (f"{NINE} --accountant x", "accountant must be 'theorem3' or "),
        (f"{NINE} --accountant all --accountant rdp", "all stands alone, got all, rdp"),
        (f"{NINE} --accountant blanket", "rounds without shuffler blankets must be 'theorem3' or "),
        ("account nowhere", "nowhere must be a run folder, which has a ledger.jsonl; a plan is"),
        (f"{NINE} --noise-multiplier 1e200", "a number in [1e-12, 10^6] or left out, got 1e"),
        (f"{NINE} --noise-multiplier 0.05 --peers", "ε₀ must lie in (0, 700]"),
        (f"{NINE} --shuffler-blankets 5 --participation allocation --peers",
         "--peers goes with mixing shuffle and participation check-in only"),
        ("account -n 9 --check-in-rate 1 --rounds 1 --mechanism randomised-response "
         "--categories 3 --local-epsilon 1 --peers",
         "--peers must be left out with mechanism randomised-response"),
        (f"{NINE} --check-in-rate 0.3 --participation allocation",
         "--check-in-rate must be one in a whole number up to 10^9, such as 0.25 or 0.1, with "
         "participation allocation, got 0.3"),
        (f"{NINE} --shuffler-blankets inf", "a number from 0 to 10^7, got inf"),
        (f"{NINE} --shuffler-blankets least-error", "shuffler_blankets is missing; shufl calib"),
        (f"{NINE} --plot nodir/x.png", "--plot must be a file in a folder that is there and"),
        (f"{NINE} --plot x.txt", "--plot must end in one of "),
        ("calibrate -n 9 --check-in-rate 1", "--target-epsilon is missing"),
        *((f"{OPEN_PLAN} --target-epsilon {given}", f"a number above 0 or left out, got {shown}")
          for given, shown in (("0", "0"), ("inf", "inf"), ("nan", "nan"), ("one", "'one'"))),
        (f"{OPEN_PLAN} --noise-multiplier 1 --accountant x",
         "accountant must be one of theorem3, "),
        (f"{OPEN_PLAN} --noise-multiplier 1 --shuffler-blankets 2 --rounds 3",
         "nothing is left out; shufl account says what a whole plan costs"),
        (f"{OPEN_PLAN} --noise-multiplier 1",
         "with the noise given, only one of shuffler_blankets, rounds may be left out"),
        (f"{OPEN_PLAN} --rounds 2 --shuffler-blankets 0",
         "accountant of gaussian rounds without shuffler blankets must be 'theorem3' or 'rdp'"),
        (f"{OPEN_PLAN} --rounds 2 --mechanism ldp-sgd --accountant theorem3",
         "accountant of ldp-sgd rounds without shuffler blankets must be"),
        (f"{OPEN_PLAN} --rounds 2 --device-megabytes 1",
         "--device-megabytes goes with plans that are compared"),
        (f"{COMPARED} --dataset imagenet", "--dataset must be 'mnist' or 'fashion-mnist', got 'im"),
        (COMPARED, "give either --dataset or --dimension, the model's parameters"),
        (f"{COMPARED} --dimension 33554401", "--dimension must be at most 33554400, as a report"),
        (f"{COMPARED} --dimension 5 --write x.toml", "--write needs --dataset"),
        (f"{COMPARED} --dimension 5 --device-megabytes nan",
         "--device-megabytes must be at least 0.000"),
        (f"{COMPARED} --dimension 500 --device-megabytes 0.01",
         "--device-megabytes must be at least 0.0106"),
        (f"{COMPARED} --dataset mnist --write x.toml -n 60001",
         "--users must lie in [1, 60000] (60000 training records, "),
        *((f"{COMPARED} --dataset mnist --write {path}", "--write must be a file in a folder")
          for path in ("nodir/x.toml", ".")),
        (f"{COMPARED} --dimension 5 --delta 2", "delta must be a number in (0, 1), got 2"),
        ("histogram a.csv --seed -1", "'--seed': -1 is not in the range 0<=x<="),
        (f"histogram a.csv --seed {2**128}", "'--seed': 3402"),
        ("audit -n 10", "noise_multiplier is missing"),
        (f"{AUDIT} --accountant magic", "accountant must be"),
        (f"{AUDIT} --confidence 1", "confidence must lie in (0, 1)"),
        (f"{AUDIT} --epsilon 1000", "epsilon must lie in [0, 700], got 1000"),
    ],
)  # fmt: skip
def test_in_a_plan_on_the_command_line(refusal, command, message):
    assert message in refusal(*command.split())


@pytest.mark.parametrize("content", [b"name = ", b"[privacy]\ncheck_in_rate = 0,5\n", b"\xff\xfe"])
def test_in_toml(refusal, content):
    Path("run.toml").write_bytes(content)
    assert refusal("run", "run.toml").startswith("run.toml is not valid TOML: ")
