"""One round offered to a device again and again, and budgets spread over many runs."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sqlite3

import pytest
from client_world import Round, reply_content
from rounds import make_plan

from clients import DeviceLedger, DeviceLimits, RoundRefused, load_device
from shuffler import ControlClient, RoundHeader, ShufflerProcess

PLAN = make_plan(
    users=1000,
    check_in_rate=0.5,
    noise_multiplier=1.0,
    rounds=100,
    delta=1e-5,
    target_epsilon=100.0,
    minimum_batch=1,
    shuffler_blankets=500.0,
    accountant="blanket",
)


def header(round, run_id="run", plan=PLAN):
    return RoundHeader(run_id, round, "model", plan.digest(), "key")


def limits(**changes):
    return DeviceLimits(**({"most_epsilon": 5.0, "delta": 1e-5} | changes))


def epsilon_of(rounds, plan=PLAN):
    accountant = plan.make_accountant("blanket")
    return accountant.compose(plan.event(), rounds).get_epsilon(1e-5)


def test_an_open_round_announced_under_many_contexts_flips_one_coin(tmp_path):
    """Flower's context is new each time, and the node has been started again in between."""
    with ShufflerProcess() as process, ControlClient(process.address, process.control) as control:
        place = tmp_path / "device.db"
        round = Round(
            process.address,
            process.submit,
            control,
            "contexts",
            ledger=lambda _: DeviceLedger(place),
        ).open()
        reply_content(round.announce())
        for attempt in range(5):
            moved = tmp_path / f"moved-{attempt}.db"
            shutil.move(place, moved)
            place = moved
            with pytest.raises(RoundRefused, match=r"round 1 of run .* was offered .* before"):
                round.announce()
        assert len(round.released()) == 4


def test_the_owners_budget_holds_over_all_runs(tmp_path):
    """A server that begins a run for each round spends the same epsilon as one with many rounds."""
    path = tmp_path / "device.db"
    accepted = 0
    most = epsilon_of(7) * 1.001
    for number in range(1, 20):
        ledger = DeviceLedger(path, limits(most_epsilon=most))  # as after a restart
        try:
            ledger.offer(header(1 + number % 2, f"run {number}"), PLAN)
        except RoundRefused as refused:
            assert "epsilon up to" in str(refused)
            break
        accepted += 1
    assert accepted == 7
    assert sum(run.rounds for run in DeviceLedger(path).offered()) == 7  # no more is noted either
    with pytest.raises(RoundRefused, match="epsilon up to"):
        DeviceLedger(path, limits(most_epsilon=most)).offer(header(50, "run 1"), PLAN)


def test_runs_of_different_plans_add_up(tmp_path):
    other = PLAN.replace(check_in_rate=1.0, rounds=7)
    ledger = DeviceLedger(tmp_path / "device.db", limits(most_epsilon=50.0))
    for number in range(1, 4):
        ledger.offer(header(number), PLAN)
        ledger.offer(header(number, "other", other), other)
    found = {run.run_id: run.rounds for run in ledger.offered()}
    assert found == {"run": 3, "other": 3}
    both = PLAN.make_accountant("blanket").compose(PLAN.event(), 3).compose(other.event(), 3)
    strict = DeviceLedger(
        tmp_path / "device.db", limits(most_epsilon=both.get_epsilon(1e-5) * 1.0001)
    )
    with pytest.raises(RoundRefused, match="epsilon up to"):
        strict.offer(header(4), PLAN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"least_noise": 1.5}, "noise multipliers of at least 1.5, the plan has 1"),
        ({"most_check_in_rate": 0.1}, "check-in rates of at most 0.1, the plan has 0.5"),
        ({"plans": ("0" * 64,)}, "has not accepted the plan"),
        ({"most_epsilon": 1e-6}, "accepts epsilon up to 1e-06 over all runs"),
    ],
)
def test_what_the_owner_does_not_accept_is_refused_and_not_entered(tmp_path, changes, message):
    ledger = DeviceLedger(tmp_path / "device.db", limits(**changes))
    with pytest.raises(RoundRefused, match=message):
        ledger.offer(header(1), PLAN)
    assert ledger.offered() == []


