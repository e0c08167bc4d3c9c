"""A deployed node: its work and its moments are the same whatever its users' records are."""

import errno
import functools
import math
import os
import re
import signal
import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from device_models import Fails, Troubled, negative_records, of_sizes, troubled_users, with_bias
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from client_world import (
    DIMENSION,
    WINDOW,
    PromptClock,
    device_node,
    make_model,
    records,
    wait_for_rounds,
)
from nights import by_night
from run_world import LIMIT, wait_until
from shufl.clients import RoundRefused, SimulatedLedger, serve_device
from shufl.clients.deployed_node import Clock, DeviceNode
from shufl.clients.node_process import _Answering, _Reader
from shufl.clients.relay import NodeUnavailable, _relay
from shufl.clients.worker import AT_WORK, DONE, FAILED, TooBusy
from shufl.learning import LocalTraining, local_update
from shufl.learning.parameters import sent
from shufl.protocol.mechanisms import SeededRandomness, allocated

FEDAVG = LocalTraining("fedavg", 2, 0.5, 2)


@pytest.fixture
def running():
    """Nodes that are closed at the end."""
    nodes = []

    def start(round, **named):
        nodes.append(device_node(round, **named))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


@pytest.fixture
def deployed(make_round, tmp_path):
    """Makes rounds of real machines, with changed settings, plans or numbers of users."""

    def make(users=12, window=WINDOW, **settings):
        return make_round(**settings).deployed(tmp_path / "device.db", users, window)

    return make


def troubled(deployed, more_bias=10, **numbers):
    """Such a round in which `Troubled` has trouble with users' records, or hangs."""
    of_user = troubled_users(**numbers)
    round = deployed(users=6, make_model=Troubled, load_users=lambda: of_user)
    round.show(with_bias(round, more_bias))
    return round


def reports_of(round, node):
    """All reports of the round, opened and in order, once the node has sent them."""
    prepared = round.begin(node)
    wait_for_rounds()
    return np.array(sorted(map(tuple, round.released()))), prepared


def check_reports(found, round, update_of):
    """That reports are those of these updates, by the noise of seed 3, to within their unit."""
    a_unit = round.plan.mechanism.unit(DIMENSION) * 1.001
    np.testing.assert_allclose(found, expected_of(round, 3, update_of), rtol=0, atol=a_unit)


def expected_of(round, seed, update_of):
    """Reports of these updates, in order, by seeded noise."""
    mechanism, users = round.plan.mechanism, np.arange(round.settings.policy.users)
    seeds = SeededRandomness(seed).training_seeds(round.header.round, users).tolist()
    noises = SeededRandomness(seed).standard_normal(round.header.round, users, round.dimension)
    unit = mechanism.unit(round.dimension)
    expected = [
        unit * mechanism.report(update_of(user, training_seed), noise)
        for user, training_seed, noise in zip(users.tolist(), seeds, noises, strict=True)
    ]
    return np.array(sorted(map(tuple, expected)))


@pytest.mark.slow
def test_a_node_that_is_to_end_finishes_its_round(deployed, running):
    round = deployed().open()
    node = running(round)
    node.finish(threading.Event())  # there is none
    child = node._worker._child.process.pid
    os.kill(child, signal.SIGTERM)  # as a whole process group may get it
    round.begin(node)
    node.finish(threading.Event())
    assert len(round.released()) == round.settings.policy.users
    assert node._worker.states.tolist() == [DONE] * round.settings.policy.users
    assert node._worker._child.process.pid == child


@pytest.mark.slow
def test_a_node_that_is_to_end_at_once_does_not_finish_its_round(deployed):
    class Stands(PromptClock):
        """It is never time to send."""

        def wait(self, until, over):
            return over.wait()

    class Counting(threading.Event):
        asked = 0

        def is_set(self):
            self.asked += 1
            return super().is_set()

    round = deployed()
    at_once = Counting()
    with closing(DeviceNode(round.settings, clock=Stands())) as node:
        round.open().begin(node)
        ends = threading.Thread(target=node.finish, args=(at_once,))
        ends.start()
        wait_until(lambda: at_once.asked > 1 or not ends.is_alive(), LIMIT, "it to wait")
        assert ends.is_alive()
        at_once.set()
        ends.join(LIMIT)
        assert not ends.is_alive()
    assert round.released() == []


@pytest.mark.slow
@pytest.mark.parametrize("training", [FEDAVG, *by_night(LocalTraining())], ids=["fedavg", "fedsgd"])
def test_reports_are_those_of_the_unpadded_records(deployed, running, training):
    """Of users with 1 to 5 records, of which 3 are used; of 12 users, computed at once."""
    of_user = of_sizes({None: 2, 1: 1, 4: 3, 7: 5})
    round = deployed(training=training, load_users=lambda: of_user).open()
    found, _ = reports_of(round, running(round, randomness=SeededRandomness(3)))
    model = round.settings.make_model()

    def update_of(user, seed):
        features, labels = of_user(user)
        return local_update(model, features[:3], labels[:3], training, seed)

    check_reports(found, round, update_of)


