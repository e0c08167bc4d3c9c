"""The process of a deployed node: what its file says, made into the settings that it serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from shufl.accounting import PrivacyPlan
from shufl.clients import ClientSettings, load_device
from shufl.clients.worker import Worker
from shufl.deploy.sites import NodeSite, check_cover
from shufl.learning import UserRecords
from shufl.learning.config import Config, load
from shufl.learning.configured import (
    check_model_size,
    local_training,
    model_maker,
    plan_of,
    records_loader,
)
from shufl.learning.data.datasets import outside, wrong_tensor
from shufl.learning.data.features import map_records
from shufl.learning.data.files import RecordFile, tensor_of
from shufl.learning.data.users import spaced, where
from shufl.learning.section import READERS_ERRORS, ConfigError, find, one_line, readers_code
from shufl.learning.tasks import TYPES, Form
from shufl.learning.trained import dimension
from shufl.learning.trial import try_users
from shufl.shuffler import message_length

log = logging.getLogger(__name__)

_FILES = ".csv", ".parquet"


def node_settings(site: NodeSite, folder: Path) -> ClientSettings:
    """What the node, whose file is in `folder`, agrees to and has.

    Raises:
        ValueError: a mistake, found before any work.
    """
    config = load(site.config)
    plan, make_model, load_users = check_data(site, folder, config)
    log.info("%s", users_told(site, config))
    _ = site.credentials  # which are read again at every call: they are renewed meanwhile
    device = load_device(Path(site.device))
    return ClientSettings(
        run_id=None,
        plan=plan,
        make_model=make_model,
        load_users=load_users,
        training=local_training(config),
        shufflers=tuple((address, lambda: site.credentials) for address in site.shufflers),
        seed=None,
        ledger=lambda number: device,
        users=site.users,
        number=site.number,
        sealing=config.shuffler.sealing,
    )


def check_data(
    site: NodeSite, folder: Path, config: Config
) -> tuple[PrivacyPlan, functools.partial[Any], functools.partial[Any]]:
    """The plan, what makes the model, and what gives access to the users' records.

    A model that computes a user's update from other users' records is refused.
    """
    plan = agreed_plan(config)
    form = _form(site, config)
    make_model = model_maker(config, form)
    parameters = dimension(make_model())
    check_model_size(config, parameters)
    plan.check_dimension(parameters, site.users)
    load_users = _records(site, folder, config, plan)
    with readers_code("data: the records cannot be read", quote=()):
        records = load_users()
    for user in range(site.users):
        _check_records(records, user, form)
    training = local_training(config)
    try_users(make_model, training, training.local_batch_size + 1)
    return plan, make_model, functools.partial(_without_quotes, load_users)


def users_told(site: NodeSite, config: Config) -> str:
    """For how many people the node speaks, and what says so."""
    data, by = config.data, f"as {site.data} numbers them"
    if site.data == "simulated":
        by = data.users_by
    elif isinstance(data.dataset, RecordFile) and Path(site.data).suffix in _FILES:
        by = f"by column {data.dataset.user} of {site.data}"
    elif ":" not in site.data:
        by = f"by the files of {site.data}, each of which is taken for one person's"
    return f"{spaced(site.users)} users {by}"


def check_work(
    site: NodeSite,
    plan: PrivacyPlan,
    make_model: functools.partial[Any],
    load_users: functools.partial[Any],
) -> float:
    """How many seconds of a window the updates of all users need here.

    The arguments are those that `check_data` has found. Refused are a window that is too short, and
    records of which the model makes no update.
    """
    window, training = plan.window, local_training(load(site.config))
    assert window is not None
    records = load_users()
    about = site.users, window.most_records, records(0)
    with closing(Worker(make_model, training, *about)) as worker:
        worker.check(window)
        worker.fill(records)
        worker.check_records(window)
        return worker.needed


def _form(site: NodeSite, config: Config) -> Form:
    """What a record is made of; no Form's task is left out in a file that provision has made."""
    about = site.input_shape, site.outputs, site.input_type, site.label_shape, site.label_type
    return Form(*about, config.data.task or "classification")


