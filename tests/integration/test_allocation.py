"""Devices that draw their rounds themselves: on a real shuffler, in both engines, end to end."""

import numpy as np
import pytest

from client_world import USERS, reply_content
from rounds import make_plan
from run_world import json_lines, summary_of, trained
from shufl.clients import SimulatedLedger, client_app
from shufl.learning.config import load
from shufl.protocol.mechanisms import allocated, simulated_allocation_key
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare_simulation
from shufl.simulator.canary import check_end_to_end

EVERY = 3
ALLOCATION = {
    "participation": "allocation",
    "accountant": "local",
    "check_in_rate": 1 / EVERY,
    "target_epsilon": 1e3,
}


@pytest.mark.slow
def test_a_node_that_starts_again_in_each_round_has_drawn_before_the_first(make_round, tmp_path):
    """Of 4 users in 4 blocks, with coins in their place, 4 reports a block are no usual thing."""
    path = tmp_path / "device.db"
    round = make_round(seed=None, ledger=lambda _: SimulatedLedger(path))
    round.under(**ALLOCATION).open()
    sizes = []
    for number in range(1, 4 * EVERY + 1):
        client_app._nodes.clear()
        reply_content(round.announce())
        if number == 1:
            drawn = SimulatedLedger(path).allocation_key(round.header.run_id)
        sizes.append(len(round.released()))
        round.next(round.model)
    assert SimulatedLedger(path).allocation_key(round.header.run_id) == drawn
    assert np.reshape(sizes, (4, EVERY)).sum(1).tolist() == [4] * 4
    users = np.arange(1, USERS, 3)  # of node 1 of 3
    expected = [allocated(drawn, number, users, EVERY).sum() for number in range(1, len(sizes) + 1)]
    assert sizes == expected


SETTINGS = (
    "seed=5", "privacy.participation=allocation", "privacy.check_in_rate=0.5",
    "privacy.shuffler_blankets=0", "privacy.accountant=local", "privacy.target_epsilon=1e6",
    "privacy.delta=1e-3", "privacy.rounds=4", "privacy.minimum_batch=1", "data.users=300",
    "simulation.nodes=3",
)  # fmt: skip


@pytest.mark.slow
def test_every_user_reports_once_in_each_block(tmp_path):
    chosen = load("quickstart", [*SETTINGS, "simulation.engine=vectorised"])
    folder = trained(chosen, tmp_path / "runs")
    key, users = simulated_allocation_key(5), np.arange(300)
    expected = [allocated(key, round, users, 2).sum() for round in range(1, 5)]
    assert np.reshape(expected, (2, 2)).sum(1).tolist() == [300, 300]
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["reports"] for row in rows] == expected
    epsilons = [row["epsilon"] for row in rows]
    assert epsilons[0] == epsilons[1] < epsilons[2] == epsilons[3]
    priced = summary_of(folder)["epsilon"].items()
    assert [name for name, row in priced if row["epsilon"] is not None] == ["local"]


@pytest.mark.parametrize("engine", ["flower", "vectorised"])
def test_a_simulation_needs_a_seed_that_a_resumed_run_has_again(engine):
    chosen = load("quickstart", [*SETTINGS, "seed=system", f"simulation.engine={engine}"])
    with pytest.raises(ConfigError, match="seed must be a number with privacy"):
        prepare_simulation(chosen)


@pytest.mark.nightly
def test_an_attack_through_client_shuffler_and_server_takes_whole_blocks():
    plan = make_plan(
        users=1, check_in_rate=0.5, noise_multiplier=0.3, rounds=2, delta=1e-5, minimum_batch=1,
        target_epsilon=1e3, shuffler_blankets=0.5, accountant="blanket", participation="allocation",
    )  # fmt: skip
    blanket, local = check_end_to_end(plan, 0.1, 60, 0.99, 1)
    for check in (blanket, local):
        assert 0.2 < check.worst.delta_lower < check.claimed_delta
        assert not check.violated