def test_a_plan_without_an_epsilon_for_the_owner_is_refused(tmp_path):
    """The owner counts on nobody but the shuffler, and this plan has no blankets."""
    plan = PLAN.replace(shuffler_blankets=0.0, accountant="theorem3")
    ledger = DeviceLedger(tmp_path / "device.db", limits())
    with pytest.raises(RoundRefused, match="the device's owner counts otherwise: accountant of"):
        ledger.offer(header(1, plan=plan), plan)


def test_the_owners_plans_are_accepted(tmp_path):
    ledger = DeviceLedger(tmp_path / "device.db", limits(plans=(PLAN.digest(),)))
    ledger.offer(header(1), PLAN)
    assert [(run.run_id, run.plan, run.rounds) for run in ledger.offered()] == [("run", PLAN, 1)]


def offer_until_killed(path, queue):
    ledger = DeviceLedger(path)
    for number in range(1, 100_000):
        ledger.offer(header(number), PLAN)
        queue.put(number)


@pytest.mark.slow
def test_what_was_offered_survives_kill_9(tmp_path):
    """A coin is flipped only after `offer` has returned: so every such round must be there."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=offer_until_killed, args=(tmp_path / "device.db", queue))
    process.start()
    answered = 0
    while answered < 25:
        answered = queue.get()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    while not queue.empty():
        answered = queue.get()
    (run,) = DeviceLedger(tmp_path / "device.db").offered()
    assert run.rounds >= answered
    for number in range(1, answered + 1):
        with pytest.raises(RoundRefused, match="was offered to this device before"):
            DeviceLedger(tmp_path / "device.db").offer(header(number), PLAN)


def test_a_ledger_that_cannot_be_read_or_written_is_no_reason_to_go_on(tmp_path):
    with pytest.raises(ValueError, match=r"ledger .* cannot be used: unable to open"):
        DeviceLedger(tmp_path / "missing" / "device.db")
    (tmp_path / "device.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"ledger .* cannot be used: file is not a database"):
        DeviceLedger(tmp_path / "device.db")
    ledger = DeviceLedger(tmp_path / "good.db", limits())
    with sqlite3.connect(tmp_path / "good.db") as rows:
        rows.execute("INSERT INTO plans VALUES ('d', 'no plan')")
        rows.execute("INSERT INTO rounds(run_id, round, plan, commitment) VALUES ('r', 1, 'd', '')")
    with pytest.raises(RoundRefused, match="what the device was offered has no epsilon"):
        ledger.offer(header(1), PLAN)


OWNER = """
ledger = "device.db"
most_epsilon = 5.0
delta = 1e-5
"""


def test_an_owners_file_names_ledger_and_limits(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER + 'least_noise = 0.5\nplans = ["' + PLAN.digest() + '"]\n')
    ledger = load_device(path)
    assert ledger.limits == limits(least_noise=0.5, plans=(PLAN.digest(),))
    ledger.offer(header(1), PLAN)
    assert (tmp_path / "device.db").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("most_epsilon = 1.0\ndelta = 1e-5", "ledger must be the path"),
        ('ledger = "device.db"\ndelta = 1e-5', "most_epsilon is missing"),
        (OWNER + "most_epsilom = 3", "most_epsilom"),
        (OWNER + 'accountant = "nobody"', "accountant must be 'theorem3' or "),
        (OWNER + 'plans = ["abc"]', "plans.* must be a list of SHA-256 digests"),
        (OWNER + "most_check_in_rate = 2.0", r"most_check_in_rate must be a number in \(0, 1\]"),
        ("ledger = ", "is not valid TOML"),
    ],
)
def test_a_mistake_in_an_owners_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "device.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_device(path)
    assert "\n" not in str(error.value)
