"""A shuffler that answers the server with what no shuffler says: the round is lost, and no more."""

import itertools

import pytest

from rounds import make_plan
from shufl.server import Mean, aggregate_reports
from shufl.server.aggregate import SpoiledBatch
from shufl.shuffler import RoundHeader, ShufflerError, generate_key_pair, key_digest
from shufl.shuffler.service.control_service import ControlService
from shufl.shuffler.wire import shuffler_pb2


@pytest.fixture
def closed(here):
    """A world whose round is closed."""
    world = here()
    header = world.begin("run")
    world.submit(header, world.reports(header, 3))
    world.control.close_round("run", 1)
    return world


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ({}, "no report"),
        ({"more": True}, "no report"),
        ({"sealed": [b""] * 1000, "more": True}, "no report"),
        ({"sealed": [bytes(2**20)], "more": True}, "longer than any report"),
    ],
)
def test_a_release_of_what_is_no_report_ends(closed, monkeypatch, chunk, why):
    """Each of these chunks comes again and again."""

    async def chunks(self, batch):
        while True:
            yield shuffler_pb2.ReleaseChunk(**chunk)

    monkeypatch.setattr(ControlService, "_chunks", chunks)
    with pytest.raises(ShufflerError, match=why):
        next(closed.control.release("run", 1))


def test_an_outcome_that_no_shuffler_knows_is_an_error_of_the_shufflers(here, monkeypatch):
    async def close(self, request, caller, context):
        return shuffler_pb2.CloseRoundReply(outcome=99)

    monkeypatch.setattr(ControlService, "CloseRound", close)
    world = here()
    world.begin("run")
    with pytest.raises(ShufflerError, match="it says that the round ended as 99"):
        world.control.close_round("run", 1)


def test_no_more_reports_are_read_than_there_are_users_and_blankets():
    about = {"shuffler_blankets": 3.0, "accountant": "blanket"}
    plan = make_plan(users=50, check_in_rate=0.2, noise_multiplier=2.0, **about)
    private, public = generate_key_pair()
    header, read = RoundHeader("run", 3, "version", plan.digest(), key_digest(public)), []
    junk = (read.append(number) or b"junk" for number in itertools.count())
    most = 50 + plan.most_blankets
    with pytest.raises(SpoiledBatch, match=f"a batch must have at most {most} reports"):
        aggregate_reports((header, junk), private, plan, 4, Mean(plan, 4), 50)
    assert len(read) == most + 1