def link_needed(
    site: NodeSite, config: Config, plan: PrivacyPlan, make_model: functools.partial[Any]
) -> float:
    """Mbit/s at which the users' reports leave within half of `grace`."""
    assert plan.window is not None
    length = message_length(dimension(make_model()), plan.mixing, config.shuffler.sealing)
    messages = 1 if plan.mixing == "sum" else site.users
    return messages * length * 8e-6 / (plan.window.grace / 2)


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
    types = site.input_type, site.label_type
    if data.features is not None:
        types = "float32", site.label_type
    own = functools.partial(_from_folder, folder / site.data, types)
    if Path(site.data).suffix in _FILES:
        if not isinstance(data.dataset, RecordFile):
            raise ConfigError(
                f"data {site.data}: the configuration must name its columns in [data.dataset], "
                f"got data.dataset {data.dataset}"
            )
        own = functools.partial(_from_file, folder / site.data, data.dataset, site.users)
    if ":" in site.data:
        own = functools.partial(find, "data", site.data, {})
    if data.features is None:
        return own
    return functools.partial(_mapped, own, data.features, site.label_type)


def _without_quotes(load_users: Callable[[], UserRecords]) -> UserRecords:
    """What gives the records that were checked before; if it fails now, its error quotes none."""
    failure = "data: the records cannot be read any more"
    with readers_code(failure, quote=()):
        records = load_users()

    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        with readers_code(failure, quote=()):
            return records(user)

    return read


def _simulated(load_users: Callable[[], UserRecords], first: int) -> UserRecords:
    records = load_users()
    return lambda user: records(first + user)


def _mapped(own: Callable[[], UserRecords], features: str, label_type: str) -> UserRecords:
    records = own()

    def mapped(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        raw, labels = records(user)
        if mistake := _mistake(raw, labels, "float32", label_type):
            raise ConfigError(f"they {mistake}")
        return map_records(features, raw), labels

    return mapped


def _from_file(path: Path, columns: RecordFile, users: int) -> UserRecords:
    """Gives the records of a CSV or Parquet file, by the order in which users appear in it."""
    features, labels, owners = columns.records_in(path)
    if (there := int(owners.max()) + 1) != users:
        raise ConfigError(f"users must be {there}, those of {path.name}, got {users}")
    if columns.mean is not None:
        features = features.float().sub_(torch.tensor(columns.mean))
        features = features.div_(torch.tensor(columns.std))

    order = owners.argsort(stable=True)
    rows = order.split(owners.bincount().tolist())

    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        return features[rows[user]], labels[rows[user]]

    return read


def _from_folder(folder: Path, types: tuple[str, str]) -> UserRecords:
    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            with np.load(folder / f"{user}.npz") as arrays:
                given = arrays["features"], arrays["labels"]
        except (ValueError, KeyError, EOFError, BadZipFile):
            raise ConfigError(
                f"{user}.npz must be made by np.savez, of arrays features and labels of numbers"
            ) from None
        features, labels = map(tensor_of, ("features", "labels"), given, types)
        return features, labels

    return read


def _mistake(features: Any, labels: Any, *types: str) -> str | None:
    """Why no model can be trained on these features and labels, whatever their shapes; or None."""
    for name, given, kind in zip(("features", "labels"), (features, labels), types, strict=True):
        if wrong := wrong_tensor(given, TYPES[kind]):
            return f"must have {name} as {wrong}"
        if at := where(~given.isfinite()):
            return f"must have finite {name}, got NaN or infinity {at}"
    return None


def _check_records(records: UserRecords, user: int, form: Form) -> None:
    """Refuses records that the model cannot be trained on, before any round."""
    try:
        features, labels = records(user)
        mistake = _mistake(features, labels, form.input_type, form.label_type)
    except READERS_ERRORS as error:
        why = one_line(error, quote=(ConfigError,))
        raise ConfigError(f"data: the records of user {user} cannot be read: {why}") from error
    if mistake:
        raise ConfigError(f"data: the records of user {user} {mistake}")
    found = tuple(features.shape), tuple(labels.shape)
    count = found[1][0] if found[1] else 0
    if not count or found != ((count, *form.input_shape), (count, *form.label_shape)):
        features_shape, labels_shape = (
            "(" + ", ".join(map(str, ("r", *shape))) + (")" if shape else ",)")
            for shape in (form.input_shape, form.label_shape)
        )
        raise ConfigError(
            f"data: the records of user {user} must be features of shape {features_shape} and "
            f"labels of shape {labels_shape}, r at least 1, got {found[0]} and {found[1]}"
        )
    if form.task not in ("classification", "next-token"):
        return
    if at := where(outside(labels, form.outputs, form.task)):
        raise ConfigError(
            f"data: the labels of user {user} must lie in 0 to {form.outputs - 1}, got others {at}"
        )
