"""Who checked in: by who sends, and by how many are empty."""

import numpy as np
import pytest

from client_world import USERS, reply_content
from shufl.protocol.mechanisms import SeededRandomness, most_blankets
from shufl.server import Mean, aggregate_reports
from shufl.shuffler import IntakeClient, ReportOpener, Verdict, empty_report, sealed_length

BLANKETS = 6.0
WORK = most_blankets(BLANKETS)
MINE = np.array([1, 4, 7, 10])  # the users of the node


@pytest.fixture
def covered_round(make_round):
    def make(run_id, rate=0.5, cover=True, **changes):
        round = make_round(run_id=run_id, rate=rate, **changes)
        return round.under(shuffler_blankets=BLANKETS, cover=cover, least_present=len(MINE)).open()

    return make


def released(round):
    about = round.header.run_id, round.header.round
    round.control.close_round(*about)
    return list(round.control.release(*about))


def aggregated(round):
    batch, mean = (round.header, released(round)), Mean(round.plan, round.dimension)
    return aggregate_reports(batch, round.private_key, round.plan, round.dimension, mean, USERS)


def users_who_sent(round):
    """The oracle: whoever has the credential asks for each user whether a report is there."""
    sealed = bytes(sealed_length(2 * round.dimension))
    with IntakeClient(*round.settings.shufflers[0]) as oracle:
        verdicts = oracle.submit(round.header, [(user, sealed) for user in MINE.tolist()])
        return [verdict is Verdict.DUPLICATE for verdict in verdicts]


@pytest.mark.slow
@pytest.mark.parametrize("cover", [False, True])
def test_the_network_and_the_shuffler_guess_who_checked_in(covered_round, cover):
    """Without cover the oracle is always right; with it, what it sees is always the same."""
    seen, coins = [], []
    for seed in range(12):
        round = covered_round(f"oracle-{seed}", cover=cover, seed=seed)
        reply_content(round.announce())
        seen += users_who_sent(round)
        coins += SeededRandomness(seed).check_ins(1, MINE, 0.5).tolist()
        round.control.end_round(round.header.run_id, 1)
    assert 0 < sum(coins) < len(coins)
    assert seen == ([True] * len(coins) if cover else coins)


def test_the_server_sees_no_more_than_without_cover(covered_round):
    """Empty reports and others are as many together in every round.

    So the number of the empty ones is a function of the number of the others, which the server
    sees without cover too.
    """
    blankets, others = set(), set()
    for seed in range(8):
        round = covered_round(f"server-{seed}", seed=seed)
        reply_content(round.announce())
        batch, opener = released(round), ReportOpener(round.private_key)
        assert len(batch) == len(MINE) + WORK and len(set(map(len, batch))) == 1
        opened = [opener.open(sealed, round.header) for sealed in batch]
        not_empty = len(batch) - opened.count(empty_report(round.dimension))
        others.add(not_empty)
        blankets.add(not_empty - SeededRandomness(seed).check_ins(1, MINE, 0.5).sum())
    assert len(blankets) > 1 and 0 <= min(blankets) <= max(blankets) <= WORK  # still random
    assert len(others) > 1


@pytest.mark.parametrize("shuffler_here", [{"simulation_seed": 5}], indirect=True)
def test_empty_reports_are_left_out_of_the_sum_and_are_no_mistake(covered_round):
    sums = []
    for cover in (False, True):
        round = covered_round(f"sum-{cover}", cover=cover, seed=3)
        reply_content(round.announce())
        aggregate = aggregated(round)
        assert aggregate.rejected == 0
        sums.append((aggregate.reports, aggregate.estimate.tobytes()))
    assert sums[0] == sums[1]


def test_without_cover_in_the_plan_an_empty_report_is_rejected(covered_round):
    round = covered_round("uninvited", rate=1.0, cover=False)
    sealed = round.seal(empty_report(round.dimension))
    with IntakeClient(*round.settings.shufflers[0]) as intake:
        assert list(intake.submit(round.header, [(1, sealed)])) == [Verdict.ACCEPTED]
    assert aggregated(round).reasons == {"too-long": 1}
