"""A round at one real shuffler, step by step: what it comes to, and what is kept of it."""

import gc
import sys

import numpy as np
import pytest
from flwr.app import ArrayRecord

from run_world import LIMIT
from server_world import AGREED, PLAN, SUMS, USERS, Here, Run, SimulatedRun, events
from shuffler_world import refusal
from shufl.learning.parameters import sent
from shufl.protocol.outcomes import RoundOutcome
from shufl.server.broadcast import broadcast
from shufl.shuffler import (
    Refusal,
    RoundHeader,
    ShufflerRefused,
    ShufflerUnavailable,
    generate_key_pair,
    key_digest,
    model_digest,
)

USERS_OF = {each.name: each.users for each in AGREED.values()}


@pytest.fixture
def shuffler():
    with Here() as shuffler:
        yield shuffler


def sent_to(run, part, nodes=(1, 2, 3)):
    """Has a round opened, and these nodes send; returns the round's private key."""
    model, (private_key, public_key) = sent(run.make_model()), generate_key_pair()
    header = RoundHeader(
        run_id=run.folder.name,
        round=1,
        model_digest=model_digest(model),
        plan_digest=run.plan.digest(),
        key_digest=key_digest(public_key),
    )
    part.book()
    part.open(header, public_key)
    broadcast(run.network, list(nodes), header, public_key, ArrayRecord(model), LIMIT)
    return private_key


@pytest.mark.parametrize("kind", [Run, SimulatedRun])
def test_a_batch_is_fetched_once_and_is_gone_then(tmp_path, shuffler, kind):
    run = kind(tmp_path, [shuffler])
    with run.loop() as loop:
        (part,) = loop.parts
        private_key = sent_to(run, part)
        assert (part.outcome, part.is_releasable) == (RoundOutcome.LOST, False)  # if it broke off
        part.close(unwanted=False)
        assert part.is_releasable and events(shuffler) == ["opened"]
        part.fetch(private_key, answered=USERS, agreed=USERS_OF)
        assert (part.outcome, part.users, part.error) == (RoundOutcome.RELEASED, USERS, None)
        assert part.part.reports == USERS
        assert np.linalg.norm(part.part.estimate) == pytest.approx(1.0, abs=0.1)
        assert events(shuffler) == ["opened", RoundOutcome.RELEASED]
        assert refusal(part.client.release, tmp_path.name, 1) is Refusal.ALREADY_RELEASED


@pytest.mark.parametrize(
    ("unwanted", "outcome"),
    [(False, RoundOutcome.BELOW_MINIMUM), (True, RoundOutcome.DISCARDED)],
)
def test_what_is_not_released_ends_here_as_the_record_says(tmp_path, shuffler, unwanted, outcome):
    run = Run(tmp_path, [shuffler], PLAN.replace(minimum_batch=USERS))
    with run.loop() as loop:
        (part,) = loop.parts
        private_key = sent_to(run, part, nodes=(1, 2))
        part.close(unwanted)
        part.fetch(private_key, answered=8, agreed=USERS_OF)
        assert (part.outcome, part.part, part.is_releasable) == (outcome, None, False)
    assert events(shuffler) == ["opened", outcome]


class Lying:
    """A client of a shuffler that says that so many users sent."""

    def __init__(self, client, senders):
        self._client, self.senders = client, senders

    def __getattr__(self, name):
        return getattr(self._client, name)

    def close_round(self, *about):
        return self._client.close_round(*about)._replace(senders=self.senders)


@pytest.mark.parametrize("mixing", [{}, SUMS], ids=["reports", "sums"])
@pytest.mark.parametrize("said", [USERS + 1, 1, 2])
def test_nothing_is_fetched_from_a_shuffler_whose_word_is_impossible(
    tmp_path, shuffler, said, mixing
):
    """As many users as were agreed are the most; the plan's minimum is the least.

    Of a sum the nodes' seeds tell how many users there are, whatever the shuffler says.
    """
    run = Run(tmp_path, [shuffler], PLAN.replace(minimum_batch=2, **mixing))
    with run.loop(control=lambda number, client: Lying(client, said)) as loop:
        (part,) = loop.parts
        private_key = sent_to(run, part)
        part.close(unwanted=False)
        part.fetch(private_key, answered=USERS, agreed=USERS_OF)
    if said == 2:
        users = USERS if mixing else said
        assert (part.outcome, part.users) == (RoundOutcome.RELEASED, users)
        return
    assert (part.outcome, part.users, part.part) == (RoundOutcome.LOST, 0, None)
    assert str(part.error) == f"it says that {said} users sent; possible are 2 to 12"
    assert events(shuffler) == ["opened"]


def test_a_shuffler_that_is_away_loses_its_own_round_or_ends_a_simulation(tmp_path):
    with Here() as gone:
        run, simulated = (kind(tmp_path, [gone]) for kind in (Run, SimulatedRun))
    with run.loop(shuffler_seconds=0.0) as loop:
        (part,) = loop.parts
        part.book()
        assert isinstance(part.error, ShufflerUnavailable)
        assert part.outcome is RoundOutcome.LOST
    with simulated.loop() as loop, pytest.raises(ShufflerUnavailable):
        loop.parts[0].book()


@pytest.mark.parametrize("kind", [Run, SimulatedRun])
def test_a_refusal_for_good_is_raised(tmp_path, shuffler, kind):
    run = kind(tmp_path, [shuffler])
    with run.loop() as loop:
        (part,) = loop.parts
        other = run.plan.replace(minimum_batch=3).to_json().encode()
        part.client.create_run(tmp_path.name, other, 1000)
        with pytest.raises(ShufflerRefused) as refused:
            part.book()
    assert refused.value.reason is Refusal.RUN_EXISTS


def test_a_lost_round_keeps_no_key_and_the_next_one_begins_anew(tmp_path):
    """Whoever reads the server's memory between two rounds cannot open a report of the first."""
    with Here() as shuffler:
        run = Run(tmp_path, [shuffler])
        with run.loop(shuffler_seconds=0.0) as loop:
            (part,) = loop.parts
            private_key = sent_to(run, part)
            gc.collect()
            before = sys.getrefcount(private_key)
            part.close(unwanted=False)
            shuffler.__exit__()
            part.fetch(private_key, answered=USERS, agreed=USERS_OF)
            assert (part.outcome, part.users) == (RoundOutcome.LOST, USERS)
            assert part.error is not None
            gc.collect()
            assert sys.getrefcount(private_key) == before
            shuffler.__enter__()
            part.client = type(part.client)(shuffler.address, shuffler.control)
            part.book()
            assert (part.error, part.closed, part.part, part.users) == (None, None, None, 0)


def test_what_an_earlier_server_has_left_open_is_destroyed_before_the_next_round(
    tmp_path, shuffler
):
    run = Run(tmp_path, [shuffler])
    with run.loop() as loop:
        loop.settings.ledger.append_round(1)
        sent_to(run, loop.parts[0])
    assert events(shuffler) == ["opened"]
    with run.loop() as loop:
        (part,) = loop.parts
        part.book()
        assert part.error is None
        assert events(shuffler) == ["opened", RoundOutcome.DISCARDED]
        part.book()  # once is enough
        assert events(shuffler) == ["opened", RoundOutcome.DISCARDED]
