"""What is learnt: tasks that ship and one's own, of users of unequal size, in both engines."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch.nn import functional

import shufl
from nights import by_night
from shufl.learning import evaluate, local_update
from shufl.learning.config import load
from shufl.learning.parameters import sent
from shufl.learning.tasks import CLASSIFICATION, NEXT_TOKEN, PADDING, REGRESSION
from shufl.protocol.mechanisms import SeededRandomness, clip
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import engine_of
from shufl.results.experiment import prepare
from shufl.results.run_page import page_of_run
from shufl.simulator.engines.report_sum import ReportSum
from task_world import PARTS, SEED, SETTINGS, SIZES, TASKS, USERS, Normed, houses


def experiment_of(task, *changes):
    dataset, model, _, more = TASKS[task]
    names = f"data.dataset={dataset}", f"model.name={model}"
    return prepare(load("quickstart", [*SETTINGS, *names, *more, *changes]))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize(
    ("task", "algorithm"),
    [
        ("own", "fedsgd"),
        ("logits", "fedavg"),
        ("frozen-norm", "fedsgd"),
        *by_night(("next-token", "fedavg"), ("regression", "fedsgd")),
    ],
)
def test_reports_of_unequal_users_are_those_of_one_after_another(task, algorithm, chunk):
    changes = [
        "simulation.engine=vectorised", f"training.algorithm={algorithm}",
        "training.local_batch_size=3", f"simulation.records_per_chunk={chunk}",
        "simulation.noise=aggregate",
    ]  # fmt: skip
    experiment = experiment_of(task, *changes)
    engine = engine_of("vectorised")(experiment)
    assert experiment.plan.users == USERS and experiment.partition.most_records == SIZES.max()
    if algorithm == "fedsgd" and task != "frozen-norm":
        assert engine.gradients == "book-keeping"
    records, model = experiment.load_users(), experiment.make_model().train()
    mechanism, users = experiment.plan.mechanism, np.arange(USERS)
    total, seeds = 0.0, SeededRandomness(SEED).training_seeds(2, users).tolist()
    for user, seed in zip(users.tolist(), seeds, strict=True):
        features, labels = records(user)
        update = local_update(model, features, labels, experiment.local_training, seed)
        total = total + clip(update, mechanism.clip_norm)
    unit = mechanism.unit(experiment.parameters)
    found = unit * ReportSum(engine.settings, records).sum(2, sent(model), users, [])
    np.testing.assert_allclose(found, total, rtol=1e-4, atol=USERS * unit)


def test_classification_is_measured_as_scikit_learn_does():
    random = torch.Generator().manual_seed(0)
    for classes in (2, 3, 10):
        scores = torch.randn(50, classes, generator=random)
        labels = torch.randint(classes - 1, (50,), generator=random)  # nobody has the last class
        found, guesses = CLASSIFICATION.measure(scores, labels), scores.argmax(1)
        assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, guesses))
        assert found["macro_f1"] == pytest.approx(
            sklearn.f1_score(labels, guesses, average="macro")
        )
        loss = sklearn.log_loss(labels, scores.softmax(1).double(), labels=range(classes))
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("outputs", "shape"), [((50, 1), (50,)), ((50, 4), (50, 4))])
def test_regression_is_measured_as_scikit_learn_does(outputs, shape):
    random = torch.Generator().manual_seed(0)
    given, labels = torch.randn(outputs, generator=random), torch.randn(shape, generator=random)
    found, flat = REGRESSION.measure(given, labels), given.reshape(shape)
    mean_squared = sklearn.mean_squared_error(labels, flat)
    assert found["loss"] == pytest.approx(mean_squared, rel=1e-5)
    assert found["rmse"] == pytest.approx(mean_squared**0.5, rel=1e-5)
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(labels, flat), rel=1e-5)


def test_tokens_are_measured_without_padding():
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 6, 7, generator=random)
    labels = torch.randint(7, (30, 6), generator=random)
    labels[torch.arange(6) >= torch.randint(1, 7, (30, 1), generator=random)] = PADDING
    labels[3] = PADDING
    there = labels != PADDING
    found = NEXT_TOKEN.measure(scores, labels)
    right = sklearn.accuracy_score(labels[there], scores.argmax(2)[there])
    assert found["accuracy"] == pytest.approx(right)
    loss = sklearn.log_loss(labels[there], scores[there].softmax(1).double(), labels=range(7))
    assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    each = [
        functional.cross_entropy(s, t).item() if (t != PADDING).any() else 0.0
        for s, t in zip(scores, labels, strict=True)
    ]
    np.testing.assert_allclose(NEXT_TOKEN.loss(scores, labels).numpy(), each, rtol=1e-5)


def test_logits_of_many_batches_are_measured():
    """Whatever else the model gives."""
    model, records = Normed((3,), 2), torch.randn(2500, 3)
    labels = model.eval()(records)["logits"].argmax(1)
    assert evaluate(model, records, labels, CLASSIFICATION.measure)["accuracy"] == 1.0


def test_the_constant_score_is_that_of_the_best_answer_that_is_always_the_same():
    """It is compared with the metrics of every constant answer, or of a grid of them."""
    labels = torch.tensor([2, 0, 2, 1, 2, 1])
    answers = [functional.one_hot(torch.full((6,), each), 3).double() for each in range(3)]
    best = max(CLASSIFICATION.metrics(each, labels)["accuracy"] for each in answers)
    assert CLASSIFICATION.constant(labels) == best == 0.5
    labels = torch.tensor([[0, 2, PADDING], [2, 2, 1]])
    answers = [functional.one_hot(torch.full((2, 3), each), 3).double() for each in range(3)]
    best = max(NEXT_TOKEN.metrics(each, labels)["accuracy"] for each in answers)
    assert NEXT_TOKEN.constant(labels) == pytest.approx(best) == pytest.approx(0.6)
    numbers = torch.arange(0, 10, 0.125)
    for labels, answers in (
        (torch.tensor([1.0, 2.0, 6.0]), numbers),
        (torch.tensor([[1.0, 0.0], [2.0, 9.0]]), torch.cartesian_prod(numbers, numbers)),
    ):
        errors = (REGRESSION.metrics(each.expand(labels.shape), labels) for each in answers)
        assert REGRESSION.constant(labels) == pytest.approx(min(each["rmse"] for each in errors))


def mean_of_all(outputs, labels):
    return functional.mse_loss(outputs, labels)


def less_the_mean(outputs, labels):
    return (outputs - labels.mean(0)).square().mean(1)


def no_errors(outputs, labels):
    return {"error": 0.0}


def of_each(outputs, labels):
    return (outputs - labels).abs().sum(1)


def raises(outputs, labels):
    raise ValueError("no metrics")


NO_SCORE = shufl.Task(of_each, no_errors, "mae")
TAKEN = shufl.Task(of_each, lambda outputs, labels: {"error": 1.0, "score": 2.0}, "error")
RAISES = shufl.Task(of_each, raises, "error")
NO_CONSTANT = shufl.Task(of_each, no_errors, "error", constant=lambda labels: labels.nothing)
MEAN_OF_ALL = shufl.Task(mean_of_all, no_errors, "error")
LESS_THE_MEAN = shufl.Task(less_the_mean, no_errors, "error")
NOT_A_TASK = {"loss": mean_of_all}


@pytest.mark.parametrize(
    ("dataset", "task", "message"),
    [
        ("houses", "classification", "must have classes, a whole number of at least 1, got None"),
        ("houses", "classificaton", "data.task must be one of classification, regression, next-"),
        ("houses", "nowhere:task", "data.task nowhere:task could not be imported"),
        ("houses", f"{__name__}:NOT_A_TASK", "must be a shufl.Task or return one, got {'loss'"),
        ("houses", f"{__name__}:MEAN_OF_ALL", "must give a loss for each record"),
        ("houses", f"{__name__}:LESS_THE_MEAN", "must give each record a loss of its own"),
        ("houses", f"{__name__}:NO_SCORE", "must have its score, mae, among its metrics"),
        ("houses", f"{__name__}:TAKEN", "must name its metric score otherwise"),
        ("houses", f"{__name__}:RAISES", "model on test records: ValueError (test_tasks.py"),
        ("houses", f"{__name__}:NO_CONSTANT", "test records: AttributeError (test_tasks.py"),
        ("houses", "next-token", "must have classes"),
        ("sentences", "regression", "must have no classes, got 7, for data.task regression"),
        ("sentences", "classification", "must have one train label for each"),
        ("digits", "regression", "must have no classes, got 10"),
        ("digits", "next-token", "must have one train label for each"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(dataset, task, message):
    name = dataset if dataset == "digits" else f"task_world:{dataset}"
    sets = [f"data.dataset={name}", f"data.task={task}", "model.name=logistic-regression"]
    with pytest.raises(ConfigError) as error:
        prepare(load("quickstart", [*SETTINGS, *sets]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_of_too_few_scores_a_token_is_refused():
    sets = ["data.dataset=task_world:sentences", "model.name=task_world:MeanOfTokens"]
    with pytest.raises(ConfigError, match=r"must give 7 scores a token, got shape \(7,\)"):
        prepare(load("quickstart", [*SETTINGS, *sets]))


def test_a_task_of_a_notebook_needs_no_name(tmp_path):
    dataset = houses()
    own = shufl.Task(lambda outputs, labels: (outputs - labels).abs().sum(1), no_errors, "error")
    given = shufl.Dataset(
        *(getattr(dataset, part) for part in PARTS), users=dataset.users, task=own
    )
    changes = {"simulation.engine": "vectorised", "model.name": "logistic-regression"}
    config = load("quickstart", SETTINGS).model_dump(exclude_none=True)
    run = shufl.run(config, changes, dataset=given, runs=tmp_path, progress=False)
    assert (run.score_name, run.score) == ("error", 0.0)
    again = shufl.load_run(run.folder, dataset=given)
    assert again.score_name == "error" and again.metrics == run.metrics
    first_page = page_of_run(run.folder).partition("The run in numbers")[0]
    assert "trained on what a program gave" in first_page and "object:" not in first_page
    assert "the best answer that is the same" not in first_page  # the task does not say which
