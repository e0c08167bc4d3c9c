"""Nodes and shufflers that die, stop or are slow: the step keeps its size, and ε is not lost.

Each fault falls where a test puts it. test_deployment_kills.py does the same to real processes, at
moments of chance.
"""

import functools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

import shufl.server.connected_nodes
from ports import free_port
from run_world import LIMIT, json_lines, wait_until
from server_world import (
    AGREED,
    AUTHORITY,
    NODES,
    PLAN,
    SUMS,
    USERS,
    WIDTH,
    WINDOW,
    Here,
    Run,
    SimulatedRun,
)
from shuffler_world import ShufflerHere
from shufl.clients import Node, node_round
from shufl.protocol import AgreedNode, GaussianMechanism
from shufl.server import MOST_IN_VAIN, Mean, RoundFailed
from shufl.server.connected_nodes import Fleet
from shufl.shuffler import ShufflerProcess
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.store.summed_batch import SummedBatch
from tiny_disk import fill, tiny_disk_at


class Crash(BaseException):
    """The server's process is gone."""


@pytest.fixture(scope="module")
def shufflers():
    with Here() as one, Here() as other:
        yield one, other


@pytest.fixture
def run(tmp_path, shufflers):
    return Run(tmp_path, shufflers[:1])


@pytest.mark.slow
def test_a_node_that_spoils_sums_spends_rounds_and_ends_no_run(tmp_path, shufflers, monkeypatch):
    """Not even after more of them in a row than there may be otherwise."""
    run, honest = Run(tmp_path, shufflers[:1], PLAN.replace(**SUMS)), node_round.masked
    monkeypatch.setattr(node_round, "masked", lambda whole, seed: honest(whole + 10**6, seed))
    run.play(MOST_IN_VAIN + 1)
    assert [row.outcome for row in run.rows] == ["lost"] * (MOST_IN_VAIN + 1)
    monkeypatch.setattr(node_round, "masked", honest)
    run.play(1)
    assert (run.rows[-1].outcome, run.rows[-1].users_present) == ("released", USERS)
    assert run.spent == list(range(1, MOST_IN_VAIN + 3))


def test_a_shuffler_that_hands_over_one_nodes_message_has_nothing_published(tmp_path, monkeypatch):
    """Though it says that all have sent. Model and ledger are as after any lost round."""
    honest, taken = SummedBatch._take, []

    def first_alone(self, content):
        taken.append(content)
        if len(taken) % NODES == 1:
            honest(self, content)

    monkeypatch.setattr(SummedBatch, "_take", first_alone)
    distributed = {"accountant": "sum-distributed", "central_noise": 0.0}
    mechanism = GaussianMechanism(noise_multiplier=0.5)
    with Here() as shuffler:
        plan = PLAN.replace(**SUMS | distributed, mechanism=mechanism)
        run = Run(tmp_path, [shuffler], plan)
        run.play(1)
    assert (run.rows[-1].outcome, run.spent, len(taken)) == ("lost", [1], NODES)
    assert run.rows[-1].doubt == (
        f"round 1, shuffler 1: seeds must stand for at least {USERS} users, got {USERS // NODES}"
    )