@pytest.mark.slow
def test_who_reports_follows_from_the_ledger_and_is_hidden_by_cover(make_round, running, tmp_path):
    """A draw that is damaged or missing ends the device's part: it is not made again."""
    path, every, sizes = tmp_path / "device.db", 2, []
    plan = {"participation": "allocation", "accountant": "local", "target_epsilon": 1e3}
    round = make_round(rate=1 / every).under(**plan).deployed(path).open()
    node, empty = running(round), -(2.0**15) * round.plan.mechanism.unit(1)
    for _ in range(every):
        reports, _ = reports_of(round, node)
        assert len(reports) == round.settings.policy.users
        sizes.append(int((reports != empty).any(axis=1).sum()))
        round.next(round.model)
    ledger, users = SimulatedLedger(path), np.arange(round.settings.policy.users)
    key = ledger.allocation_key(round.header.run_id)
    assert sizes == [allocated(key, number, users, every).sum() for number in (1, 2)]
    assert sum(sizes) == round.settings.policy.users
    for damage in ("UPDATE allocations SET key = zeroblob(32)", "DELETE FROM allocations"):
        with sqlite3.connect(path) as rows:
            rows.execute(damage)
        with pytest.raises(ValueError, match=r"the draws of run .* are missing or damaged"):
            ledger.allocation_key(round.header.run_id)
        with pytest.raises(RoundRefused, match="this device does not take part in this round"):
            round.begin(node)
        assert ledger.offered()[0].offered == every


