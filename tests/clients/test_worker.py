"""One user's record decides about that user alone, whatever the model does with it."""

import inspect
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from device_models import TROUBLES, AtOnce, Slow, Troubled, of_sizes, troubled_users
from torch.utils._python_dispatch import TorchDispatchMode

from client_world import WIDTH, WINDOW, load_users, make_model, records
from nights import by_night
from run_world import LIMIT, wait_until
from shufl.cli.node import _may_pass
from shufl.clients import worker
from shufl.clients.worker import AT_WORK, DONE, FAILED, Worker, _Memory, _Shared
from shufl.learning import LocalTraining
from shufl.learning.node_updates import NodeUpdates
from shufl.learning.parameters import sent

pytestmark = pytest.mark.slow

USERS, BAD = 12, 4
HEALTHY = np.arange(USERS) != BAD
ENDS = {"crashes": "the process ended with 9", "is killed": "the process ended with -9"}
FEDAVG = LocalTraining("fedavg", 2, 0.5, 15)


def start(make, users=USERS, training=None):
    return Worker(make, training or LocalTraining(), users, WINDOW.most_records, records(0))


def with_trouble():
    """Parameters of a round in which `Troubled` has trouble with some records."""
    parameters = {name: value.clone() for name, value in sent(Troubled()).items()}
    parameters["inner.bias"] += 10
    return parameters


def play(child, of_user, parameters):
    """A round: every user's update, the states, and why updates failed."""
    child.fill(of_user)
    seeds = np.arange(len(child.states), dtype=np.uint64)
    failed = child.compute(parameters, seeds, LIMIT, threading.Event())
    updates = np.array([child.update(user) for user in range(len(child.states))])
    return updates, child.states.tolist(), failed


@pytest.mark.parametrize("training", [LocalTraining(), *by_night(FEDAVG)])
def test_a_record_changes_its_own_users_update_alone(training):
    """To the bit. The model has trouble with it in a later round only: the start sees nothing."""
    parameters = with_trouble()
    with closing(start(Troubled, training=training)) as child:
        expected, states, failed = play(child, troubled_users(), parameters)
        assert states == [DONE] * USERS and not failed and expected.any(axis=1).all()
        for number, trouble in enumerate(TROUBLES, start=1):
            of_user = troubled_users(**{f"u{BAD}": number})
            child.load(of_user, WINDOW)
            updates, states, failed = play(child, of_user, parameters)
            assert states[BAD] == FAILED and states.count(DONE) == USERS - 1, trouble
            assert not updates[BAD].any(), trouble
            assert np.array_equal(updates[HEALTHY], expected[HEALTHY]), trouble
            assert [*failed] == [BAD] and "1004" not in failed[BAD] and "tensor" not in failed[BAD]
            assert failed[BAD] == ENDS.get(trouble, failed[BAD])


def test_a_node_whose_child_is_killed_or_lacks_memory_at_the_start_may_start_later():
    """Else its service would leave it alone for good, as it does where records are wrong."""
    may_pass = dict.fromkeys(("raises", "crashes"), False)
    may_pass |= dict.fromkeys(("is killed", "has no memory"), True)
    with closing(start(AtOnce, users=2)) as child:
        for trouble, passes in may_pass.items():
            of_user = troubled_users(u1=TROUBLES.index(trouble) + 1)
            with pytest.raises(ValueError, match="of this node's users: user 1: ") as error:
                child.load(of_user, WINDOW)
            assert _may_pass(error.value) == passes, trouble


class Later:
    """The time, which is much later once one user has been at work for a moment."""

    def __init__(self, states, user, seconds):
        self._at_work, self._seconds = (lambda: states[user] == AT_WORK), seconds
        self._looks = 0

    def monotonic(self):
        self._looks += self._at_work()
        return time.monotonic() + (self._seconds if self._looks > 2 else 0.0)


