"""One round offered to a device again and again, and budgets spread over many runs."""

import dataclasses
import math
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from client_world import WINDOW, Round, reply_content
from rounds import make_plan
from shufl import accounting
from shufl.clients import (
    DeviceLedger,
    DeviceLimits,
    Node,
    RoundRefused,
    SimulatedLedger,
    client_app,
    load_device,
    serve_device,
)
from shufl.clients.device_ledger import runs_of
from shufl.shuffler import RoundHeader

PLAN = make_plan(
    users=1000, check_in_rate=0.5, noise_multiplier=1.0, rounds=100, shuffler_blankets=500.0,
    accountant="blanket",
)  # fmt: skip


def header(round, run_id="run", plan=PLAN):
    return RoundHeader(run_id, round, "model", plan.digest(), "key")


def limits(**changes):
    return DeviceLimits(**({"most_epsilon": 50.0, "delta": 1e-5} | changes))


def share(number):
    """Of delta, for a device's so-manieth run."""
    return 1e-5 * 6 / (math.pi * number) ** 2


def charge_of(rounds, number, plan=PLAN):
    """ε of a run that may have so many rounds, and is the device's so-manieth."""
    accountant = plan.make_accountant("blanket").compose(plan.event(), rounds)
    return accountant.get_epsilon(share(number))


@pytest.mark.parametrize("forgotten", [1, 2, 7, 40])
def test_a_lost_ledger_costs_no_more_than_delta_if_its_owner_does_as_the_page_says(forgotten):
    """Its shares, and all that the new one may ever spend; most_epsilon is in test_year.py."""
    page = Path(__file__).parents[2] / "docs/recovery.md"
    assert "multiply `delta` by 0.6 / (n + 1)" in page.read_text(encoding="utf-8")
    left = 1e-5 * 0.6 / (forgotten + 1)
    assert sum(map(share, range(1, 100_000))) < 1e-5
    assert sum(map(share, range(1, forgotten + 1))) + left <= 1e-5


def test_an_open_round_announced_under_many_contexts_flips_one_coin(make_round, tmp_path):
    """Flower's context is new each time, and the node has been started again in between."""
    place = tmp_path / "device.db"
    round = make_round(ledger=lambda _: SimulatedLedger(place)).open()
    reply_content(round.announce())
    for attempt in range(5):
        place = shutil.move(place, tmp_path / f"moved-{attempt}.db")
        client_app._nodes.clear()  # the node starts again
        with pytest.raises(RoundRefused, match="this device does not take part in this round"):
            round.announce()
    assert len(round.released()) == 4


def test_a_client_without_seed_and_ledger_takes_no_offer(make_round, caplog):
    """A round that is offered again would get other coins."""
    round = make_round(seed=None).open()
    for _ in range(2):
        with pytest.raises(RoundRefused):
            round.announce()
    assert "a client without a seed needs a device's ledger" in caplog.text


def test_the_server_is_not_told_why_a_device_does_not_take_part(tmp_path, caplog):
    """Neither the limits nor what was spent for others, nor that the ledger is damaged."""
    owner, path = limits(least_noise=7.0, most_epsilon=1e-3), tmp_path / "device.db"
    round = Round("127.0.0.1:1", None, None, "untold", ledger=lambda _: DeviceLedger(path, owner))
    for _ in range(2):
        with pytest.raises(RoundRefused, match=r"^this device does not take part in this run$"):
            round.greet()
        assert "noise multipliers of at least 7, the plan has 2" in caplog.text
        path.write_bytes(b"damaged")
        client_app._nodes.clear()


def test_the_owners_budget_holds_over_all_runs(tmp_path):
    """A run is charged in full at once, and runs add up, whoever chose them by what they saw."""
    path = tmp_path / "device.db"
    most = sum(charge_of(20, number) for number in (1, 2, 3)) * 1.0001
    accepted = []
    for number in range(1, 6):
        for round in range(1, 25):
            ledger = DeviceLedger(path, limits(most_epsilon=most))  # as after a restart
            try:
                ledger.offer(header(round, f"run {number}"), PLAN, 20)
            except RoundRefused as refused:
                accepted.append((number, round - 1, str(refused)))
                break
    assert [(number, rounds) for number, rounds, _ in accepted] == [
        (1, 20), (2, 20), (3, 20), (4, 0), (5, 0),
    ]  # fmt: skip
    assert all("has had its 20 rounds" in why for *_, why in accepted[:3])
    assert all("epsilon up to" in why for *_, why in accepted[3:])
    assert [run.offered for run in SimulatedLedger(path).offered()] == [20] * 3


