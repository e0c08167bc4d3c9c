"""The process of a deployed node: what its file says, made into the settings that it serves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shufl.accounting import PrivacyPlan
from shufl.clients import ClientSettings, UserRecords, load_device
from shufl.clients.worker import Worker
from shufl.deploy.sites import NodeSite, check_cover
from shufl.shuffler import report_length, sealed_length
from shufl.simulator.config import Config, load
from shufl.simulator.data.datasets import wrong_tensor
from shufl.simulator.data.features import map_records
from shufl.simulator.experiment import (
    check_report_size,
    local_training,
    model_maker,
    plan_of,
    records_loader,
)
from shufl.simulator.section import READERS_ERRORS, ConfigError, find, one_line
from shufl.simulator.trial import try_users


def node_settings(site: NodeSite, folder: Path) -> ClientSettings:
    """What the node, whose file is in `folder`, agrees to and has.

    Raises:
        ValueError: a mistake, found before any work.
    """
    config = load(site.config)
    plan, make_model, load_users, together = check_data(site, folder, config)
    credentials = site.credentials
    device = load_device(Path(site.device))
    return ClientSettings(
        run_id=None,
        plan=plan,
        make_model=make_model,
        load_users=load_users,
        training=local_training(config),
        shufflers=tuple((address, credentials) for address in site.shufflers),
        seed=None,
        ledger=lambda number: device,
        users=site.users,
        number=site.number,
        together=together,
    )


def check_data(
    site: NodeSite, folder: Path, config: Config
) -> tuple[PrivacyPlan, functools.partial[Any], functools.partial[Any], bool]:
    """The plan, what makes the model, what gives access to the users' records, and `try_users`.

    A model that computes a user's update from other users' records is refused.
    """
    plan = agreed_plan(config)
    make_model = model_maker(config, site.input_shape, site.classes)
    check_report_size(config, sum(each.numel() for each in make_model().parameters()))
    load_users = _records(site, folder, config, plan)
    records = load_users()
    for user in range(site.users):
        _check_records(records, user, site)
    training = local_training(config)
    together = try_users(make_model, training, training.local_batch_size + 1)
    return plan, make_model, load_users, together


def check_work(
    site: NodeSite,
    plan: PrivacyPlan,
    make_model: functools.partial[Any],
    load_users: functools.partial[Any],
    together: bool,
) -> float:
    """How many seconds the updates of all users take here, of made-up records.

    The arguments are those that `check_data` has found. A window that is too short is refused.
    """
    window, shape = plan.window, load_users()(0)[0].shape[1:]
    assert window is not None
    training = local_training(load(site.config))
    about = site.users, window.most_records, tuple(shape)
    with closing(Worker(make_model, training, together, *about)) as worker:
        worker.check(window)
        return worker.seconds


def link_needed(
    site: NodeSite, config: Config, plan: PrivacyPlan, make_model: functools.partial[Any]
) -> float:
    """Mbit/s at which the users' reports leave within half of `grace`."""
    assert plan.window is not None
    dimension = sum(each.numel() for each in make_model().parameters())
    length = sealed_length(report_length(dimension), config.shuffler.sealing)
    return site.users * length * 8e-6 / (plan.window.grace / 2)


def agreed_plan(config: Config) -> PrivacyPlan:
    """The plan of a configuration in which everything has been decided (`shufl provision`)."""
    privacy = config.privacy
    check_cover(privacy.cover)
    undecided = {
        "data.users": config.data.users is None,
        "data.most_records": config.data.most_records is None,
        "window": config.window is None,
        "privacy.delta": privacy.delta == "1/n",
        **{f"privacy.{key}": True for key in privacy.open},
        "privacy.minimum_batch": privacy.minimum_batch is None,
        "privacy.least_present": privacy.least_present is None,
    }
    for key in undecided:
        if undecided[key]:
            raise ConfigError(f"{key} is left open: a node needs the file that provision has made")
    return plan_of(config)[1]


