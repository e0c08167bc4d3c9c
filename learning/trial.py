"""Trials of a reader's model before a run: a user's update must be a function of its own records.

What a forward leaves in the module is put back before the next user (`ModuleState`).
What it leaves elsewhere, in a class, a Python module or a cache, cannot be put back. Nor can the
next number of a generator that nobody seeds. Both show when the same users' updates are computed in
two processes, in one of them in the reverse order.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shufl.learning import LocalTraining, ModuleState, as_keys, local_update, user_updates
from shufl.learning.models import MODELS, build_model, seeded
from shufl.learning.names import TASKS
from shufl.learning.own_code import code_digest
from shufl.learning.section import READERS_ERRORS, ConfigError, one_line, readers_code
from shufl.learning.tasks import Form, load_task
from shufl.learning.trained import load_sent, sent

_Users = list[tuple[torch.Tensor, torch.Tensor, int]]
_Given = tuple[Callable[[], nn.Module], dict[str, torch.Tensor], LocalTraining, _Users]
_CALLS = 256  # records that are tried at least: a model may use only later what it keeps

_OTHER_PROCESS = """
import pickle, sys
from shufl.learning.section import make_importable
from shufl.learning.trial import _write_updates
make_importable(pickle.load(sys.stdin.buffer))
_write_updates(*pickle.load(sys.stdin.buffer))
"""


def try_users(
    make_model: functools.partial[nn.Module], training: LocalTraining, records: int
) -> bool:
    """Refuses a model whose update for a user depends on other users.

    Returns whether computing users together gives the same updates as computing one by one.

    `make_model` is `build_model` with its arguments; `records` is the most that a user has.
    """
    name, form, _, options, *_ = make_model.args
    if name in MODELS and form.task in TASKS and not (training.own or training.options):
        return True
    same = functools.partial(build_model, name, form, 0, options)
    code = code_digest((name, form.task, training.algorithm))
    return _try(pickle.dumps((same, training, records)), code)


@functools.lru_cache(maxsize=16)
def _try(given: bytes, code: str) -> bool:
    """`code` is the digest of what the names in `given` stand for."""
    make_model, training, records = pickle.loads(given)
    name, form, *_ = make_model.args
    sizes = records, 1, records // 2 + 1, records
    with seeded(0), readers_code(f"model {name} could not be trained on made-up records"):
        model = copy.deepcopy(make_model()).train()  # it is copied for every evaluation
        parameters = sent(model)
        features, labels = made_up(model, form, sum(sizes))
        _check_losses(model, form, features[:3], labels[:3])
        users = list(zip(features.split(sizes), labels.split(sizes), range(4), strict=True))
        for _ in range(max(1, _CALLS // sum(sizes))):
            forwards = _updates(model, training, users)
    backwards = _in_another_process(name, (make_model, parameters, training, users[::-1]))[::-1]
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
    except READERS_ERRORS:
        return False


def exact_float32() -> None:
    """Undoes what a reader's code may have set: a lower matmul precision, TF32 in convolutions.

    With 10 or 7 bits of mantissa (TF32, bfloat16) a clipped sum could exceed its computed norm by
    as much, and a user computed alone differs from the same user computed with others.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _check_losses(
    model: nn.Module, form: Form, features: torch.Tensor, labels: torch.Tensor
) -> None:
    """Refuses a task in which a record's loss is not its own."""
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
    """Records that a model takes: random numbers of very different size, or tokens 0 and 1."""
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
        sizes: how many of its records each user has; all, where it is None.

    Raises:
        RuntimeError: torch cannot vectorise the model, or it draws torch's random numbers.
    """
    exact_float32()
    seeds = np.arange(len(labels), dtype=np.uint64)
    real = None if sizes is None else torch.from_numpy(sizes)
    given = model, features, labels, training, as_keys(seeds)
    with warnings.catch_warnings():  # of a vmap that is slow for one of the operations
        warnings.simplefilter("ignore", UserWarning)
        together = user_updates(*given, real=real).values()
    ends = [None] * len(labels) if sizes is None else sizes.tolist()
    users = zip(features, labels, ends, seeds.tolist(), strict=True)
    alone = (local_update(model, x[:end], y[:end], training, seed) for x, y, end, seed in users)
    flat = torch.cat([update.reshape(len(labels), -1) for update in together], dim=1).numpy()
    return all(close(*pair, 1e-3) for pair in zip(flat, alone, strict=True))


def _updates(model: nn.Module, training: LocalTraining, users: _Users) -> list[np.ndarray]:
    """The updates of users, one after another: of each its features, labels and seed."""
    exact_float32()
    state = ModuleState(model)
    return [local_update(model, x, y, training, seed, state) for x, y, seed in users]


def _in_another_process(name: str, given: _Given) -> list[np.ndarray]:
    """`_updates`, where nobody's was computed before."""
    with tempfile.TemporaryDirectory(prefix="shufl-") as folder:
        path = Path(folder, "updates")
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _OTHER_PROCESS],
            input=pickle.dumps(sys.path) + pickle.dumps((path, given)),
            capture_output=True,
        )
        if not path.exists():
            raise ConfigError(
                f"model {name} could not be tried in a process of its own, which ended with "
                f"{ended.returncode}: {ended.stderr.decode(errors='replace').strip()[-300:]}"
            )
        updates: list[np.ndarray] | str = pickle.loads(path.read_bytes())
    if isinstance(updates, str):
        raise ConfigError(f"model {name} could not be trained in a process of its own: {updates}")
    return updates


def _write_updates(path: Path, given: _Given) -> None:
    try:
        make_model, parameters, training, users = given
        model = make_model().train()
        load_sent(model, parameters)
        updates: list[np.ndarray] | str = _updates(model, training, users)
    except READERS_ERRORS as error:
        updates = one_line(error)
    path.write_bytes(pickle.dumps(updates))


def close(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Whether two updates differ by this part of their length at most; NaN equals NaN."""
    scale = np.linalg.norm(np.nan_to_num(one.astype(float)))
    return np.allclose(one, other, rtol=0, atol=tolerance * scale + 1e-12, equal_nan=True)
