"""The reference from above: DP-SGD by Opacus, whose server everybody trusts."""

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


def train(config: Config) -> dict[str, Any]:
    """Trains with the configuration's data, model, C, ε, δ and rounds, and tells as `outcome` does.

    A record is in a round's batch with probability γ, rounded so that 1/γ is whole. ε is that of
    adding or removing a record, as Opacus accounts for it; that of replacing one would be larger.

    Raises:
        ConfigError: Opacus is not installed, or the configuration leaves δ to the users' number.
    """
    try:
        from opacus import PrivacyEngine
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError:
        raise ConfigError("trainer central needs Opacus: pip install 'shufl[bench]'") from None
    privacy, training, device = config.privacy, config.training, config.simulation.device
    if privacy.delta == "1/n":
        raise ConfigError('privacy.delta must be a number with trainer central, got "1/n"')
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
    batches = max(1, round(1 / privacy.check_in_rate))
    noise = get_noise_multiplier(
        target_epsilon=privacy.target_epsilon,
        target_delta=privacy.delta,
        sample_rate=1 / batches,
        steps=privacy.rounds,
        accountant="prv",
    )
    engine = PrivacyEngine(accountant="prv")
    private, stepper, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimiser.build(model),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            TensorDataset(torch.arange(len(labels))), batch_size=-(-len(labels) // batches)
        ),
        noise_multiplier=noise,
        max_grad_norm=privacy.clip_norm,
        grad_sample_mode="ghost",
    )
    average, begun = optimiser.average_of(model), time.monotonic()
    drawn = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (batch,) in enumerate(itertools.islice(drawn, privacy.rounds), start=1):
        for group in stepper.param_groups:
            group["lr"] = optimiser.learning_rate_at(step)
        stepper.zero_grad()
        inputs, targets = data.inputs(features[batch].to(device)), labels[batch].to(device)
        criterion(private(inputs), targets).backward()
        stepper.step()
        if average is not None:
            average.update_parameters(model)
    test = data.inputs(data.test_features.to(device)), data.test_labels.to(device)
    result = evaluate(model if average is None else average.module, *test)
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "rounds": privacy.rounds,
        "epsilon": {"opacus": float(engine.get_epsilon(privacy.delta))},
        "delta": privacy.delta,
        "adjacency": "add or remove",
        "accountant": "opacus",
        "check_in_rate": 1 / batches,
        "noise_multiplier": noise,
        "shuffler_blankets": 0.0,
        "seconds": time.monotonic() - begun,
    }
