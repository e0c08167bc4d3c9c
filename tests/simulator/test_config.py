"""Configurations: what is left out of them, what they mean, and the odder mistakes in them."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

import shufl
from nights import by_night
from shufl.learning.config import DATASETS, FEATURES, dumps, load, shipped
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare


def without(*keys):
    """The lines of the quickstart configuration without some keys."""
    text = Path(__file__).parents[2].joinpath("configs", "quickstart.toml").read_text()
    return "\n".join(line for line in text.splitlines() if line.split(" =")[0] not in keys)


def test_an_accountant_left_out_is_theorem3(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(without("accountant"))
    experiment = prepare(load(str(path)))
    assert experiment.plan.accountant == experiment.config.privacy.accountant == "theorem3"
    path.write_text(dumps(experiment.config))
    assert load(str(path)) == experiment.config


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.0, *by_night(None)])
def test_blankets_left_open_are_the_fewest_that_reach_the_target(tmp_path, noise):
    path = tmp_path / "run.toml"
    path.write_text(without("accountant", "noise_multiplier", "minimum_batch"))
    overrides = ["privacy.rounds=20", "privacy.target_epsilon=1", "privacy.accountant=blanket"]
    overrides += [] if noise is None else [f"privacy.noise_multiplier={noise}"]
    experiment = prepare(load(str(path), [*overrides, "privacy.shuffler_blankets=least-error"]))
    plan = experiment.plan
    assert experiment.config.privacy.shuffler_blankets == plan.shuffler_blankets > 1

    def epsilon(blankets):
        event = attrs.evolve(plan.event(), blankets=blankets)
        return plan.make_accountant().compose(event, 20).get_epsilon(plan.delta)

    assert epsilon(plan.shuffler_blankets) <= 1.0 < epsilon(plan.shuffler_blankets * 0.99)
    expected = plan.users * plan.check_in_rate + plan.shuffler_blankets
    assert plan.minimum_batch == min(plan.users, int(expected / 2))
    covered = prepare(load(str(path), ["privacy.cover=true", "privacy.noise_multiplier=1"])).plan
    assert covered.minimum_batch == covered.users // 2


def test_a_misspelt_key_is_named_before_what_is_missing_because_of_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[privacy]\n')
    missing = r"privacy.check_in_rate is missing: a number in \[1e-12, 1\]"
    with pytest.raises(ConfigError, match=missing):
        load(str(path))
    path.write_text(without("check_in_rate") + "\nnods = 4\n")
    with pytest.raises(ConfigError, match=r"unknown key simulation.nods; did you mean nodes\?"):
        load(str(path))
    path.write_text(without("check_in_rate"))
    override = ["privacy.chek_in_rate=0.5"]
    with pytest.raises(ConfigError, match=r"^.*: unknown key privacy.chek_in_rate; did you mean"):
        load(str(path), override)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("9" * 5000, "is not valid TOML"),
        ("[" * 5000 + "]" * 5000, "is not valid TOML: it is nested too deeply"),
        ("0x" + "f" * 5000, "seed must be a whole number in .*, got more than can be shown"),
        ("{a" + ".a" * 5000 + " = 1}", "seed must be a whole number in .*, got (more than|{'a')"),
        ("'" + "a" * 5000 + "'", "seed must be a whole number in .*, got 'a{96}\\.\\.\\.$"),
    ],
    ids=["digits", "nested", "hexadecimal", "tables", "text"],
)
def test_a_value_of_thousands_of_characters_is_one_line(tmp_path, seed, message):
    path = tmp_path / "run.toml"
    shipped = load("quickstart").model_copy(update={"seed": "system"})
    path.write_text(dumps(shipped).replace('"system"', seed, 1))
    with pytest.raises(ConfigError, match=message):
        load(str(path))
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        load("quickstart", [f"seed={seed}"])


def test_a_folder_is_no_configuration(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^an empty name cannot be read"):
        load("")
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").name == "quickstart"


def test_numbers_of_numpy_are_numbers():
    for seed in np.arange(2):
        config = load("quickstart", {"seed": seed, "simulation.nodes": np.int64(3)})
        assert config == load("quickstart", {"seed": int(seed), "simulation.nodes": 3})


@pytest.mark.parametrize("name", shipped())
def test_shipped_configurations_load_and_write_back_to_the_same(name, tmp_path):
    config = load(name)
    path = tmp_path / "again.toml"
    path.write_text(dumps(config))
    assert load(str(path)) == config


def test_overrides_take_toml_values_and_bare_words():
    config = load("quickstart", ["seed=system", "privacy.check_in_rate=0.25", "model.name=mlp"])
    assert (config.seed, config.privacy.check_in_rate, config.model.name) == ("system", 0.25, "mlp")


@pytest.mark.slow
def test_a_mistake_is_said_before_anything_heavy_is_imported():
    code = (
        "import sys; from shufl.learning.config import ConfigError, load\n"
        "try: load('quickstart', ['privacy.delta=2'])\n"
        "except ConfigError: print(sorted({'torch', 'flwr', 'ray', 'grpc', 'dp_accounting'}\n"
        "    & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_name_means_something():
    for table in (DATASETS, FEATURES):
        assert all(callable(pkgutil.resolve_name(meant)) for meant in table.values())


def test_a_search_that_does_not_use_up_the_target_is_told_before_the_run():
    overrides = ["privacy.target_epsilon=9e5", "privacy.noise_multiplier=", "privacy.rounds=3"]
    found = prepare(load("quickstart", [*overrides, "privacy.accountant=local"])).unused
    assert found.endswith("of 900000, and the search goes no further than noise_multiplier = 0.2")
    assert prepare(load("quickstart", ["privacy.rounds=3"])).unused is None  # nothing is searched


@pytest.mark.parametrize(
    ("call", "argument"),
    [(shufl.load_run, "folder"), (shufl.resume, "folder"), (shufl.run, "config")],
)
def test_what_is_no_path_is_one_line(call, argument):
    with pytest.raises(ConfigError, match=f"^{argument} must be a path, got None$"):
        call(None)
