"""Datasets with natural users, and the references that protect users: a trusted server, nobody."""

import gzip
import math

import numpy as np
import pytest
import torch
from scipy import stats

from shufl.learning.config import load
from shufl.learning.data.datasets import load_dataset
from shufl.learning.models import Additive
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.simulator.grid.definition import Point
from shufl.simulator.grid.grid_points import check, play, read_result
from shufl.simulator.grid.reference_runs import Reference, UserReference, trusted
from task_world import SETTINGS, SIZES, USERS

FILES = {
    "insteval.csv.gz": "s,d,studage,lectage,service,dept,y\n"
    + "".join(f"{100 - n // 3},{n % 7 * 10},2,{n % 2},0,{n % 3},{n % 5 + 1}\n" for n in range(30)),
    "movielens-ratings.csv.gz": "userId,movieId,rating,timestamp\n"
    + "".join(f"{n // 4},{(3, 50, 8)[n % 3]},{n % 9 / 2 + 0.5},1\n" for n in range(40)),
    "movielens-movies.csv.gz": 'movieId,title,year,genres\n50,"A, B",1995,Action|Drama\n'
    "8,C,,(no genres listed)\n3,D,2012,Drama\n",
}


@pytest.fixture
def natural(tmp_path, monkeypatch):
    """A folder with small files of the same form."""
    (tmp_path / "natural").mkdir()
    for name, content in FILES.items():
        (tmp_path / "natural" / name).write_bytes(gzip.compress(content.encode()))
    monkeypatch.setenv("SHUFL_DATA", str(tmp_path))
    load_dataset.cache_clear()
    yield tmp_path / "natural"
    load_dataset.cache_clear()


def test_ratings_of_lecturers_are_rows_of_ids_with_their_students(natural):
    data = load_dataset("insteval")
    assert data.users.unique().tolist() == list(range(8))  # of ten: a fifth is for testing
    assert (len(data.train_labels), len(data.test_labels)) == (24, 6)
    features = torch.cat([data.train_features, data.test_features])
    starts = [0, 7, 8, 10, 11]  # of lecturers, one age, two of lectures, one service, departments
    assert [int(column.min()) for column in features.T] == starts
    assert [int(column.max()) for column in features.T] == [6, 7, 9, 10, 13]
    labels = torch.cat([data.train_labels, data.test_labels])
    assert labels.unique().tolist() == [-2, -1, 0, 1, 2] and data.task == "regression"


def test_ratings_of_films_have_the_films_decade_and_genres(natural):
    data = load_dataset("movielens")
    films = {tuple(row) for row in torch.cat([data.train_features, data.test_features]).tolist()}
    decade, action, drama = 3, 3 + 12, 3 + 12 + 2
    assert films == {
        (0, decade + 9, action + 1, drama + 1),  # of 1995
        (1, decade + 0, action + 0, drama + 0),  # nobody knows when
        (2, decade + 11, action + 0, drama + 1),
    }


def test_a_missing_file_or_column_is_one_line(natural, monkeypatch):
    (natural / "movielens-movies.csv.gz").write_bytes(gzip.compress(b"movieId,genres\n1,a\n"))
    with pytest.raises(ConfigError, match=r"movielens-movies.csv.gz must have a column year"):
        load_dataset("movielens")
    (natural / "insteval.csv.gz").unlink()
    with pytest.raises(ConfigError, match=r"insteval.csv.gz must be in the folder natural .*lme4"):
        load_dataset("insteval")
    monkeypatch.delenv("SHUFL_DATA")
    with pytest.raises(ConfigError, match="got no SHUFL_DATA"):
        load_dataset("insteval")


def test_additive_models_add_the_numbers_of_a_records_ids():
    model = Additive((3,), 1, ids=9)
    records = torch.tensor([[0, 4, 8], [0, 5, 8]])
    assert not model(records).any()
    with torch.no_grad():
        model.numbers.weight.copy_(2.0 ** torch.arange(9)[:, None])
        model.constant.fill_(0.5)
    assert model(records).tolist() == [[1 + 16 + 256 + 0.5], [1 + 32 + 256 + 0.5]]


def config_of(*sets):
    named = "data.dataset=task_world:houses", "model.name=logistic-regression"
    own = "simulation.engine=vectorised", "simulation.noise=aggregate", "privacy.delta=1e-5"
    return load("quickstart", [*SETTINGS, *named, *own, *sets])


def reference(*sets):
    return UserReference(config_of(*sets))


def test_the_noise_of_a_trusted_server_has_the_epsilon_that_is_told():
    """With γ = 1 the mechanism is Gaussian, whose δ(ε) is known (Balle and Wang 2018)."""
    sets = "privacy.check_in_rate=1.0", "privacy.rounds=9", "privacy.target_epsilon=20.0"
    plan = prepare(trusted(config_of(*sets))).plan
    epsilon = plan.epsilon()
    mean = 3.0 / plan.noise_of_sum(USERS)  # of nine rounds
    normal = stats.norm.cdf
    delta = normal(mean / 2 - epsilon / mean) - math.exp(epsilon) * normal(
        -mean / 2 - epsilon / mean
    )
    assert delta == pytest.approx(1e-5, rel=0.02) and epsilon <= 20.0


def test_references_have_gaussian_noise_whatever_mechanism_they_are_compared_with():
    for mechanism in (
        {"mechanism": "ldp-sgd", "noise_multiplier": 2.0},
        {"mechanism": "randomised-response", "categories": 10, "local_epsilon": 1.0},
    ):
        config = config_of()
        changed = config.privacy.model_copy(update={"noise_multiplier": None} | mechanism)
        config = config.model_copy(update={"privacy": changed})
        assert prepare(trusted(config)).plan.mechanism.name == "gaussian"
        assert UserReference(config)._experiment.plan.mechanism.name == "gaussian"


def test_without_privacy_users_count_equally_and_nothing_is_clipped():
    plain = reference("privacy.check_in_rate=1.0", "privacy.clip_norm=1e-9")
    model = plain._experiment.make_model().train()
    total = plain._sum(1, model)
    records = plain._experiment.load_users()
    expected = np.zeros(plain._experiment.parameters)
    for user in range(USERS):
        features, labels = records(user)
        assert len(labels) in SIZES
        loss = (model(features) - labels).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected += torch.cat([gradient.flatten() for gradient in gradients]).numpy()
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


def test_training_without_privacy_learns_and_with_little_learns_less(tmp_path):
    sets = "privacy.rounds=60", "training.learning_rate=0.3"
    plain = reference(*sets).train()
    point = Point("trusted", 0, 0, "central-users", config_of(*sets, "privacy.target_epsilon=0.05"))
    check(point)
    play(point, tmp_path, 1)
    private = read_result(tmp_path)
    assert plain["score_name"] == "rmse" and plain["score"] < 0.2 < 0.6 < private["score"]
    assert "epsilon" not in plain and 0.049 < private["epsilon"].pop("central") <= 0.05
    assert not private["epsilon"] and private["accountant"] == "central"
    assert private["adjacency"] == "add or remove" and private["noise_multiplier"] > 10


def test_opacus_is_no_reference_for_records_that_have_owners():
    named = "data.dataset=task_world:owned", "model.name=logistic-regression"
    with pytest.raises(ConfigError, match="take trainer central-users"):
        Reference(load("quickstart", [*SETTINGS, *named, "privacy.delta=1e-5"]), private=True)