def _records(
    site: NodeSite, folder: Path, config: Config, plan: PrivacyPlan
) -> functools.partial[Any]:
    """What gives access to the users' records, mapped to features if there is a map."""
    data = config.data
    if site.data == "simulated":
        if site.first_user + site.users > plan.users:
            raise ConfigError(
                f"first_user + users must be at most {plan.users}, the plan's users, "
                f"got {site.first_user} + {site.users}"
            )
        return functools.partial(_simulated, records_loader(config, site.digest), site.first_user)
    own = functools.partial(_from_folder, folder / site.data)
    if ":" in site.data:
        own = functools.partial(find, "data", site.data, {})
    return own if data.features is None else functools.partial(_mapped, own, data.features)


def _simulated(load_users: Callable[[], UserRecords], first: int) -> UserRecords:
    records = load_users()
    return lambda user: records(first + user)


def _mapped(own: Callable[[], UserRecords], features: str) -> UserRecords:
    records = own()

    def mapped(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        raw, labels = records(user)
        if mistake := _mistake(raw, labels):
            raise ValueError(f"they {mistake}")
        return map_records(features, raw), labels

    return mapped


def _from_folder(folder: Path) -> UserRecords:
    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        with np.load(folder / f"{user}.npz") as arrays:
            return _tensor("features", arrays["features"]), _tensor("labels", arrays["labels"])

    return read


_CASTS: dict[str, tuple[type, str, str, int]] = {
    "features": (np.float32, "iuf", "whole numbers or floats", 2**24),
    "labels": (np.int64, "iu", "whole numbers", 2**63 - 1),
}
"""What each array of a file becomes, its kinds of numbers, and the largest whole one kept exact."""


def _tensor(name: str, array: np.ndarray) -> torch.Tensor:
    """An array of a file as a tensor.

    Raises:
        ValueError: it holds something else than numbers, or whole numbers that the cast changes.
    """
    dtype, kinds, allowed, most = _CASTS[name]
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} must be {allowed}, got {array.dtype}")
    exact = array.dtype.kind == "f" or not array.size
    if not exact and not -most <= int(array.min()) <= int(array.max()) <= most:
        raise ValueError(
            f"{name} must be whole numbers of at most {most}, got {array.min()} to {array.max()}: "
            f"{dtype.__name__} does not hold them"
        )
    with np.errstate(over="ignore"):  # what is infinite then is refused
        return torch.from_numpy(array.astype(dtype))


def _mistake(features: Any, labels: Any) -> str | None:
    """Why no model can be trained on these features and labels, whatever their shapes; or None."""
    if wrong := wrong_tensor(features, torch.float32):
        return f"must have features as {wrong}"
    if wrong := wrong_tensor(labels, torch.int64):
        return f"must have labels as {wrong}"
    return None if features.isfinite().all() else "must have finite features, got NaN or infinity"


def _check_records(records: UserRecords, user: int, site: NodeSite) -> None:
    """Refuses records that the model cannot be trained on, before any round."""
    try:
        features, labels = records(user)
        mistake = _mistake(features, labels)
    except READERS_ERRORS as error:
        raise ConfigError(
            f"data: the records of user {user} cannot be read: {one_line(error)}"
        ) from error
    if mistake:
        raise ConfigError(f"data: the records of user {user} {mistake}")
    found = tuple(features.shape), tuple(labels.shape)
    count = found[1][0] if len(found[1]) == 1 else 0
    if not count or found[0] != (count, *site.input_shape):
        raise ConfigError(
            f"data: the records of user {user} must be features of shape "
            f"(r, {', '.join(map(str, site.input_shape))}) and labels of shape (r,), r at least 1, "
            f"got {found[0]} and {found[1]}"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if not 0 <= lowest <= highest < site.classes:
        raise ConfigError(
            f"data: the labels of user {user} must lie in 0 to {site.classes - 1}, "
            f"got {lowest} to {highest}"
        )
