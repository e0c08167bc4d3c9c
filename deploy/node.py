"""The process of a deployed node: what its file says, made into the settings that it serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import torch

from shufl.accounting import PrivacyPlan
from shufl.clients import ClientSettings, Deployed, load_device
from shufl.clients.worker import Worker
from shufl.deploy.site_files import NodeSite, check_cover
from shufl.learning import LocalTraining, UserRecords
from shufl.learning.config import Config, load
from shufl.learning.data.files import RecordFile, tensor_of
from shufl.learning.data.person_ids import spaced, where
from shufl.learning.from_config import check_model_size, local_training, model_maker, plan_of
from shufl.learning.model_trial import try_users
from shufl.learning.models import ModelMaker
from shufl.learning.parameters import dimension
from shufl.learning.tasks import TYPES, Form, outside, wrong_tensor
from shufl.learning.your_code import CODE_ERRORS, find, one_line, your_code
from shufl.protocol.validation import ConfigError
from shufl.shuffler import message_length

log = logging.getLogger(__name__)

_FILES = ".csv", ".parquet"

LoadRecords = Callable[[], UserRecords]
"""Gives access to the records of a node's users."""


class RecordsAway(ConfigError):
    """The owner's code gives no records now: it raised an error."""


def node_settings(site: NodeSite, folder: Path) -> ClientSettings:
    """What the node, whose file is in `folder`, agrees to and has.

    Raises:
        ValueError: a mistake, found before any work.
    """
    work = NodeWork.checked(site, folder)
    log.info("%s", users_told(site, work.config))
    _ = site.credentials  # which are read again at every call: they are renewed meanwhile
    return ClientSettings(
        policy=Deployed(
            number=site.number, users=site.users, device=load_device(Path(site.device))
        ),
        plan=work.plan,
        make_model=work.make_model,
        load_users=work.load_users,
        training=work.training,
        shufflers=tuple((address, lambda: site.credentials) for address in site.shufflers),
        sealing=work.config.shuffler.sealing,
    )


@dataclass(frozen=True)
class NodeWork:
    """What a node's work needs, by its file and its configuration.

    Attributes:
        plan: agreed to.
        make_model: builds the model.
        load_users: gives access to the users' records.
        training: of one user.
    """

    site: NodeSite
    config: Config
    plan: PrivacyPlan
    make_model: ModelMaker
    load_users: LoadRecords
    training: LocalTraining

    @classmethod
    def checked(cls, site: NodeSite, folder: Path) -> Self:
        """Loads the model and all records, and refuses those that do not fit.

        A model that computes a user's update from other users' records is refused.

        Raises:
            ValueError: one line.
        """
        config = load(site.config)
        plan = agreed_plan(config)
        records_form = site.model_dump(include={each.name for each in fields(Form)})
        form = Form(**records_form, task=config.data.task or "classification")
        make_model = model_maker(config, form)
        parameters = dimension(make_model())
        check_model_size(config, parameters)
        plan.check_dimension(parameters, site.users)
        load_users = _records(site, folder, config, plan)
        with your_code("data: the records cannot be read", quote=()):
            records = load_users()
        for user in range(site.users):
            _check_records(records, user, form)
        training = local_training(config)
        try_users(make_model, training, training.local_batch_size + 1)
        unquoted = functools.partial(_without_quotes, load_users)
        return cls(site, config, plan, make_model, unquoted, training)

    def seconds(self) -> float:
        """How many seconds of a window the updates of all users need here.

        Raises:
            ValueError: the window is too short, or the model makes no update of some records.
        """
        window, records = self.plan.window, self.load_users()
        assert window is not None
        worker = Worker(
            self.make_model, self.training, self.site.users, window.most_records, records(0)
        )
        with closing(worker):
            worker.load(records, window)
            return worker.needed

    def link(self) -> float:
        """Mbit/s at which the users' reports leave within half of `grace`."""
        plan, sealing = self.plan, self.config.shuffler.sealing
        assert plan.window is not None
        length = message_length(dimension(self.make_model()), plan.mixing, sealing)
        messages = 1 if plan.mixing == "sum" else self.site.users
        return messages * length * 8e-6 / (plan.window.grace / 2)


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
    for key, is_open in undecided.items():
        if is_open:
            raise ConfigError(f"{key} is left open: a node needs the file that provision has made")
    return plan_of(config)[1]


