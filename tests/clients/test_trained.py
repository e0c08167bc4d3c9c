"""Frozen parameters: neither reported, sent nor kept; everybody has the same ones, or a line."""

import os

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

import shufl
from client_world import Round, begin_flower_task
from shuffler_world import ShufflerHere
from shufl.clients import RoundRefused
from shufl.learning.section import ConfigError
from shufl.learning.trained import dimension, frozen_digest, load_sent, sent, trained
from shufl.server import CheckpointError, load_checkpoint
from shufl.shuffler import ControlClient


class Adapted(nn.Module):
    """A frozen trunk, whose weight is used twice, and a low-rank adapter beside it; one buffer."""

    def __init__(self, input_shape, outputs, trunk=None):
        super().__init__()
        trunk = trunk or float(os.environ.get("TRUNK", "1"))  # stands for a file of weights
        generator = torch.Generator().manual_seed(5)
        self.trunk = nn.Linear(input_shape[-1], 16, dtype=torch.float64)
        with torch.no_grad():
            self.trunk.weight.copy_(trunk * torch.randn(16, input_shape[-1], generator=generator))
            self.trunk.bias.zero_()
        self.trunk.requires_grad_(False)
        self.same = self.trunk
        self.down = nn.Linear(input_shape[-1], 2, bias=False)
        self.up, self.head = nn.Linear(2, 16, bias=False), nn.Linear(16, outputs)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, records):
        x = self.same(records.double()).float() + self.up(self.down(records)) * self.scale
        return self.head(torch.relu(x))


def make_adapted(trunk=None):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Adapted((6,), 3, trunk)


def test_what_is_trained_is_sent_with_buffers_and_nothing_frozen():
    model = make_adapted()
    assert list(trained(model)) == ["down.weight", "up.weight", "head.weight", "head.bias"]
    assert dimension(model) == 2 * 6 + 2 * 16 + 16 * 3 + 3
    assert sent(model).keys() == {*trained(model), "scale"}
    assert not any(value.requires_grad for value in sent(model).values())
    other = make_adapted()
    with torch.no_grad():
        other.head.bias.fill_(7.0)
    load_sent(model, sent(other))
    assert model.head.bias.tolist() == [7.0] * 3
    with pytest.raises(RuntimeError, match="other trained parameters"):
        load_sent(model, sent(nn.Linear(6, 3)))


def test_the_digest_is_of_frozen_parameters_in_every_bit_and_type():
    model, other = make_adapted(), make_adapted()
    assert frozen_digest(model) == frozen_digest(other) != frozen_digest(make_adapted(1.5))
    assert frozen_digest(nn.Linear(2, 2)) == ""
    bits = other.trunk.weight.data.view(torch.int64)
    bits[0, 0] ^= 1
    assert frozen_digest(model) != frozen_digest(other)
    half, double = (nn.Linear(2, 2, dtype=kind) for kind in (torch.bfloat16, torch.float64))
    for each in (half, double):
        nn.init.ones_(each.weight), nn.init.zeros_(each.bias)
        each.requires_grad_(False)
    assert frozen_digest(half) != frozen_digest(double)


def load_records():
    def records(user):
        generator = torch.Generator().manual_seed(user)
        return torch.randn(2, 6, generator=generator), torch.tensor([user % 3, 0])

    return records


@pytest.fixture
def round(request):
    begin_flower_task()
    about = {"make_model": make_adapted, "load_users": load_records}
    with ShufflerHere() as here, ControlClient(here.address, here.control) as control:
        yield Round(here.address, here.submit, control, request.node.name, **about).open()


def test_a_report_is_as_long_as_what_is_trained(round):
    round.announce(node=0)
    reports = round.released()
    assert {len(report) for report in reports} == {dimension(make_adapted())} == {round.dimension}
    assert len(reports) == 4