def test_a_plan_chosen_by_the_first_runs_release_is_charged_beside_it(tmp_path):
    """After one round of z = 2 the server goes on with whichever of two plans suits what it saw.

    Tight composition of one round and either plan stays within (3, 1e-4), under zero-out; chosen by
    the release, the pair reaches a delta of 1.54e-4 at that epsilon.
    """
    few = {"delta": 1e-4, "target_epsilon": 50.0, "minimum_batch": 1, "adjacency": "zero-out"}
    common = few | {"users": 10, "shuffler_blankets": 1e-6, "accountant": "blanket"}
    first = make_plan(noise_multiplier=2.0, check_in_rate=1.0, rounds=1, **common)
    many = make_plan(noise_multiplier=40.0, check_in_rate=1.0, rounds=669, **common)
    rare = make_plan(noise_multiplier=0.25, check_in_rate=9.5e-5, rounds=1, **common)
    owner = DeviceLimits(most_epsilon=3.0, delta=1e-4, adjacency="zero-out")
    together = []
    for number, second in enumerate((many, rare)):
        tight = first.make_accountant("blanket").compose(first.event(), 1)
        together.append(tight.compose(second.event(), second.rounds).get_epsilon(1e-4))
        ledger = DeviceLedger(tmp_path / f"device-{number}.db", owner)
        ledger.offer(header(1, "first", first), first, 1)
        with pytest.raises(RoundRefused, match="accepts epsilon up to 3 over all runs"):
            ledger.offer(header(1, "second", second), second, second.rounds)
    assert max(together) < 3.0


FREE = PLAN.replace(
    check_in_rate=1e-9, mechanism=PLAN.mechanism.replace(noise_multiplier=1e3), rounds=10**6
)
"""A plan whose ε is 0, however many runs have come before."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "allotted", "taken", "why"),
    [
        ({}, 1, 100, "accepts up to 100 runs, with this one it would be 101"),
        ({"most_runs": 3}, 1, 3, "accepts up to 3 runs, with this one it would be 4"),
        ({}, 30_000, 3, "up to 100000 rounds over all runs, with this one it would be 120000"),
        ({}, 10**6, 0, "up to 100000 rounds over all runs, with this one it would be 1000000"),
    ],
)
def test_runs_that_cost_nothing_are_not_without_end(tmp_path, most, allotted, taken, why):
    path, owner = tmp_path / "device.db", limits(**most)
    ledger = DeviceLedger(path, owner)
    for number in range(taken):
        ledger.offer(header(1, f"run {number}", FREE), FREE, allotted)
    assert math.fsum(map(owner.charge, ledger.offered())) == 0.0
    content = path.read_bytes()
    for number in range(3):
        for refuse in (ledger.offer, ledger.check):
            about = header(1, "r" * 250 + f"{number}", FREE)
            with pytest.raises(RoundRefused, match=f"{why}$"):
                refuse(about if refuse == ledger.offer else about.run_id, FREE, allotted)
    assert path.read_bytes() == content


def bytes_read():
    (line,) = [each for each in Path("/proc/self/io").read_text().splitlines() if "rchar" in each]
    return int(line.split()[1])


def test_an_offer_costs_as_much_whatever_was_offered_before(tmp_path, monkeypatch):
    """No run is priced again, and the rounds that were offered are not read."""
    ledger = DeviceLedger(tmp_path / "device.db", limits())
    for number in range(20):
        plan = FREE.replace(minimum_batch=number + 1)
        ledger.offer(header(1, f"run {number}", plan), plan, 100)
    monkeypatch.setattr(accounting, "make_accountant", lambda *about: pytest.fail("priced again"))
    costs = []
    for number in (2, 3):
        before = bytes_read()
        ledger.offer(header(number, "run 0", FREE), FREE, 100)
        costs.append(bytes_read() - before)
        with closing(sqlite3.connect(ledger.path)) as rows:
            values = [("run 1", round, "c" * 64) for round in range(100, 20_000)]
            rows.executemany("INSERT OR IGNORE INTO rounds VALUES (?, ?, ?)", values)
            rows.commit()
    assert ledger.path.stat().st_size > 2_000_000 > costs[0] + 1_000_000
    assert costs[1] < costs[0] + 100_000


def test_a_run_has_one_plan_and_its_rounds_rise(tmp_path):
    ledger = SimulatedLedger(tmp_path / "device.db")
    other = PLAN.replace(check_in_rate=1.0)
    ledger.offer(header(3), PLAN, 20)
    for given, plan, message in (
        (header(3), PLAN, "round must be above 3, the last that run run offered"),
        (header(2), PLAN, "round must be above 3"),
        (header(4, plan=other), other, r"another plan \(privacy.check_in_rate: 1.0 here, 0.5 then"),
        (header(4, plan=other), PLAN, "run run was offered under another plan"),
    ):
        with pytest.raises(RoundRefused, match=message):
            ledger.offer(given, plan, 20)
    assert ledger.commitments() == [("run", 3, header(3).commitment)]


def test_a_round_beyond_those_that_are_charged_is_refused_whatever_came_before(tmp_path):
    """With allocation, rounds that are far apart would lie in more blocks than are charged."""
    plan = PLAN.replace(participation="allocation", check_in_rate=0.1)
    ledger = DeviceLedger(tmp_path / "device.db", limits(most_epsilon=1e3))
    ledger.offer(header(1, plan=plan), plan, 10)
    with pytest.raises(RoundRefused, match="has had its 10 rounds"):
        ledger.offer(header(11, plan=plan), plan, 1000)
    ledger.offer(header(10, plan=plan), plan, 10)


NO_BLANKETS = PLAN.replace(shuffler_blankets=0.0, accountant="theorem3")


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({"least_noise": 1.5}, PLAN, "noise multipliers of at least 1.5, the plan has 1"),
        ({"most_check_in_rate": 0.1}, PLAN, "check-in rates of at most 0.1, the plan has 0.5"),
        ({"plans": ("0" * 64,)}, PLAN, "has not accepted the plan"),
        ({"most_epsilon": 1e-6}, PLAN, "accepts epsilon up to 1e-06 over all runs, with this one"),
        # The owner counts on nobody but the shuffler, and this plan has no blankets.
        ({}, NO_BLANKETS, "the device's owner counts otherwise: accountant of"),
    ],
)
def test_what_the_owner_does_not_accept_is_refused_and_not_entered(
    tmp_path, changes, plan, message
):
    ledger = DeviceLedger(tmp_path / "device.db", limits(**changes))
    with pytest.raises(RoundRefused, match=message):
        ledger.offer(header(1, plan=plan), plan, 20)
    assert ledger.offered() == []


def test_how_a_plan_differs_from_the_last_that_was_accepted_is_in_the_nodes_log_alone(
    tmp_path, caplog
):
    round = Round("127.0.0.1:1", None, None, "second").deployed(tmp_path / "device.db")
    before = round.plan.replace(rounds=7)
    owner = limits(accountant="local", most_epsilon=1e9, plans=(before.digest(),))
    ledger = DeviceLedger(tmp_path / "device.db", owner)
    ledger.offer(header(1, "first", before), before, 7)
    node = Node(round.change(device=ledger) or round.settings)
    with pytest.raises(RoundRefused, match=r"^this device does not take part in this run$"):
        node.accept_run("second")
    (told,) = caplog.messages
    assert "(privacy.rounds: 50 here, 7 before); shufl device accept run.toml" in told


OFFERS = """
import itertools, sys
from pathlib import Path
from shufl.accounting import PrivacyPlan
from shufl.clients.device_ledger import DeviceLedger, DeviceLimits
from shufl.shuffler import RoundHeader

