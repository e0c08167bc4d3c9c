"""Who checked in: by who sends, and by how many are empty."""

from collections import Counter

import numpy as np
import pytest

from client_world import USERS, Round, reply_content
from shuffler_world import ShufflerHere
from shufl.protocol.mechanisms import SeededRandomness, most_blankets
from shufl.server import Mean, aggregate_reports
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    ReportOpener,
    Verdict,
    empty_report,
    sealed_length,
)

BLANKETS = 6.0
WORK = most_blankets(BLANKETS)
MINE = np.array([1, 4, 7, 10])  # the users of the node


@pytest.fixture(scope="module")
def shuffler():
    with ShufflerHere(simulation_seed=5) as shuffler:
        yield shuffler


@pytest.fixture
def control(shuffler):
    with ControlClient(shuffler.address, shuffler.control) as client:
        yield client


def covered_round(shuffler, control, run_id, rate=0.5, cover=True, **changes):
    round = Round(shuffler.address, shuffler.submit, control, run_id, rate=rate, **changes)
    return round.under(shuffler_blankets=BLANKETS, cover=cover, least_present=len(MINE))


def users_who_sent(shuffler, round):
    """The oracle: whoever has the credential asks for each user whether a report is there."""
    oracle = IntakeClient(shuffler.address, shuffler.submit)
    sealed = bytes(sealed_length(2 * round.dimension))
    verdicts = oracle.submit(round.header, [(user, sealed) for user in MINE.tolist()])
    sent = [verdict is Verdict.DUPLICATE for verdict in verdicts]
    oracle.close()
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("cover", [False, True])
def test_the_network_and_the_shuffler_guess_who_checked_in(shuffler, control, cover):
    """Without cover the oracle is always right; with it, what it sees is always the same."""
    seen, coins = [], []
    for seed in range(12):
        round = covered_round(
            shuffler, control, f"oracle-{cover}-{seed}", cover=cover, seed=seed
        ).open()
        reply_content(round.announce())
        seen += users_who_sent(shuffler, round)
        coins += SeededRandomness(seed).check_ins(1, MINE, 0.5).tolist()
        control.end_round(round.header.run_id, 1)
    assert 0 < sum(coins) < len(coins)
    assert seen == ([True] * len(coins) if cover else coins)


def test_the_server_sees_no_more_than_without_cover():
    """Empty reports and others are as many together in every round, so the number of the empty
    ones is a function of the number of the others, which the server sees without cover too."""
    found, numbers = Counter(), set()
    with ShufflerHere() as shuffler, ControlClient(shuffler.address, shuffler.control) as control:
        for seed in range(8):
            drawn, others = drawn_and_others(shuffler, control, seed)
            found[drawn] += 1
            numbers.add(others)
    assert len(found) > 1  # the number of blankets is still random
    assert len(numbers) > 1


def drawn_and_others(shuffler, control, seed):
    """How many blankets a round had, and how many reports that are not empty."""
    round = covered_round(shuffler, control, f"server-{seed}", seed=seed).open()
    reply_content(round.announce())
    control.close_round(round.header.run_id, 1)
    batch = list(control.release(round.header.run_id, 1))
    assert len({len(sealed) for sealed in batch}) == 1
    opener = ReportOpener(round.private_key)
    empty = sum(
        opener.open(sealed, round.header) == empty_report(round.dimension) for sealed in batch
    )
    assert len(batch) == len(MINE) + WORK
    coins = SeededRandomness(seed).check_ins(1, MINE, 0.5)
    drawn = len(batch) - empty - int(coins.sum())
    assert 0 <= drawn <= WORK
    return drawn, len(batch) - empty


def test_empty_reports_are_left_out_of_the_sum_and_are_no_mistake(shuffler, control):
    sums = []
    for cover in (False, True):
        round = covered_round(shuffler, control, f"sum-{cover}", cover=cover, seed=3).open()
        reply_content(round.announce())
        control.close_round(round.header.run_id, 1)
        mean = Mean(round.plan, round.dimension)
        batch = round.header, control.release(round.header.run_id, 1)
        about = batch, round.private_key, round.plan, round.dimension
        aggregate = aggregate_reports(*about, mean, USERS)
        assert aggregate.rejected == 0
        sums.append((aggregate.reports, aggregate.estimate.tobytes()))
    assert sums[0] == sums[1]


def test_without_cover_in_the_plan_an_empty_report_is_rejected(shuffler, control):
    round = covered_round(shuffler, control, "uninvited", rate=1.0, cover=False).open()
    sealed = round.seal(empty_report(round.dimension))
    with IntakeClient(shuffler.address, shuffler.submit) as intake:
        assert list(intake.submit(round.header, [(1, sealed)])) == [Verdict.ACCEPTED]
    control.close_round("uninvited", 1)
    mean = Mean(round.plan, round.dimension)
    batch = round.header, control.release("uninvited", 1)
    about = batch, round.private_key, round.plan, round.dimension
    aggregate = aggregate_reports(*about, mean, USERS)
    assert aggregate.reasons == {"too-long": 1}