def test_a_node_with_other_frozen_parameters_refuses_before_the_first_round(round):
    about = {"run_id": round.header.run_id, "plan_digest": round.header.plan_digest}
    digest = frozen_digest(make_adapted())
    for given in (frozen_digest(make_adapted(1.5)), ""):
        asked = {"round": ConfigRecord(about | {"frozen": given})}
        message = f"frozen parameters must be {digest}, got {given or 'none'}"
        with pytest.raises(RoundRefused, match=message):
            round.deliver("query", asked, 1)
    accepted = round.deliver("query", {"round": ConfigRecord(about | {"frozen": digest})}, 1)
    assert "acknowledgement" in accepted.content


def test_a_server_that_sends_frozen_parameters_too_is_refused(round):
    whole = ArrayRecord(dict(make_adapted().state_dict()))
    with pytest.raises(RoundRefused, match="has other parameters than this client's"):
        round.announce(model=whole)


ROWS = np.random.default_rng(1).standard_normal((90, 6)).astype("float32")
CHANGES = {
    **{"privacy.rounds": 4, "privacy.target_epsilon": 1e6, "privacy.noise_multiplier": 0.01},
    **{"model.name": f"{__name__}:Adapted", "simulation.engine": "vectorised"},
    **{"privacy.delta": 1e-4, "privacy.minimum_batch": 1, "privacy.check_in_rate": 1.0},
    **{"training.checkpoint_every": 1, "training.averaging": 0.5},
}


def rows():
    labels = (ROWS[:, 0] > 0).astype("int64")
    return shufl.Dataset(ROWS[:60], labels[:60], ROWS[60:], labels[60:], classes=2)


@pytest.mark.slow
def test_a_run_keeps_what_is_trained_and_goes_on_with_the_same_frozen_parameters(
    tmp_path, monkeypatch
):
    def halfway(run, model):
        return shufl.STOP if len(run.metrics) == 2 else None

    about = {"dataset": rows, "runs": tmp_path}
    whole = shufl.run("quickstart", CHANGES, **about)
    run = shufl.run("quickstart", CHANGES, on_round=halfway, **about)
    checkpoint = load_checkpoint(run.folder / "checkpoint.pt")
    assert checkpoint.model.keys() == sent(Adapted((6,), 2)).keys()
    monkeypatch.setenv("TRUNK", "1.5")
    with pytest.raises(CheckpointError, match=r"was made with frozen parameters \w+, it cannot go"):
        shufl.resume(run.folder, dataset=rows)
    with pytest.raises(ConfigError, match=r"model.pt is of frozen parameters \w+, here are \w+"):
        _ = shufl.load_run(whole.folder, dataset=rows).model
    monkeypatch.delenv("TRUNK")
    resumed = shufl.resume(run.folder, dataset=rows)
    kept, expected = sent(resumed.model), sent(whole.model)
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    assert not torch.equal(kept["up.weight"], torch.zeros(16, 2))  # it has been trained
    assert torch.equal(resumed.model.trunk.weight, Adapted((6,), 2).trunk.weight)
    assert (run.folder / "model.pt").stat().st_size < 6000


def test_a_model_of_which_nothing_is_trained_is_refused():
    with pytest.raises(ConfigError, match="has no parameters to train"):
        shufl.run("quickstart", {"model.name": f"{__name__}:all_frozen"})


def all_frozen(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs)).requires_grad_(False)


@pytest.mark.slow
def test_frozen_parameters_may_have_eight_bits(tmp_path):
    changes = CHANGES | {"model.name": f"{__name__}:Quantised", "privacy.rounds": 2}
    with pytest.raises(ConfigError, match=r"averaging cannot be had for model .*Quantised: .*lerp"):
        shufl.run("quickstart", changes, dataset=rows, runs=tmp_path)
    changes["training.averaging"] = 0.0
    run = shufl.run("quickstart", changes, dataset=rows, runs=tmp_path)
    assert len(run.metrics) == 2
    assert run.model.trunk.dtype == torch.float8_e4m3fn


class Quantised(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        trunk = torch.eye(input_shape[-1]).to(torch.float8_e4m3fn)
        self.trunk = nn.Parameter(trunk, requires_grad=False)
        self.head = nn.Linear(input_shape[-1], outputs)

    def forward(self, records):
        return self.head(records @ self.trunk.float())