def test_an_update_that_hangs_costs_its_users_alone_whatever_signals_it_ignores(monkeypatch):
    of_user, parameters = troubled_users(**{f"u{BAD}": len(TROUBLES) + 1}), with_trouble()
    with closing(start(Troubled)) as child:
        expected, *_ = play(child, troubled_users(), parameters)
        monkeypatch.setattr(worker, "time", Later(child.states, BAD, LIMIT / 3 + 1))
        updates, states, failed = play(child, of_user, parameters)
    assert failed == {BAD: "it takes too long"} and states[BAD] == FAILED
    assert np.array_equal(updates[HEALTHY], expected[HEALTHY])


def test_an_update_that_is_no_number_is_its_users_alone():
    def of_user(user):
        features, labels = records(user)
        return features * (torch.inf if user == BAD else 1.0), labels

    parameters = sent(make_model())
    with closing(start(make_model)) as child:
        expected, *_ = play(child, load_users(), parameters)
        updates, states, _ = play(child, of_user, parameters)
    assert states == [DONE] * USERS and not np.isfinite(updates[BAD]).all()
    assert np.array_equal(updates[HEALTHY], expected[HEALTHY])


def test_the_window_must_have_room_for_all_users_one_by_one_three_times():
    """`Slow` takes 20 ms at least for each user, and so does a node, whoever fails."""
    with closing(start(Slow)) as child:
        assert child.seconds > 3 * USERS * 0.02
        child.seconds = 0.99 * WINDOW.work_until / 1.25
        child.check(WINDOW)
        child.seconds *= 1.02
        with pytest.raises(ValueError, match=r"^window\.work_until must be .* 12 users take"):
            child.check(WINDOW)


MUTANT = "features[user], labels[user]", "features[user][: real[user]], labels[user][: real[user]]"
"""Computes with a user's own records alone: nobody's padding."""


class Counting(TorchDispatchMode):
    """Notes each operation of torch, and the shapes that it is given."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
        self.noted.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [LocalTraining(), FEDAVG], ids=["fedsgd", "fedavg"])
def test_the_work_for_20_records_and_for_2000_is_the_same_operations(training):
    source = inspect.getsource(worker.compute)
    assert source.count(MUTANT[0]) == 1
    mutant = dict(vars(worker))
    exec(source.replace(*MUTANT), mutant)  # the same but for the padding

    def operations(compute, sizes):
        users, most = 3, 40
        work = NodeUpdates(make_model, training, together=False)
        shapes = (users, most, WIDTH), (users, most), (users,), (users, work.dimension), (users,)
        memory = _Memory(
            *map(_Shared, shapes, (np.float32, np.int64, np.int64, np.float32, np.uint8))
        )
        Worker.fill(_with(memory), of_sizes(sizes))
        with Counting() as counting:
            compute(work, memory, np.arange(users, dtype=np.uint64), pytest.fail)
        assert (memory.states.mapped() == DONE).all()
        assert memory.updates.mapped().any(axis=1).all()
        return counting.noted

    few, many, one = {None: 20}, {None: 2000}, {None: 20, 1: 2000}
    expected = operations(worker.compute, few)
    assert len(expected) > 10
    assert expected == operations(worker.compute, many) == operations(worker.compute, one)
    assert operations(mutant["compute"], few) != operations(mutant["compute"], one)


def _with(memory):
    filled = Worker.__new__(Worker)
    filled._memory = memory
    return filled


def test_a_child_that_is_killed_from_outside_costs_who_is_at_work():
    """Whoever was done stays so, and the others go on in another process."""
    parameters = with_trouble()
    with closing(start(Troubled)) as child:
        first = child._child.process
        child.fill(troubled_users())
        over, hanging = threading.Event(), parameters | {"inner.bias": torch.full((2,), 1e3)}
        seeds = np.arange(USERS, dtype=np.uint64)
        about = hanging, seeds, 3 * LIMIT, over
        plays = threading.Thread(target=child.compute, args=about)
        plays.start()
        wait_until(lambda: child.states[0] == AT_WORK, LIMIT, "the first user's work")
        first.kill()
        wait_until(lambda: child.states[1] == AT_WORK, LIMIT, "the second user's work")
        assert child.states[0] == FAILED
        over.set()
        play(child, troubled_users(), parameters)
        plays.join(LIMIT)
        assert child.states.tolist() == [DONE] * USERS
