"""What docs/coming-from.md says of other libraries is true of their pinned versions.

test_docs.py runs the examples of the page.
"""

import importlib.metadata
import inspect
import re
from types import SimpleNamespace

import opacus
import pytest
from flwr import clientapp, serverapp
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp.mod import LocalDpMod
from flwr.server import workflow
from flwr.serverapp import exception, strategy
from torch.utils.data import DataLoader

from shufl.accounting import ACCOUNTANTS
from shufl.learning.config import Config
from test_docs import keys_of, rows_of, text_of

PAGE = text_of("docs/coming-from.md")
FIXED = (
    strategy.DifferentialPrivacyServerSideFixedClipping,
    strategy.DifferentialPrivacyClientSideFixedClipping,
)
ADAPTIVE = (
    strategy.DifferentialPrivacyServerSideAdaptiveClipping,
    strategy.DifferentialPrivacyClientSideAdaptiveClipping,
)
CLIENTS = 10


def section(name):
    return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)[1]


def unknown(name, *known):
    """Names of the first column of a section's table that no object has, nor takes as a parameter.

    A name may be one with … for what is left out, or a call of a method.
    """
    has = {each for thing in known for each in (*dir(thing), *getattr(thing, "__all__", ()))}
    for thing in known:
        if callable(thing):
            has |= set(inspect.signature(thing).parameters)
    named = [each for row in rows_of(section(name)) for each in re.findall("`([^`]+)`", row)]
    plain = [re.sub(r"^.*\.|\(.*\)$", "", each) for each in named]
    assert plain
    return [
        each
        for each in plain
        if not any(re.fullmatch(each.replace("…", r"\w*"), other) for other in has)
    ]


def test_other_libraries_have_what_the_page_names():
    make_private = opacus.PrivacyEngine.make_private_with_epsilon
    engine = opacus.PrivacyEngine
    assert unknown("Opacus", engine, engine.make_private, make_private, DataLoader) == []
    modules = serverapp, strategy, exception, clientapp, clientapp.mod, workflow
    callables = clientapp.ClientApp, strategy.FedAvg, serverapp.PrivacyConfig
    assert unknown("Flower", *modules, *callables) == []


def test_shufl_has_what_the_page_names():
    sections = "|".join(name for name in Config.model_fields if name not in ("name", "seed"))
    named = set(re.findall(rf"[`\"]((?:{sections})\.\w+)", PAGE))
    assert named and named <= set(keys_of(Config))
    assert PAGE.count("with eight accountants") == 2 and len(ACCOUNTANTS) == 8


@pytest.mark.parametrize(("section_", "package"), [("Opacus", "opacus"), ("Flower", "flwr")])
def test_the_page_names_the_pinned_version(section_, package):
    pinned = importlib.metadata.version(package).rpartition(".")[0]
    assert re.search(rf"(Opacus|version) {re.escape(pinned)}\b", section(section_))


def accountant(sampling="no-amplification", max_epsilon=None):
    relation = serverapp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if sampling == "without-replacement":
        relation = serverapp.NeighboringRelation.REPLACE_ONE
    sampling = serverapp.SamplingMethod(sampling)
    return serverapp.RdpAccountant(
        serverapp.PrivacyConfig(1e-5, CLIENTS, relation, sampling, max_epsilon)
    )


@pytest.mark.parametrize("kind", FIXED)
def test_flower_halts_with_fixed_clipping(kind):
    event = serverapp.GaussianPrivacyEvent(1.0, CLIENTS, CLIENTS)
    both = accountant()
    both.compose(event, count=2)
    spent = accountant(max_epsilon=both.get_epsilon(1e-5))
    private = kind(strategy.FedAvg(), 1.0, 1.0, CLIENTS, accountant=spent)
    nodes = SimpleNamespace(get_node_ids=lambda: list(range(1, CLIENTS + 1)))
    for number in (1, 2):
        asked = private.configure_train(number, ArrayRecord(), ConfigRecord(), nodes)
        assert len(list(asked)) == CLIENTS
        spent.compose(event)
    with pytest.raises(exception.PrivacyBudgetExhausted, match="would exceed max_epsilon"):
        private.configure_train(3, ArrayRecord(), ConfigRecord(), nodes)
    assert f"`{kind.__name__}`" in section("Flower")


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("sampling", ["poisson", "without-replacement"])
def test_flower_s_strategies_accept_no_amplification(kind, sampling):
    with pytest.raises(ValueError, match="no-amplification"):
        kind(strategy.FedAvg(), 1.0, 1.0, CLIENTS, accountant=accountant(sampling))


@pytest.mark.parametrize("kind", [*ADAPTIVE, LocalDpMod])
def test_flower_counts_nothing_else(kind):
    assert "accountant" not in inspect.signature(kind).parameters
    assert "accountant" in inspect.signature(FIXED[0]).parameters


@pytest.mark.slow
@pytest.mark.nightly
def test_pfl_has_what_the_page_names():
    pytest.importorskip("pfl", reason="pfl is not installed: make nightly installs it")
    from pfl.algorithm import federated_averaging, fedprox
    from pfl.callback import central_evaluation
    from pfl.data import federated_dataset
    from pfl.internal.ops import distributed, pytorch_ops
    from pfl.privacy import gaussian_mechanism, privacy_accountant, privacy_mechanism

    named = federated_averaging, fedprox, federated_dataset, central_evaluation
    torchrun = SimpleNamespace(torchrun=pytorch_ops.PyTorchDistributedContext)
    privacy = gaussian_mechanism, privacy_accountant, privacy_mechanism
    assert unknown("pfl-research", *named, *privacy, torchrun) == []
    assert not [name for name in dir(distributed) if "horovod" in name.lower()]
    version = importlib.metadata.version("pfl").rpartition(".")[0]
    assert f"version {version}." in section("pfl-research")
    asked = importlib.metadata.requires("pfl")
    assert [each for each in asked if re.match(r"dp-accounting .*<0\.6", each)]
