"""The updates of a node's users, by one model object: at once where that pays, else one by one."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shufl.clients.module_state import ModuleState, StateError
from shufl.clients.settings import LocalTraining
from shufl.clients.update import as_keys, local_update, user_updates
from shufl.trained import dimension, load_sent, sent

log = logging.getLogger(__name__)

ERRORS = (Exception, SystemExit)
"""What a model or dataset may raise; the latter if it calls sys.exit()."""

Records = tuple[torch.Tensor, torch.Tensor]
"""A user's features and labels."""

_TOGETHER = 256  # records of users whose updates are computed at once, at most
_ALONE = 7  # so many at most are computed one by one: what vmap imports takes a second
_NUMBERS_TOGETHER = 2**22  # in their updates, and in their records, at most


def raised(error: BaseException) -> str:
    """The kind of an error and the line that raised it, for a log; its text may quote a record."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} ({Path(frame.f_code.co_filename).name}, line {line})"


class Work:
    """Computes updates; `together` says whether users may be computed at once."""

    def __init__(
        self, make_model: Callable[[], nn.Module], training: LocalTraining, together: bool
    ):
        self._make_model, self._training, self._together = make_model, training, together
        self.model = make_model()
        self.dimension = dimension(self.model)

    def load(self, parameters: dict[str, torch.Tensor]) -> None:
        """Begins with what a server has broadcast of its model."""
        load_sent(self.model, parameters)
        self.model.train()

    def most_at_once(self, features: torch.Tensor) -> int:
        """How many users with such records are a group, for reasons of memory."""
        size = max(self.dimension, features.numel())
        return max(1, min(_NUMBERS_TOGETHER // size, _TOGETHER // max(1, len(features))))

    def updates(
        self,
        records: Sequence[Records],
        seeds: np.ndarray,
        real: np.ndarray | None = None,
        begin: Callable[[list[int]], None] = lambda places: None,
    ) -> Iterator[np.ndarray | BaseException]:
        """The updates of a group, in order; in the place of one that fails, why.

        Args:
            records: of k users; equally many each.
            seeds: of their local training, uint64 of shape (k,).
            real: how many of each one's records count, int64 of shape (k,); left out: all.
            begin: is told the places of users, before their updates are computed.
        """
        if self._together and len(records) > _ALONE:
            begin(list(range(len(records))))
            try:
                updates = self._at_once(records, seeds, real)
            except ERRORS as error:  # above all: a model that draws random numbers
                self._renew(error)
                log.info("updates are computed one by one: %s", raised(error))
            else:
                yield from updates
                return
        counts = [None] * len(records) if real is None else real.tolist()
        state = ModuleState(self.model)
        for place, (each, seed, count) in enumerate(
            zip(records, seeds.tolist(), counts, strict=True)
        ):
            begin([place])
            update: np.ndarray | BaseException
            try:
                update = local_update(self.model, *each, self._training, seed, state, count)
            except ERRORS as error:
                update = error
                if self._renew(error):
                    state = ModuleState(self.model)
            yield update

    def _at_once(
        self, records: Sequence[Records], seeds: np.ndarray, real: np.ndarray | None
    ) -> np.ndarray:
        """`local_update` of users with equally many records, by vmap: shape (k, d)."""
        training = self._training
        features, labels = map(torch.stack, zip(*records, strict=True))
        counts = None if real is None else torch.from_numpy(real)
        with warnings.catch_warnings():  # of a vmap that is slow for one of the operations
            warnings.simplefilter("ignore", UserWarning)
            given = features, labels, training, as_keys(seeds)
            updates = user_updates(self.model, *given, real=counts)
        return torch.cat([each.flatten(1) for each in updates.values()], dim=1).numpy()

    def _renew(self, error: BaseException) -> bool:
        """Makes the model anew where it could not be put back, so that nobody else sees what is."""
        if not isinstance(error, StateError):
            return False
        parameters = {name: value.clone() for name, value in sent(self.model).items()}
        self.model = self._make_model()
        self.load(parameters)
        return True
