"""The references from above: DP-SGD by Opacus, whose server everybody trusts, and no privacy."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from server import Optimiser, evaluate
from simulator.config import Config
from simulator.data.features import load_records
from simulator.experiment import data_seed
from simulator.models import build_model
from simulator.section import ConfigError


def train(config: Config, private: bool) -> dict[str, Any]:
    """Trains with the configuration's data, model and rounds, and tells what `result.json` has.

    Args:
        config: gives C, ε and δ too. A record is in a round's batch with probability 1/b, where b
            is the number of equal batches that the records make, about 1/γ.
        private: by Opacus, where ε is that of adding or removing a record; that of replacing one
            would be larger. Otherwise nothing is clipped, no noise is added, and the batches of
            1/γ rounds are all records in random order.

    Raises:
        ConfigError: Opacus is not installed, or the configuration leaves δ to the users' number.
    """
    privacy, training, device = config.privacy, config.training, config.simulation.device
    torch.manual_seed(data_seed(config))
    data = load_records(config.data.dataset, config.data.features)
    features, labels = data.train_features, data.train_labels
    about = data.input_shape, data.classes, data_seed(config), config.model.options
    model = build_model(config.model.name, *about).to(device).train()
    optimiser = Optimiser(
        training.optimiser,
        training.learning_rate,
        training.momentum,
        training.schedule,
        privacy.rounds,
        training.averaging,
    )
    average, begun = optimiser.average_of(model), time.monotonic()
    size = -(-len(labels) // max(1, round(1 / privacy.check_in_rate)))
    loader = DataLoader(TensorDataset(torch.arange(len(labels))), batch_size=size, shuffle=True)
    batches = len(loader)  # fewer, where they do not divide the records; Opacus draws by these
    learner: Any = model, optimiser.build(model), nn.CrossEntropyLoss(), loader
    promise: dict[str, Any] = {"epsilon": {}, "adjacency": "–", "accountant": "–"}
    noise = 0.0
    if private:
        learner, promise, noise = _with_opacus(config, batches, *learner)
    network, stepper, criterion, loader = learner
    drawn = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (batch,) in enumerate(itertools.islice(drawn, privacy.rounds), start=1):
        for group in stepper.param_groups:
            group["lr"] = optimiser.learning_rate_at(step)
        stepper.zero_grad()
        inputs, targets = data.inputs(features[batch].to(device)), labels[batch].to(device)
        criterion(network(inputs), targets).backward()
        stepper.step()
        if average is not None:
            average.update_parameters(model)
    test = data.inputs(data.test_features.to(device)), data.test_labels.to(device)
    result = evaluate(model if average is None else average.module, *test)
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "rounds": privacy.rounds,
        **promise,
        "delta": privacy.delta if private else None,
        "check_in_rate": 1 / batches,
        "noise_multiplier": noise,
        "shuffler_blankets": 0.0,
        "seconds": time.monotonic() - begun,
    }


def _with_opacus(
    config: Config,
    batches: int,
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    criterion: nn.Module,
    loader: Any,
) -> tuple[tuple[Any, ...], dict[str, Any], float]:
    """What Opacus makes of model, optimiser, loss and loader; what that promises; and its z."""
    try:
        from opacus import PrivacyEngine
        from opacus.accountants import PRVAccountant
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError:
        raise ConfigError("trainer central needs Opacus: pip install 'shufl[bench]'") from None
    privacy = config.privacy
    if privacy.delta == "1/n":
        raise ConfigError('privacy.delta must be a number with trainer central, got "1/n"')
    noise = get_noise_multiplier(
        target_epsilon=privacy.target_epsilon,
        target_delta=privacy.delta,
        sample_rate=1 / batches,
        steps=privacy.rounds,
        accountant="prv",
    )
    learner = PrivacyEngine(accountant="prv").make_private(
        module=model,
        optimizer=stepper,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=privacy.clip_norm,
        grad_sample_mode="ghost",
    )
    accountant = PRVAccountant()
    accountant.history = [(noise, 1 / batches, privacy.rounds)]
    epsilon = float(accountant.get_epsilon(privacy.delta))
    promise = {"epsilon": {"opacus": epsilon}, "adjacency": "add or remove", "accountant": "opacus"}
    return learner, promise, noise