@pytest.mark.slow
def test_a_deployed_server_takes_no_sum_whose_nodes_have_not_signed(tmp_path, shufflers):
    run = Run(tmp_path, shufflers[:1], PLAN.replace(**SUMS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "_signer", None)
        run.play(1)
    assert run.rows[-1].outcome == "lost"
    run.play(1)
    assert run.rows[-1].outcome == "released"


def test_a_node_of_another_version_is_told(tmp_path, shufflers, monkeypatch):
    """One of 0.1.0, whose answer has no version, and one that is newer than this server."""
    run = SimulatedRun(tmp_path, shufflers[:1], PLAN.replace(**SUMS))
    answers = run.network._deliver
    for version in (None, 3):

        def of_another_version(message, node, version=version):
            reply = answers(message, node)
            said = reply.content["acknowledgement"]
            said.pop("sums")
            if version is not None:
                said["sums"] = version
            return reply

        monkeypatch.setattr(run.network, "_deliver", of_another_version)
        with pytest.raises(RoundFailed, match=f"of version {version or 1}, this server's of 2"):
            run.play(1)
    assert run.spent == []


def test_a_node_of_another_plan_says_which_key_differs(tmp_path, shufflers):
    run = SimulatedRun(tmp_path, shufflers[:1])
    run.plan = PLAN.replace(rounds=PLAN.rounds + 1)
    differs = f"privacy.rounds: {PLAN.rounds} at the node, {PLAN.rounds + 1} at the server"
    with pytest.raises(RoundFailed, match=f"did not get ready: privacy plan must .*: {differs}$"):
        run.play(1)


def test_a_shuffler_whose_sums_lack_its_noise_is_named_beside_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(RunStore, "_noise", lambda *about: iter(()))
    with Here() as shuffler:
        plan = PLAN.replace(**SUMS | {"central_noise": 500.0})
        run = Run(tmp_path, [shuffler], plan, width=999)
        run.play(2)  # 16 standard deviations a round
    assert run.rows[-1].doubt.startswith("shuffler 1 released sums that are shorter than their")


class LeavesOut(Mean):
    """An aggregator that leaves all reports out."""

    left_out = 0

    def add(self, report):
        self.left_out += 1


def test_an_aggregator_gets_the_reports_of_every_shuffler_apart(tmp_path, shufflers):
    made = []

    def make(plan, dimension):
        made.append(LeavesOut(plan, dimension))
        return made[-1]

    run = Run(tmp_path, shufflers)
    run.play(2, make_aggregator=make)
    given = [aggregator.left_out for aggregator in made]
    assert len(given) == 4 and min(given) > 0
    for row, of_round in zip(run.rows, (given[:2], given[2:]), strict=True):
        assert (row.reports, row.reasons) == (0, {"left-out": sum(of_round)})


def test_an_aggregator_that_fails_ends_the_run_in_one_line(run):
    class Fails(Mean):
        def add(self, report):
            raise ValueError("no such report")

    with pytest.raises(RoundFailed, match=r"^round 1: the aggregator failed: ValueError: no such"):
        run.play(2, make_aggregator=Fails)
    assert run.spent == [1]


@pytest.mark.parametrize(
    ("sends", "answers", "stays", "sent"),
    [
        (True, True, True, [12, 12]),
        (True, False, True, [12, 12]),
        (True, False, False, [12, 8]),
        (False, False, True, [8, 8]),
    ],
    ids=["well", "too late", "killed", "stalled"],
)
def test_the_step_keeps_its_size_whatever_becomes_of_a_node(run, sends, answers, stays, sent):
    """Users are counted by the shuffler's word: a node may send and be killed before it answers."""

    def train(node, deliver):
        if node != 3:
            return deliver()
        reply = deliver() if sends else None
        if not stays:
            run.network.here.discard(node)
        return reply if answers else None

    run.network.train = train
    run.play(2)
    assert [(row.outcome, row.users_present) for row in run.rows] == [
        ("released", users) for users in sent
    ]
    assert run.rows[0].silent_nodes == (0 if answers else 1)
    assert run.steps_are_whole()


def test_a_big_node_that_is_away_costs_time_and_no_budget(tmp_path, shufflers, monkeypatch):
    monkeypatch.setattr(shufl.server.connected_nodes, "_TELL_SECONDS", 0.1)
    run = Run(tmp_path, shufflers[:1], PLAN.replace(minimum_batch=USERS))
    run.network.here.discard(2)
    told, troubles = [], {}

    def tell(line):
        if not line:
            nodes = json.loads((run.folder / "nodes.json").read_text())
            troubles.update({each["name"]: each["trouble"] for each in nodes})
        told.append((line, run.spent))
        run.network.here.add(2)

    agreed = AGREED | {3: AgreedNode("node-3", 1, None)}
    run.play(1, tell=tell, agreed=lambda: agreed)
    lacking = f"too few for a round (8 of {USERS} users at {shufflers[0].address})"
    line = f"waiting for nodes: 2 are there, {lacking}; away: node-1, node-3"
    assert told == [(line, []), ("", [])]
    assert "shufl doctor there says why: its clock" in troubles["node-1"]
    assert troubles["node-3"] == "not registered at Flower: shufl register"
    assert [row.users_present for row in run.rows] == [USERS] and run.spent == [1]


def test_a_node_whose_answer_to_a_question_is_lost_is_asked_again(tmp_path, shufflers, monkeypatch):
    monkeypatch.setattr(shufl.server.connected_nodes, "_ASK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(shufl.server.connected_nodes, "_TELL_SECONDS", 0.1)
    run = Run(tmp_path, shufflers[:1], PLAN.replace(minimum_batch=USERS))
    asked, waited, told = [], [], []

    def lose(messages):
        push(messages)
        of_node = [each for each in messages if each.metadata.dst_node_id == 2]
        asked.extend(each.metadata.message_type for each in of_node)
        waited.extend(each.metadata.ttl - 60 for each in of_node)  # Flower's own lies behind ours
        if asked == ["query"]:
            del run.network.replies[of_node[0].metadata.message_id]

    push, run.network.push_messages = run.network.push_messages, lose

    run.play(1, round_timeout=0.5, tell=told.append)
    assert len(told) > 1 and told[0].endswith("; still to answer: node-1")
    assert asked == ["query", "query", "train"]
    assert waited[:2] == [pytest.approx(WINDOW.seconds + WINDOW.query_every + 0.5)] * 2
    assert [row.users_present for row in run.rows] == [USERS] and run.spent == [1]


def test_a_node_that_is_connected_and_dead_is_in_trouble_and_one_at_work_is_not(
    tmp_path, shufflers, monkeypatch
):
    monkeypatch.setattr(shufl.server.connected_nodes, "_ASK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(Fleet, "_seconds_to_answer", lambda _: 0.2)
    run = Run(tmp_path, shufflers[:1])
    troubles = []

    def lose(messages):
        push(messages)
        nodes = run.folder / "nodes.json"
        if messages[0].metadata.message_type == "train" and nodes.exists():
            troubles.append([each["trouble"] for each in json.loads(nodes.read_text())])
            time.sleep(0.3 if len(troubles) == 3 else 0.0)  # its question is over by then
        for each in messages if nodes.exists() else ():  # from the second round on
            if each.metadata.dst_node_id == 2:
                run.network.replies.pop(each.metadata.message_id, None)

    push, run.network.push_messages = run.network.push_messages, lose
    run.play(8, round_timeout=0.5)
    assert troubles[0] == ["", "", ""] and {first for first, *_ in troubles} == {""}
    dead = [each for _, each, _ in troubles]
    assert dead == sorted(dead, key=bool) and "no answer within" in dead[-1]


@pytest.mark.parametrize("seconds", [0.1, LIMIT], ids=["between", "within"])
def test_a_full_disk_at_a_shuffler_costs_time_and_no_budget(tmp_path, monkeypatch, seconds):
    """And is told, also while a shuffler may come back within the round."""
    monkeypatch.setattr("shufl.server.rounds._TELL_SECONDS", 0.0)
    with tiny_disk_at(tmp_path / "disk") as disk, Here(disk) as shuffler:
        run = Run(tmp_path, [shuffler])
        filler = fill(disk)
        told = []

        def tell(line):
            told.append((line, run.spent))
            filler.unlink(missing_ok=True)

        run.play(1, tell=tell, shuffler_seconds=seconds)
    assert "STORAGE_FULL" in told[0][0] and told[0][1] == []
    assert run.spent == [1]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_shuffler_that_hangs_is_found_out_and_loses_its_own_users_round_alone(tmp_path):
    """It neither answers nor closes its connection, as behind a cut cable, for 40 s."""
    begun = functools.partial(ShufflerProcess, authority=AUTHORITY)
    with begun() as one, begun() as other:
        run = Run(tmp_path, [one, other])

        def hang(name):
            if name == "close_round":
                os.kill(other.pid, signal.SIGSTOP)

        run.play(2, control=lambda number, client: Watched(client, hang) if number else client)
        os.kill(other.pid, signal.SIGCONT)
    assert [(row.outcome, row.users_present) for row in run.rows] == [("released", 8)] * 2
    assert run.steps_are_whole()


@pytest.mark.parametrize(("kind", "cost"), [("query", []), ("train", [1])])
def test_a_crash_costs_the_round_that_was_charged_and_locks_nothing(run, kind, cost):
    def crash(messages):
        if messages[0].metadata.message_type == kind:
            raise Crash
        push(messages)

    push, run.network.push_messages = run.network.push_messages, crash
    with suppress(Crash):
        run.play(1)
    assert run.spent == cost
    run.network.push_messages = push
    run.play(2)
    rounds = [len(cost) + 1, len(cost) + 2]
    assert [(row.round, row.outcome) for row in run.rows] == [
        (round, "released") for round in rounds
    ]
    assert run.spent == list(range(1, rounds[-1] + 1))
    assert run.steps_are_whole()


def test_three_rounds_that_nobody_reports_to_end_the_run(tmp_path, shufflers):
    run = Run(tmp_path, shufflers[:1], PLAN.replace(minimum_batch=USERS))
    run.network.train = lambda node, deliver: None
    with pytest.raises(shufl.server.RoundFailed, match="3 rounds in a row were not released"):
        run.play(9)
    assert run.spent == [1, 2, 3]


class Mortal:
    """A shuffler on a disk that can be killed, and is started again at its address.

    One that is no process is stopped instead, as abruptly: neither waits for what goes on.
    """

    def __init__(self, folder, kind=ShufflerProcess):
        self.folder, self._kind = folder, kind
        self.address = f"127.0.0.1:{free_port()}"
        self.process = self._start()
        self.control, self.submit = self.process.control, self.process.submit

    def __enter__(self):
        return self

    def __exit__(self, *about):
        self.process.__exit__(*about)

    def _start(self):
        about = {"listen": self.address, "authority": AUTHORITY}
        process = self._kind(self.folder, **about)
        return process.__enter__()

    def kill(self, forget=False):
        if self._kind is ShufflerProcess:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.__exit__()
        if forget:
            shutil.rmtree(self.folder)
        self.process = self._start()


class Watched:
    """A server's client of a shuffler that calls `meet` before and after each of its own calls.

    And after each report of a release; `meet` gets the call's name.
    """

    def __init__(self, client, meet):
        self._client, self._meet = client, meet

    def __getattr__(self, name):
        call = getattr(self._client, name)

        def once(*arguments):
            self._meet(name)
            answer = call(*arguments)
            self._meet(name)
            return answer

        def fetch(*arguments):
            for report in call(*arguments):
                yield report
                self._meet(name)

        return fetch if name == "release" else once


@pytest.mark.parametrize(
    ("amid", "forget", "kind"),
    [
        pytest.param("release", False, ShufflerProcess, marks=pytest.mark.slow),
        pytest.param("close_round", True, ShufflerHere, marks=pytest.mark.slow),
    ],
)
def test_a_shuffler_killed_amid_a_round_loses_its_own_users_round_alone(
    tmp_path, shufflers, amid, forget, kind
):
    """Also one that comes back with an empty directory, and knows no run."""
    with Mortal(tmp_path / "other", kind) as other:
        little = GaussianMechanism(noise_multiplier=1e-4)
        plan = PLAN.replace(cover=False, window=None, mechanism=little)
        # Of a release the reports after the first, 4 MB each, are more than a connection holds.
        width = 1_000_000 if amid == "release" else WIDTH
        run = Run(tmp_path, [shufflers[0], other], plan, width)
        first = other.process

        def kill(name):
            if name == amid and other.process is first:
                other.kill(forget)

        run.play(2, control=lambda number, client: Watched(client, kill) if number else client)
    rows = [(row.outcome, row.users_present) for row in run.rows]
    assert rows == [("released", 8), ("released", 12)]
    assert run.steps_are_whole()
    # Part of a release that broke off may be known: ε is that of as few users as were there.
    assert [row.smallest_crowd for row in run.rows] == [4 if amid == "release" else 8, 4]


def test_answers_are_heard_while_the_shuffler_keeps_the_round_open(run):
    """Flower keeps them for a while only."""

    def wait(name):
        if name == "close_round":
            wait_until(lambda: not run.network.replies, LIMIT, "the nodes' answers to be heard")

    run.play(1, control=lambda number, client: Watched(client, wait))
    assert [row.silent_nodes for row in run.rows] == [0]


class Fate:
    """Kills a shuffler, a node or the server at a moment of chance: between any two calls."""

    def __init__(self, rate):
        self.seed = int(os.environ.get("SHUFL_SOAK_SEED", "1"))
        self.rate, self.chance, self.done = rate, random.Random(self.seed), Counter()

    def strikes(self, whom):
        struck = self.chance.random() < self.rate[whom]
        self.done[whom] += struck
        return struck

    def meet(self, shuffler):
        if self.strikes("shuffler"):
            shuffler.kill()
        if self.strikes("server"):
            raise Crash

    def node(self, node, deliver):
        if self.strikes("node"):
            return None
        reply = deliver()
        return None if self.strikes("node") else reply


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("rounds", "rate", "kind"),
    [
        (6, 0.02, ShufflerHere),
        pytest.param(250, 0.012, ShufflerProcess, marks=pytest.mark.nightly),
    ],
)
def test_whatever_dies_nothing_counts_twice_and_no_release_is_unpaid(tmp_path, rounds, rate, kind):
    """Some 100 kills of each party by night; SHUFL_SOAK_SEED makes others."""
    fate, plan = (
        Fate({"server": rate, "shuffler": rate, "node": 7 * rate}),
        PLAN.replace(rounds=rounds),
    )
    with Mortal(tmp_path / "one", kind) as one, Mortal(tmp_path / "other", kind) as other:
        shufflers = one, other
        run = Run(tmp_path, shufflers, plan)
        run.network.train = fate.node

        def control(number, client):
            return Watched(client, lambda name: fate.meet(shufflers[number]))

        while len(run.spent) < rounds or not (run.folder / "model.pt").exists():
            with suppress(Crash, shufl.server.RoundFailed):  # also three rounds in vain
                run.play(rounds, control=control)
    print(fate.seed, dict(fate.done), Counter(row.outcome for row in run.rows))
    assert run.spent == list(range(1, rounds + 1))
    played = [row.round for row in run.rows]
    assert len(played) == len(set(played))
    assert run.steps_are_whole()
    for shuffler in shufflers:
        lines = json_lines(shuffler.folder / "record.jsonl")
        opened = [line["round"] for line in lines if line["event"] == "opened"]
        released = [line["round"] for line in lines if line["event"] == "released"]
        assert len(opened) == len(set(opened)) and set(opened) <= set(run.spent)
        assert len(released) == len(set(released)) <= len(opened)