@pytest.mark.slow
def test_one_user_of_4000_records_among_200_of_20_changes_nobody_elses_report(
    make_round, running, tmp_path, caplog
):
    batches, moments = [], []
    for name, sizes in {"same": {None: 20}, "other": {None: 20, 77: 4000}}.items():
        window = WINDOW.model_copy(update={"most_records": 20})
        load_users = functools.partial(of_sizes, sizes)
        round = make_round(run_id=name, load_users=load_users)
        round.deployed(tmp_path / name, users=200, window=window).open()
        node = running(round, randomness=SeededRandomness(3))
        found, prepared = reports_of(round, node)
        batches.append(set(map(bytes, found)))
        moments.append([at - prepared.until for at in node.clock.moments])
    assert len(batches[0]) == 200
    assert len(batches[0] & batches[1]) >= 199
    assert "1 of 200 users have more than the 20 records" in caplog.text
    assert len(moments[0]) == 200
    np.testing.assert_allclose(moments[0], moments[1], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_users_whose_records_make_the_model_fail_count_as_zero_alone(deployed, running, caplog):
    """In a round: their records were well at the start. One line is logged, without a record."""
    numbers = {"u1": 1, "u2": 2, "u3": 6}
    round = troubled(deployed, **numbers).open()
    node = running(round, randomness=SeededRandomness(3))
    first = node._worker._child.process.pid
    found, _ = reports_of(round, node)
    model = make_model()
    model.bias.data += 10

    def update_of(user, seed):
        if f"u{user}" in numbers:
            return np.zeros(DIMENSION, dtype=np.float32)
        return local_update(model, *records(user), LocalTraining(), seed)

    check_reports(found, round, update_of)
    assert node._worker.states.tolist() == [DONE, FAILED, FAILED, FAILED, DONE, DONE]
    assert node._worker._child.process.pid != first
    (line,) = [each for each in caplog.messages if "count as zero" in each]
    assert line.startswith(
        "3 of the updates cannot be computed, and count as zero; user 1: ZeroDivisionError ("
    )
    assert "of this user" not in caplog.text


@pytest.mark.slow
def test_records_for_which_the_model_fails_are_refused_at_the_start(deployed, tmp_path):
    """In a line that names the user, and in which no record stands."""
    of_user = functools.partial(negative_records, {3, 7})
    round = deployed(make_model=Fails, load_users=lambda: of_user)
    with pytest.raises(ValueError) as error:
        serve_device(round.settings, tmp_path / "socket", threading.Event(), threading.Event())
    about = "data: the updates of this node's users: user 3: LookupError (device_models.py, line "
    assert re.fullmatch(re.escape(about) + r"\d+\)", str(error.value))
    assert not (tmp_path / "socket").exists()


@pytest.mark.slow
def test_a_machine_that_starts_no_process_any_more_sends_all_reports(deployed, running, caplog):
    """User 3's records end the child; who comes before is done, and nobody after."""
    round = troubled(deployed, u3=6).open()
    node = running(round)

    def start():
        raise BlockingIOError(errno.EAGAIN, "no process")

    node._worker._start = start
    found, _ = reports_of(round, node)
    assert len(found) == 6
    assert "not all updates are computed" in caplog.text
    assert DONE not in node._worker.states[3:]


@pytest.mark.slow
def test_a_round_is_taken_that_has_time_for_its_work_and_no_more_than_a_window(deployed, running):
    node = running(deployed(users=2))
    clock = node.clock = SetClock()
    node._worker.seconds = 0.5 * WINDOW.work_until  # as long as a start accepts
    node._worker.check(WINDOW)
    late = clock.now() + WINDOW.seconds - 0.4 * WINDOW.work_until
    assert node._over_at(0.0, late) == late
    with pytest.raises(RoundRefused, match="too little"):
        node._over_at(0.0, late - 0.2 * WINDOW.work_until)
    for left in (1.01, math.inf, math.nan):  # a shuffler says that more than a window is left
        with pytest.raises(RoundRefused, match="the shuffler says that"):
            node._over_at(0.0, clock.now() + left * WINDOW.seconds)


@pytest.mark.slow
def test_work_that_is_not_done_in_time_is_ended_and_everybody_sends_noise_alone(deployed, running):
    round = troubled(deployed, more_bias=1000)
    node = running(round, randomness=SeededRandomness(3))
    node.window = WINDOW.model_copy(update={"work_until": 3.0})
    node._worker.seconds = 0.0  # whatever the work takes here
    round.open()
    hung = node._worker._child.process
    found, _ = reports_of(round, node)
    nothing = np.zeros(DIMENSION, dtype=np.float32)
    assert (found == expected_of(round, 3, lambda *_: nothing)).all()
    assert hung.exitcode in (-signal.SIGALRM, -signal.SIGKILL)  # of a user's time, or of all
    assert DONE not in node._worker.states
    assert node._worker._child.process.is_alive()


@pytest.mark.slow
def test_a_newer_round_ends_an_older_ones_work(deployed, running):
    round = troubled(deployed, more_bias=1000)
    healthy = ArrayRecord(sent(Troubled()))
    node = running(round.open(), randomness=SeededRandomness(3))
    round.begin(node)
    wait_until(lambda: AT_WORK in node._worker.states, LIMIT, "the work")
    round.next(healthy)
    found, _ = reports_of(round, node)
    model = make_model()

    def update_of(user, seed):
        return local_update(model, *records(user), LocalTraining(), seed)

    check_reports(found, round, update_of)


class SetClock(Clock):
    """Goes on only by waiting."""

    def __init__(self, now=1000.01):
        self.at = now

    def now(self):
        return self.at

    def wait(self, until, over):
        self.at = max(self.at, until)
        return over.is_set()


class Context:
    """Of a call that is refused."""

    def abort(self, code, details):
        raise RoundRefused(f"{code.name}: {details}")


@pytest.mark.slow
def test_answers_come_at_whole_multiples_and_queries_are_held(deployed):
    window = WINDOW.model_copy(update={"answer_every": 0.5, "query_every": 30.0})
    round = deployed(users=2, window=window).open()
    clock = SetClock()
    node = DeviceNode(round.settings, clock=clock)
    try:
        answering = _Answering(node, _Reader(round.settings), threading.Event())
        about = {"run_id": round.header.run_id, "plan_digest": round.plan.digest()}
        question = serialised({"round": ConfigRecord(about)})
        answering.call("query", question, Context())
        assert clock.at == 1000.5
        with pytest.raises(RoundRefused, match="malformed"):
            answering.call("query", b"junk", Context())
        assert clock.at == 1030.5  # a refusal is an answer
        clock.at = 2000.2
        answering.call("query", question, Context())
        assert clock.at == 2000.5
        with answering._query, pytest.raises(RoundRefused, match="another query waits"):
            answering.call("query", question, Context())
        assert clock.at == 2000.5
        node.round = SimpleNamespace(until=2500.1)  # the first query of a round, and the second
        answering.call("query", question, Context())
        assert clock.at == 2030.5
        answering.call("query", question, Context())
        assert clock.at == 2500.5
        with pytest.raises(RoundRefused, match="malformed"):
            answering.call("train", b"junk", Context())
        clock.at = 3000.7
        with pytest.raises(RoundRefused, match="malformed"):
            answering.call("train", b"junk", Context())
        assert clock.at == 3001.0
        node._worker.seconds = 0.5 * window.work_until  # far longer than it takes to ask
        clock.at = time.monotonic() - window.seconds + window.work_until
        with pytest.raises(RoundRefused, match="too little of the round's window is left"):
            round.begin(node)
        assert round.settings.policy.device.offered() == []
    finally:
        node.close()


def serialised(content):
    return recorddict_to_proto(RecordDict(content)).SerializeToString()


def test_a_message_for_a_node_that_is_down_says_so(tmp_path):
    """`shufl status` shows it as the node's trouble."""
    message = SimpleNamespace(content=RecordDict())
    context = SimpleNamespace(node_config={"socket": str(tmp_path / "node.sock")})
    with pytest.raises(NodeUnavailable, match=r"^this node's own process is not running$"):
        _relay("query")(message, context)


@pytest.mark.slow
def test_a_plan_whose_work_does_not_fit_is_refused_at_the_start(deployed, tmp_path):
    window = WINDOW.model_copy(update={"work_until": 1e-5})
    round = deployed(window=window)
    with pytest.raises(TooBusy, match=r"^window\.work_until must be at least .* 12 users take"):
        serve_device(round.settings, tmp_path / "socket", threading.Event(), threading.Event())
    round = deployed(window=None)
    with pytest.raises(ValueError, match="needs a plan with cover and a window"):
        serve_device(round.settings, tmp_path / "socket", threading.Event(), threading.Event())
    assert not (tmp_path / "socket").exists()