plan = PrivacyPlan.from_json(sys.argv[2])
ledger = DeviceLedger(Path(sys.argv[1]), DeviceLimits(most_epsilon=1e9, delta=1e-5))
for number in itertools.count(1):
    ledger.offer(RoundHeader("run", number, "model", plan.digest(), "key"), plan, 10**5)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_offered_survives_kill_9(tmp_path):
    """A coin is flipped only after `offer` has returned: so every such round must be there."""
    path = tmp_path / "device.db"
    command = [sys.executable, "-c", OFFERS, str(path), PLAN.to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = [process.stdout.readline() for _ in range(25)]
        process.kill()
        answered = len(first + process.stdout.readlines())
    assert process.returncode == -signal.SIGKILL
    (run,) = SimulatedLedger(path).offered()
    assert run.offered >= answered >= 25
    for number in (1, answered):
        with pytest.raises(RoundRefused, match="round must be above"):
            SimulatedLedger(path).offer(header(number), PLAN, 10**5)


def test_a_ledger_that_was_left_amid_a_write_begins_without_it(tmp_path):
    """As after a loss of power: what was not committed is undone, and all else is there."""
    ledger, left = DeviceLedger(tmp_path / "device.db", limits()), tmp_path / "left"
    ledger.offer(header(1), PLAN, 20)
    left.mkdir()
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as rows:
        rows.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        rows.execute("BEGIN IMMEDIATE")
        values = [("run", number, "c" * 64) for number in range(2, 3000)]
        rows.executemany("INSERT INTO rounds VALUES (?, ?, ?)", values)
        for path in tmp_path.glob("device.db*"):
            shutil.copy(path, left)
    assert (left / "device.db-journal").stat().st_size > 0
    again = DeviceLedger(left / "device.db", limits())
    assert again.commitments() == ledger.commitments()
    again.offer(header(2), PLAN, 20)
    assert len(again.commitments()) == 2


def test_no_deployed_node_has_a_ledger_without_an_owners_limits(tmp_path):
    round, never = Round("127.0.0.1:1", None, None, "run"), threading.Event()
    unlimited = SimulatedLedger(tmp_path / "device.db")
    settings = round.deployed(unlimited.path, device=unlimited).settings
    for each in (settings, Round("127.0.0.1:1", None, None, "run").settings):
        with pytest.raises(ValueError, match="a ledger with the limits of the device's owner"):
            serve_device(each, tmp_path / "socket", never, never)


def test_an_owners_ledger_waits_for_the_disk(tmp_path):
    """So that a machine that loses power forgets no round; one that is simulated need not."""
    owned = DeviceLedger(tmp_path / "owned.db", limits())
    for ledger, level in ((owned, 3), (SimulatedLedger(tmp_path / "simulated.db"), 0)):
        with ledger._rows("rw") as rows:
            assert rows.execute("PRAGMA synchronous").fetchone() == (level,)


def test_a_ledger_that_cannot_be_read_or_written_is_no_reason_to_go_on(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory"):
        DeviceLedger(tmp_path / "missing" / "device.db", limits())
    (tmp_path / "device.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"ledger .* cannot be used: file is not a database"):
        DeviceLedger(tmp_path / "device.db", limits())
    ledger = DeviceLedger(tmp_path / "good.db", limits())
    ledger.path.unlink()
    with pytest.raises(ValueError, match=r"ledger .* cannot be used: unable to open"):
        ledger.offer(header(1), PLAN, 20)


def test_a_ledger_that_is_lost_does_not_begin_again_at_nothing(tmp_path):
    path = tmp_path / "device.db"
    DeviceLedger(path, limits()).offer(header(1), PLAN, 20)
    for lose in (lambda: path.write_bytes(b""), path.unlink):
        lose()
        for read in (DeviceLedger, runs_of):
            with pytest.raises(
                ValueError, match="is lost, and with it what its users were charged"
            ):
                read(path, limits())
    (tmp_path / "device.db.begun").unlink()
    assert runs_of(path, limits()) == DeviceLedger(path, limits()).offered() == []


def test_no_bit_that_flips_makes_a_ledger_count_less(tmp_path):
    """It counts what it counted, or cannot be used."""
    ledger = DeviceLedger(tmp_path / "device.db", limits())
    for number in range(1, 4):
        for round in range(1, 4):
            ledger.offer(header(round, f"run {number}"), PLAN, 20)
    whole, content, draw = ledger.offered(), ledger.path.read_bytes(), random.Random(3)
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    refused = 0
    for _ in range(400):
        flipped = bytearray(content)
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        ledger.path.write_bytes(flipped)
        try:
            found = ledger.offered()
        except ValueError:
            refused += 1
        else:
            assert [dataclasses.replace(run, latest="") for run in found] == [
                dataclasses.replace(run, latest="") for run in whole
            ]
    assert 10 < refused < 390


def test_an_owner_refuses_windows_that_give_the_work_too_little_time():
    """A server that picks one so short has slow devices report noise alone."""
    times = PLAN.replace(window=WINDOW)
    limits(least_work_seconds=WINDOW.work_until).check(times)
    for plan, given in ((times, 900), (PLAN, 0)):
        with pytest.raises(RoundRefused, match=f"at least 901 s .*, this one gives {given}$"):
            limits(least_work_seconds=901.0).check(plan)


OWNER = """
ledger = "device.db"
most_epsilon = 5.0
delta = 1e-5
"""


def test_an_owners_file_names_ledger_and_limits(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(OWNER + 'least_noise = 0.5\nplans = ["' + PLAN.digest() + '"]\n')
    ledger = load_device(path)
    assert ledger.limits == limits(most_epsilon=5.0, least_noise=0.5, plans=(PLAN.digest(),))
    ledger.offer(header(1), PLAN, 20)
    (run,) = SimulatedLedger(tmp_path / "device.db").offered()
    assert (run.run_id, run.plan, run.offered) == ("run", PLAN, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("most_epsilon = 1.0\ndelta = 1e-5", "ledger must be the path"),
        ('ledger = "device.db"\ndelta = 1e-5', "most_epsilon is missing"),
        (OWNER + "most_epsilom = 3", "most_epsilom"),
        (OWNER + 'accountant = "nobody"', "accountant must be one of theorem3, "),
        (OWNER + 'plans = ["abc"]', "plans.* must be a list of SHA-256 digests"),
        (
            OWNER + "most_check_in_rate = 2.0",
            r"most_check_in_rate must be a number in \[1e-12, 1\]",
        ),
        ("ledger = ", "is not valid TOML"),
    ],
)
def test_a_mistake_in_an_owners_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "device.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_device(path)
    assert "\n" not in str(error.value)
