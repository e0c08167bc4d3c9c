"""The budget guard, rounds within budget, the table of every accountant."""

import math

import dp_accounting
import numpy as np
import pytest

from rounds import make_plan
from shufl import accounting, protocol
from shufl.protocol.plan import Window


def small_plan(**change):
    values = {
        "users": 2000, "check_in_rate": 0.1, "noise_multiplier": 4.0, "rounds": 2000,
        "delta": 1e-5, "target_epsilon": 6.0, "minimum_batch": 10, "adjacency": "zero-out",
    }  # fmt: skip
    return make_plan(**values | change)


def guard(plan, ledger=None):
    return accounting.PrivacyBudget(plan, ledger)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"accountant": "rdp", "target_epsilon": 0.6, "noise_multiplier": 2.0},
        {"accountant": "local", "target_epsilon": 12.0},
        {"adjacency": "replace", "target_epsilon": 5.5, "shuffler_blankets": 60.0},
        {"accountant": "blanket", "shuffler_blankets": 60.0, "target_epsilon": 0.15},
        pytest.param({"accountant": "crowd", "target_epsilon": 0.15}, marks=pytest.mark.slow),
    ],
)
def test_the_guard_halts_at_the_round_found_by_bisection(change):
    plan = small_plan(**change)
    expected = accounting.rounds_within_budget(plan)
    assert 0 < expected < plan.rounds
    budget, spent = guard(plan), 0
    while not budget.would_exceed():
        budget.spend()
        spent += 1
    assert spent == expected
    assert budget.epsilon <= plan.target_epsilon < budget.epsilon_after()
    with pytest.raises(RuntimeError, match="one more round would exceed"):
        budget.spend()
    fresh = plan.make_accountant().compose(plan.event(), expected)
    assert fresh.get_epsilon(plan.delta) == budget.epsilon
    assert fresh.compose(plan.event()).get_epsilon(plan.delta) > plan.target_epsilon


def test_the_plans_rounds_are_the_most_and_none_the_least():
    assert accounting.rounds_within_budget(small_plan(rounds=3)) == 3
    assert accounting.rounds_within_budget(small_plan(target_epsilon=1e-6)) == 0
    assert accounting.rounds_within_budget(small_plan(), "rdp") == 2000


def test_a_round_is_on_disk_before_it_is_composed(tmp_path, monkeypatch):
    plan = small_plan()
    path = tmp_path / "ledger"
    with accounting.Ledger.create(path, plan, "run") as ledger:
        budget = guard(plan, ledger)
        order = []
        compose = budget.accountant.compose

        def watched(event):
            order.append((len(accounting.Ledger.read(path).entries), budget.epsilon))
            return compose(event)

        monkeypatch.setattr(budget.accountant, "compose", watched)
        budget.spend(1)
        assert order == [(1, 0.0)]
        assert budget.epsilon > 0


def test_what_cannot_be_recorded_is_not_composed(tmp_path):
    plan = small_plan()
    ledger = accounting.Ledger.create(tmp_path / "ledger", plan, "run")
    budget = guard(plan, ledger)
    budget.spend(1)
    before = budget.epsilon
    with pytest.raises(ValueError, match="round must be at least 2"):
        budget.spend(1)
    ledger.close()
    with pytest.raises(accounting.LedgerError):
        budget.spend(2)
    assert budget.epsilon == before


def test_a_refused_round_is_not_recorded(tmp_path):
    plan = small_plan(target_epsilon=1e-6)
    with accounting.Ledger.create(tmp_path / "ledger", plan, "run") as ledger:
        with pytest.raises(RuntimeError, match="one more round would exceed"):
            guard(plan, ledger).spend(1)
        assert ledger.entries == ()


def test_a_continued_run_has_spent_what_its_ledger_says(tmp_path):
    plan = small_plan()
    path = tmp_path / "ledger"
    with accounting.Ledger.create(path, plan, "run") as ledger:
        budget = guard(plan, ledger)
        for _ in range(4):
            budget.spend()
        spent = budget.epsilon
    with accounting.Ledger.open(path, plan) as ledger:
        assert guard(plan, ledger).epsilon == spent
    path.write_bytes(path.read_bytes()[:-30])
    with accounting.Ledger.open(path, plan) as ledger:
        assert guard(plan, ledger).epsilon >= spent


