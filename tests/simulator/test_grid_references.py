"""The references of an experiment's plot: DP-SGD by Opacus, and no privacy."""

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn

from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.simulator.grid.definition import load_grid
from shufl.simulator.grid.grid_points import check, play, read_result
from shufl.simulator.grid.reference_runs import Reference

DIGITS = ["privacy.rounds = 40", "privacy.check_in_rate = 0.25", "privacy.delta = 1e-5"]


def train(config, private):
    return Reference(config, private).train()


def priced(rate, noise):
    """What dp-accounting's own composition says of the 40 rounds."""
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    return PLDAccountant().compose(event, 40).get_epsilon(1e-5)


def test_plain_training_has_neither_noise_nor_a_promise():
    result = train(load("quickstart", DIGITS), private=False)
    assert result["score"] > 0.93
    assert result.keys() == {"score_name", "score", "loss", "check_in_rate"}


@pytest.mark.slow
def test_central_training_spends_its_budget_and_learns_less():
    plain = train(load("quickstart", DIGITS), private=False)
    config = load("quickstart", [*DIGITS, "privacy.target_epsilon = 1.0"])
    result = train(config, private=True)
    assert 0.95 < result["epsilon"]["opacus"] <= 1.0
    assert 0.5 < result["score"] < plain["score"]
    epsilon = priced(0.25, result["noise_multiplier"])
    assert epsilon == pytest.approx(result["epsilon"]["opacus"], rel=0.02)


@pytest.mark.slow
def test_central_training_draws_batches_at_the_rate_that_it_accounts_for():
    sizes = ["privacy.check_in_rate = 0.001", "privacy.target_epsilon = 1.0"]
    result = train(load("quickstart", [*DIGITS, *sizes]), private=True)
    assert result["check_in_rate"] == 1 / 719  # 1 437 records in batches of 2, not 1 000 of 1.4
    epsilon = priced(1 / 719, result["noise_multiplier"])
    assert epsilon == pytest.approx(result["epsilon"]["opacus"], rel=0.02)


def test_central_training_needs_a_delta_that_is_a_number():
    with pytest.raises(ConfigError, match=r"privacy\.delta must be a number"):
        Reference(load("quickstart", ['privacy.delta = "1/n"']), private=True)


@pytest.mark.parametrize("users", [400, 1436])
def test_central_training_is_not_compared_with_users_of_several_records(users):
    message = f"protects single records: .* got {users} for 1437 records$"
    with pytest.raises(ConfigError, match=message):
        Reference(load("quickstart", [*DIGITS, f"data.users = {users}"]), private=True)
    Reference(load("quickstart", [*DIGITS, f"data.users = {users}"]), private=False)


class Attentive(nn.Module):
    """Attention by torch's own module, for which Opacus has another."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.attention = nn.MultiheadAttention(input_shape[-1], 1, batch_first=True)
        self.scores = nn.Linear(input_shape[-1], classes)

    def forward(self, records):
        rows = records[:, 0]
        return self.scores(self.attention(rows, rows, rows)[0].mean(1))


@pytest.mark.slow
def test_central_training_of_a_model_that_opacus_does_not_know_is_one_line():
    name = f"{__name__}:Attentive"
    with pytest.raises(ConfigError, match=f"^Opacus cannot train model {name} as configured: "):
        Reference(load("quickstart", [*DIGITS, f"model.name = {name}"]), private=True)


class Guess:
    """A trainer of one's own that learns nothing."""

    def __init__(self, config):
        if config.privacy.rounds > 99:
            raise ValueError("too many\nrounds")
        self.seed = config.seed

    def train(self):
        score = float("nan") if self.seed == 13 else 0.1
        return {"score_name": "accuracy", "score": score, "epsilon": {"mine": 0.5}}


def guesses(tmp_path, seed, rounds=3):
    """The one point of a grid of guesses."""
    grid = tmp_path / "guesses.toml"
    grid.write_text(f"""
title = "guesses"
base = "quickstart"
across = "privacy.noise_multiplier"
label = "z"
values = [2.0]
seeds = [{seed}]
settings = {{ "simulation.engine" = "vectorised", "privacy.rounds" = {rounds} }}
[[series]]
name = "guess"
trainer = "test_grid_references:Guess"
""")
    (point,) = load_grid(str(grid))[1].points()
    return point


def test_a_trainer_of_ones_own_has_its_result_beside_the_others(tmp_path):
    point = guesses(tmp_path, seed=1)
    check(point)
    play(point, tmp_path, 1)
    result = read_result(tmp_path)
    assert (result["score"], result["epsilon"], result["rounds"]) == (0.1, {"mine": 0.5}, 3)
    assert point.own_code == ["test_grid_references:Guess"]


def test_a_trainer_of_ones_own_that_refuses_or_has_no_score_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"Guess does not take the .*: too many rounds"):
        check(guesses(tmp_path, seed=1, rounds=100))
    with pytest.raises(ValueError, match="score must be a number, got nan"):
        play(guesses(tmp_path, seed=13), tmp_path, 1)
    assert read_result(tmp_path) is None
