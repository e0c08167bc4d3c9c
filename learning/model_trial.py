"""Trials of your model before a run: a user's update must be a function of its own records.

What a forward changes in the module is put back before the next user (`ModuleState`). What it
changes elsewhere, in a class, a Python module or a cache, cannot be put back; neither can the state
of a generator that nobody seeds. So two processes compute the same users' updates, one of them in
the reverse order, and the updates are compared.
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shufl.learning import LocalTraining, ModuleState, as_keys, local_update, user_updates
from shufl.learning.code_digest import code_digest
from shufl.learning.config import TASKS
from shufl.learning.models import MODELS, ModelMaker, seeded
from shufl.learning.parameters import load_sent, sent
from shufl.learning.tasks import Form, load_task
from shufl.learning.your_code import CODE_ERRORS, one_line, your_code
from shufl.protocol.validation import ConfigError

_Users = list[tuple[torch.Tensor, torch.Tensor, int]]
_CALLS = 256  # the least number of records that are tried: a model may use late what it kept

_OTHER_PROCESS = """
import pickle, sys
from shufl.learning.your_code import make_importable
make_importable(pickle.load(sys.stdin.buffer))
trial, path = pickle.load(sys.stdin.buffer)
trial.write(path)
"""


def try_users(make_model: ModelMaker, training: LocalTraining, records: int) -> bool:
    """Refuses a model whose update for a user depends on other users.

    Args:
        make_model: builds the model.
        training: how users compute their updates.
        records: the most that a user has.

    Returns:
        Whether users computed together get the same updates as users computed one by one.

    Raises:
        ConfigError: the update depends on other users, or the model cannot be trained.
    """
    name, form = make_model.name, make_model.form
    if name in MODELS and form.task in TASKS and not (training.own or training.options):
        return True
    same = replace(make_model, seed=0, code="")
    code = code_digest((name, form.task, training.algorithm))
    return _try(pickle.dumps((same, training, records)), code)


@functools.lru_cache(maxsize=16)
def _try(given: bytes, code: str) -> bool:
    """`try_users` of its pickled arguments; `code` is the digest of your code behind them."""
    make_model, training, records = pickle.loads(given)
    name, form = make_model.name, make_model.form
    sizes = records, 1, records // 2 + 1, records
    with seeded(0), your_code(f"model {name} could not be trained on made-up records"):
        model = copy.deepcopy(make_model()).train()  # it is copied for every evaluation
        parameters = sent(model)
        features, labels = made_up(model, form, sum(sizes))
        _check_losses(model, form, features[:3], labels[:3])
        users = list(zip(features.split(sizes), labels.split(sizes), range(4), strict=True))
        for _ in range(max(1, _CALLS // sum(sizes))):
            forwards = _updates(model, training, users)
    trial = _Trial(make_model, parameters, training, users[::-1])
    backwards = trial.in_another_process()[::-1]
    for one, other in zip(forwards, backwards, strict=True):
        if not close(one, other, 1e-5):
            raise ConfigError(
                f"model {name} gives a user another update in another process, where other users "
                "came before: it must keep nothing outside itself (in its class, a global, a cache "
                "or a file), start the same in every process, and draw random numbers only from "
                "generators that torch.manual_seed, numpy.random.seed and random.seed set"
            )
    features, labels = map(torch.stack, list(zip(users[0], users[-1], strict=True))[:2])
    try:
        with seeded(0):
            return agrees_one_by_one(model, features, labels, training)
    except CODE_ERRORS:
        return False


def exact_float32() -> None:
    """Undoes two settings that your code may have made: matmul precision, TF32 in convolutions.

    TF32 has 10 bits of mantissa, bfloat16 has 7. With them a clipped sum could exceed its computed
    norm, and a user computed alone would differ from the same user computed with others.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _check_losses(
    model: nn.Module, form: Form, features: torch.Tensor, labels: torch.Tensor
) -> None:
    """Refuses a task in which a record's loss depends on other records."""
    loss, state = load_task(form.task).loss, ModuleState(model)
    with torch.no_grad():
        outputs = model(features.clone())
        state.restore()
        together = loss(outputs, labels)
        for place in range(len(labels)):
            own = tree_map_only(torch.Tensor, operator.itemgetter(slice(place, place + 1)), outputs)
            alone = loss(own, labels[place : place + 1])
            if not torch.allclose(alone, together[place], rtol=1e-4, atol=1e-6, equal_nan=True):
                raise ConfigError(
                    f"data.task {form.task} must give each record a loss of its own, got another "
                    "loss where other records are there"
                )


