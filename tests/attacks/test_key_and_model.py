"""A server that shows every node another key or another model, to tell the nodes apart."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from client_world import WIDTH, reply_content
from shufl.clients import RoundRefused
from shufl.shuffler import generate_key_pair

REPORTS_OF_A_NODE = 4
ANOTHER = "the shuffler was given another key, model or plan"


class TwoBiases(nn.Module):
    """Two parameters of one length: their bytes can be swapped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 2)
        self.shift = nn.Parameter(torch.tensor([1.0, -1.0]))

    def forward(self, features):
        return self.linear(features) + self.shift


@pytest.fixture
def round(make_round):
    return make_round(make_model=TwoBiases).open()


def disagreements(shuffler):
    """How often the shuffler has seen the server cheat."""
    return shuffler.scrape()["shufl_disagreements_total"]


def test_a_key_for_each_node_gets_the_reports_of_one(shuffler_here, round):
    for node in (0, 2):
        with pytest.raises(RoundRefused, match=ANOTHER):
            round.announce(node=node, public_key=generate_key_pair()[1])
    reply_content(round.announce(node=1))
    assert disagreements(shuffler_here) == 2
    assert len(round.released()) == REPORTS_OF_A_NODE


SEEN_BY_THE_SHUFFLER = {
    "swapped": lambda state: state | {"linear.bias": state["shift"], "shift": state["linear.bias"]},
    "changed": lambda state: state | {"shift": state["shift"] * (1 + 2**-23)},
}
SEEN_BY_THE_CLIENT = {
    "renamed": lambda state: {name.replace("shift", "offset"): state[name] for name in state},
    "reshaped": lambda state: state | {"linear.weight": state["linear.weight"].reshape(WIDTH, 2)},
    "of another type": lambda state: state | {"shift": state["shift"].double()},
    "reordered": lambda state: dict(reversed(state.items())),
}
CHANGES = SEEN_BY_THE_SHUFFLER | SEEN_BY_THE_CLIENT


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_for_one_node_gets_nothing_from_it(shuffler_here, round, change):
    shown = ArrayRecord(CHANGES[change](TwoBiases().state_dict()))
    seen_by_the_shuffler = change in SEEN_BY_THE_SHUFFLER
    message = ANOTHER if seen_by_the_shuffler else "has other parameters than this client's"
    with pytest.raises(RoundRefused, match=message):
        round.announce(node=0, model=shown)
    assert disagreements(shuffler_here) == seen_by_the_shuffler
    reply_content(round.announce(node=1))
    assert len(round.released()) == REPORTS_OF_A_NODE


def test_the_shuffler_is_given_another_plan_than_the_nodes(make_round, shuffler_here, round):
    weaker = round.plan.replace(minimum_batch=2)
    round.control.create_run("weaker", weaker.to_json().encode(), 1234)
    round.control.open_round("weaker", 1, round.header.model_digest, round.public_key)
    nodes = make_round(run_id="weaker", make_model=TwoBiases)  # with the plan that they know
    with pytest.raises(RoundRefused, match=ANOTHER):
        nodes.announce()
    assert disagreements(shuffler_here) == 1
