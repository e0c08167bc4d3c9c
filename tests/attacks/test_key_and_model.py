"""A server that shows every node another key or another model, to tell the nodes apart."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from client_world import WIDTH, Round, reply_content
from shuffler_world import ShufflerHere
from shufl.clients import RoundRefused
from shufl.shuffler import ControlClient, generate_key_pair

REPORTS_OF_A_NODE = 4


class TwoBiases(nn.Module):
    """Two parameters of one length: their bytes can be swapped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 2)
        self.shift = nn.Parameter(torch.tensor([1.0, -1.0]))

    def forward(self, features):
        return self.linear(features) + self.shift


@pytest.fixture(scope="module")
def shuffler():
    with ShufflerHere() as shuffler:
        yield shuffler


@pytest.fixture
def attacked(shuffler, request):
    """A round of a cheating server: the round, and how often the shuffler sees it cheat."""

    def disagreements():
        return shuffler.scrape()["shufl_disagreements_total"]

    before = disagreements()
    with ControlClient(shuffler.address, shuffler.control) as control:
        about = shuffler.address, shuffler.submit, control, request.node.name
        yield Round(*about, make_model=TwoBiases).open(), lambda: disagreements() - before


def test_a_key_for_each_node_gets_the_reports_of_one(attacked):
    round, disagreements = attacked
    for node in (0, 2):
        with pytest.raises(RoundRefused, match="the shuffler was given another key, model or plan"):
            round.announce(node=node, public_key=generate_key_pair()[1])
    reply_content(round.announce(node=1))
    assert disagreements() == 2
    assert len(round.released()) == REPORTS_OF_A_NODE


def swapped(state):
    return state | {"linear.bias": state["shift"], "shift": state["linear.bias"]}


def renamed(state):
    return {name.replace("shift", "offset"): value for name, value in state.items()}


def reshaped(state):
    return state | {"linear.weight": state["linear.weight"].reshape(WIDTH, 2)}


def other_type(state):
    return state | {"shift": state["shift"].double()}


def reordered(state):
    return dict(reversed(state.items()))


def changed(state):
    return state | {"shift": state["shift"] * (1 + 2**-23)}


@pytest.mark.parametrize(
    ("change", "seen_by"),
    [
        (swapped, "shuffler"),
        (changed, "shuffler"),
        (renamed, "client"),
        (reshaped, "client"),
        (other_type, "client"),
        (reordered, "client"),
    ],
)
def test_a_model_for_one_node_gets_nothing_from_it(attacked, change, seen_by):
    round, disagreements = attacked
    shown = ArrayRecord(change(TwoBiases().state_dict()))
    message = {
        "shuffler": "the shuffler was given another key, model or plan",
        "client": "the model received has other parameters than this client's",
    }
    with pytest.raises(RoundRefused, match=message[seen_by]):
        round.announce(node=0, model=shown)
    assert disagreements() == (seen_by == "shuffler")
    reply_content(round.announce(node=1))
    assert len(round.released()) == REPORTS_OF_A_NODE


def test_the_shuffler_is_given_another_plan_than_the_nodes(attacked):
    round, disagreements = attacked
    weaker = round.plan.replace(minimum_batch=2)
    length = 1234
    round.control.create_run("weaker", weaker.to_json().encode(), length)
    round.control.open_round("weaker", 1, round.header.model_digest, round.public_key)
    nodes = Round(
        *round.settings.shufflers[0], round.control, "weaker", make_model=TwoBiases
    )  # with the plan that they know
    with pytest.raises(RoundRefused, match="the shuffler was given another key, model or plan"):
        nodes.announce()
    assert disagreements() == 1