def _records(site: NodeSite, folder: Path, config: Config, plan: PrivacyPlan) -> LoadRecords:
    """What gives access to the users' records, mapped to features if there is a map."""
    data, path = config.data, folder / site.data
    own: functools.partial[UserRecords]
    if site.data == "simulated":
        if site.first_user + site.users > plan.users:
            raise ConfigError(
                f"first_user + users must be at most {plan.users}, the plan's users, "
                f"got {site.first_user} + {site.users}"
            )
        # Not at the top: a node whose records come from a file deals none.
        from shufl.learning.data.partition import load_users

        everybody = functools.partial(load_users, data, config.data_seed, site.digest)
        return functools.partial(_simulated, everybody, site.first_user)
    if ":" in site.data:
        own = functools.partial(_from_code, site.data)
    elif path.suffix in _FILES:
        if not isinstance(data.dataset, RecordFile):
            raise ConfigError(
                f"data {site.data}: the configuration must name its columns in [data.dataset], "
                f"got data.dataset {data.dataset}"
            )
        own = functools.partial(_from_file, path, data.dataset, site.users)
    else:
        input_type = site.input_type if data.features is None else "float32"
        own = functools.partial(_from_folder, path, (input_type, site.label_type))
    if data.features is None:
        return own
    return functools.partial(_mapped, own, data.features, site.label_type)


def _without_quotes(load_users: LoadRecords) -> UserRecords:
    """What gives the records that were checked before; if it fails now, its error quotes none."""
    failure = "data: the records cannot be read any more"
    with your_code(failure, quote=()):
        records = load_users()

    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        with your_code(failure, quote=()):
            return records(user)

    return read


def _simulated(load_users: LoadRecords, first: int) -> UserRecords:
    records = load_users()
    return lambda user: records(first + user)


def _mapped(own: LoadRecords, features: str, label_type: str) -> UserRecords:
    from shufl.learning.data.features import map_records

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
    order = owners.argsort(stable=True)
    rows = order.split(owners.bincount().tolist())

    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        return features[rows[user]], labels[rows[user]]

    return read


def _from_code(name: str) -> UserRecords:
    """Gives the records that the owner's code gives."""
    records = find("data", name, {})

    def read(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            given: tuple[torch.Tensor, torch.Tensor] = records(user)
        except ConfigError:
            raise
        except CODE_ERRORS as error:
            raise RecordsAway(f"{name} raised {one_line(error, quote=())}") from error
        return given

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
    except CODE_ERRORS as error:
        why = one_line(error, quote=(ConfigError,))
        raise ConfigError(f"data: the records of user {user} cannot be read: {why}") from error
    if mistake:
        raise ConfigError(f"data: the records of user {user} {mistake}")
    found = tuple(features.shape), tuple(labels.shape)
    count = found[1][0] if found[1] else 0
    if not count or found != ((count, *form.input_shape), (count, *form.label_shape)):
        features_shape, labels_shape = (
            str(("r", *shape)).replace("'", "") for shape in (form.input_shape, form.label_shape)
        )
        raise ConfigError(
            f"data: the records of user {user} must be features of shape {features_shape} and "
            f"labels of shape {labels_shape}, r at least 1, got {found[0]} and {found[1]}"
        )
    of_classes = form.task in ("classification", "next-token")
    if of_classes and (at := where(outside(labels, form.outputs, form.task))):
        raise ConfigError(
            f"data: the labels of user {user} must lie in 0 to {form.outputs - 1}, got others {at}"
        )