def made_up(model: nn.Module, form: Form, records: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up records for a model: random numbers of very different size, or tokens 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    shape = records, *form.label_shape
    if form.label_type == "int64":
        labels = torch.randint(form.outputs, shape, generator=generator)
    else:
        labels = torch.randn(shape, generator=generator)
    features = torch.randn(records, *form.input_shape, generator=generator)
    if form.input_type == "int64":
        return features.gt(0.0).long(), labels
    sizes = 10 ** (3 * torch.rand(records, generator=generator) - 2)
    features *= sizes.reshape(-1, *[1] * len(form.input_shape))
    state = ModuleState(model)
    try:
        with torch.no_grad():
            model(features.clone())
    except IndexError:
        features = features.gt(0.0).float()
    finally:
        state.restore()
    return features, labels


def agrees_one_by_one(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    sizes: np.ndarray | None = None,
) -> bool:
    """Whether `user_updates` gives these users what `local_update` does.

    Args:
        sizes: how many records of its row each user has, int of shape (k,). Default: all.

    Raises:
        RuntimeError: torch cannot vectorise the model, or it draws torch's random numbers.
    """
    exact_float32()
    seeds = np.arange(len(labels), dtype=np.uint64)
    real = None if sizes is None else torch.from_numpy(sizes)
    with warnings.catch_warnings():  # vmap warns of operations that it is slow for
        warnings.simplefilter("ignore", UserWarning)
        together = user_updates(model, features, labels, training, as_keys(seeds), real=real)
    ends = [None] * len(labels) if sizes is None else sizes.tolist()
    users = zip(features, labels, ends, seeds.tolist(), strict=True)
    alone = (local_update(model, x[:end], y[:end], training, seed) for x, y, end, seed in users)
    rows = [update.reshape(len(labels), -1) for update in together.values()]
    flat = torch.cat(rows, dim=1).numpy()
    return all(close(*pair, 1e-3) for pair in zip(flat, alone, strict=True))


def _updates(model: nn.Module, training: LocalTraining, users: _Users) -> list[np.ndarray]:
    """The updates of users, one after another, from each user's features, labels and seed."""
    exact_float32()
    state = ModuleState(model)
    return [local_update(model, x, y, training, seed, state) for x, y, seed in users]


@dataclass(frozen=True)
class _Trial:
    """What a new process needs to compute the updates of some users; picklable."""

    make_model: ModelMaker
    parameters: dict[str, torch.Tensor]
    training: LocalTraining
    users: _Users

    def in_another_process(self) -> list[np.ndarray]:
        """The users' updates, computed by a new process."""
        name = self.make_model.name
        with tempfile.TemporaryDirectory(prefix="shufl-") as folder:
            path = Path(folder, "updates")
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _OTHER_PROCESS],
                input=pickle.dumps(sys.path) + pickle.dumps((self, path)),
                capture_output=True,
            )
            if not path.exists():
                raise ConfigError(
                    f"model {name} could not be tried in a process of its own, which ended with "
                    f"{ended.returncode}: {ended.stderr.decode(errors='replace').strip()[-300:]}"
                ) from (ChildProcessError() if ended.returncode < 0 else None)
            updates: list[np.ndarray] | str = pickle.loads(path.read_bytes())
        if isinstance(updates, str):
            raise ConfigError(
                f"model {name} could not be trained in a process of its own: {updates}"
            )
        return updates

    def write(self, path: Path) -> None:
        """Writes the updates to a file, or why there are none."""
        try:
            model = self.make_model().train()
            load_sent(model, self.parameters)
            updates: list[np.ndarray] | str = _updates(model, self.training, self.users)
        except CODE_ERRORS as error:
            updates = one_line(error)
        path.write_bytes(pickle.dumps(updates))


def close(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Whether two updates differ by at most `tolerance` of their length; NaN equals NaN."""
    scale = np.linalg.norm(np.nan_to_num(one.astype(float)))
    return np.allclose(one, other, rtol=0, atol=tolerance * scale + 1e-12, equal_nan=True)