def test_a_ledger_of_another_plan_is_refused(tmp_path):
    with accounting.Ledger.create(tmp_path / "ledger", small_plan(), "run") as ledger:
        guard(small_plan(), ledger).spend()
        with pytest.raises(ValueError, match="the ledger must be of plan"):
            guard(small_plan(noise_multiplier=4.1), ledger)


def of_reports():
    """The accountants but those of sums alone."""
    accountants = accounting.ACCOUNTANTS.items()
    return [name for name, cls in accountants if protocol.Shuffled in cls.round_kinds]


@pytest.mark.slow
def test_the_table_has_every_accountant_with_what_it_covers():
    rows = accounting.epsilon_table(small_plan(), 20)
    assert [row.name for row in rows] == of_reports()
    by_name = {row.name: row for row in rows}
    assert by_name["rdp"].epsilon < by_name["theorem3"].epsilon < by_name["local"].epsilon
    assert all(row.covers for row in rows)
    assert "for a user whose coins all say yes" in by_name["local"].warning
    for name in accounting.accountants_for(small_plan().event()):
        expected = small_plan().make_accountant(name).compose(small_plan().event(), 20)
        assert by_name[name].epsilon == expected.get_epsilon(1e-5)
    assert not any(row.epsilon for row in accounting.epsilon_table(small_plan(), 0))
    assert not any("real machines" in row.covers for row in rows)
    deployed = small_plan().replace(window=Window(most_records=3), cover=True, least_present=2000)
    rows = accounting.epsilon_table(deployed, 20)
    assert all("at most one user of a node makes the process" in row.covers for row in rows)


def test_an_accountant_that_does_not_price_the_rounds_guards_nothing(fixed_size_only):
    plan = small_plan()
    with pytest.raises(dp_accounting.UnsupportedEventError, match="fixed-size-only prices"):
        accounting.rounds_within_budget(plan, fixed_size_only)
    with pytest.raises(ValueError, match="accountant must be one of theorem3"):
        plan.replace(accountant=fixed_size_only)


def test_no_more_than_the_plans_rounds_are_spent(tmp_path):
    plan = small_plan(rounds=3)
    with accounting.Ledger.create(tmp_path / "ledger", plan, "run") as ledger:
        for _ in range(2):
            guard(plan, ledger).spend()
        last = guard(plan, ledger)
        last.spend()
        with pytest.raises(RuntimeError, match="one more round would exceed"):
            last.spend()
        assert len(ledger.entries) == 3


def test_rounds_whose_epsilon_is_not_a_number_are_not_within_a_budget(monkeypatch):
    monkeypatch.setattr(accounting.Theorem3Accountant, "epsilon_after", lambda *_: math.nan)
    assert accounting.rounds_within_budget(small_plan()) == 0
    assert accounting.most_rounds(lambda rounds: math.nan, 1.0) == 0
    budget = guard(small_plan())
    assert budget.would_exceed()
    with pytest.raises(RuntimeError, match="one more round would exceed"):
        budget.spend()


@pytest.mark.slow
def test_who_stops_a_run_by_what_it_shows_loses_more_than_epsilon_so_far_but_not_as_planned():
    """Who stops as soon as the loss so far is well above ε so far: simulated, one user."""
    rounds, delta, step = 1000, 0.01, 1 / 30
    plan = small_plan(
        users=10, check_in_rate=1.0, noise_multiplier=30.0, rounds=rounds, delta=delta,
        target_epsilon=1e9, adjacency="zero-out", accountant="local",
    )  # fmt: skip
    (row,) = (row for row in accounting.epsilon_table(plan, 17) if row.name == "local")
    price = plan.make_accountant().epsilon_after
    so_far = np.array([price(plan.event(), delta, t) for t in range(1, rounds + 1)])
    assert (row.epsilon, row.planned) == (so_far[16], so_far[-1])
    draws = np.random.default_rng(1).standard_normal((4000, rounds))
    losses = np.cumsum(step**2 / 2 + step * draws, axis=1)
    told = np.maximum(1 - np.exp(so_far - losses), 0) > 0.15
    stops = np.where(told.any(axis=1), told.argmax(axis=1), rounds - 1)
    at_stop = losses[np.arange(len(stops)), stops]
    # δ(ε) is at least the mean of (1 - e^{ε - loss})_+, whatever ε is stated where.
    assert np.mean(np.maximum(1 - np.exp(so_far[stops] - at_stop), 0)) > 3 * delta
    assert np.mean(np.maximum(1 - np.exp(row.planned - at_stop), 0)) < delta
