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

from shufl.learning.local_training import LocalTraining
from shufl.learning.module_state import ModuleState
from shufl.learning.trained import dimension, load_sent, sent
from shufl.learning.update import as_keys, local_update, user_updates

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
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return type(error).__name__ + place


class Work:
    """Computes updates; `together` says whether users may be computed at once."""

    def __init__(
        self, make_model: Callable[[], nn.Module], training: LocalTraining, together: bool
    ):
        self._make_model, self._training, self._together = make_model, training, together
        self.model = make_model()
        self.dimension = dimension(self.model)
        self._state: ModuleState | None = None  # of the round's model
        self._broken = False  # whether an error may have left the model as it should not be

    def load(self, parameters: dict[str, torch.Tensor]) -> None:
        """Begins with what a server has broadcast of its model."""
        self._mend()
        load_sent(self.model, parameters)
        self.model.train()
        self._state = None

    def most_at_once(self, features: torch.Tensor) -> int:
        """How many users with such records are a group, for reasons of memory."""
        size = max(self.dimension, features.numel())
        return max(1, min(_NUMBERS_TOGETHER // size, _TOGETHER // max(1, len(features))))

    def alone(self, records: Records, seed: int, real: int | None = None) -> np.ndarray:
        """One user's update; the arguments are those of `local_update`.

        Whatever this raises, the next user finds the model as this one found it: it is put back
        before the next update, which may be in another thread.
        """
        self._mend()
        state, self._broken = self._before(), True
        update = local_update(self.model, *records, self._training, seed, state, real)
        self._broken = False
        return update

    def updates(
        self, records: Sequence[Records], seeds: np.ndarray
    ) -> Iterator[np.ndarray | BaseException]:
        """The updates of a group, in order; in the place of one that fails, why.

        Args:
            records: of k users; equally many each.
            seeds: of their local training, uint64 of shape (k,).
        """
        if self._together and len(records) > _ALONE:
            try:
                updates = self._at_once(records, seeds)
            except ERRORS as error:  # above all: a model that draws random numbers
                self._broken = True
                log.info("updates are computed one by one: %s", raised(error))
            else:
                yield from updates
                return
        for each, seed in zip(records, seeds.tolist(), strict=True):
            update: np.ndarray | BaseException
            try:
                update = self.alone(each, seed)
            except ERRORS as error:
                update = error
            yield update

    def _at_once(self, records: Sequence[Records], seeds: np.ndarray) -> np.ndarray:
        """`local_update` of users with equally many records, by vmap: shape (k, d)."""
        self._before()
        features, labels = map(torch.stack, zip(*records, strict=True))
        with warnings.catch_warnings():  # of a vmap that is slow for one of the operations
            warnings.simplefilter("ignore", UserWarning)
            given = features, labels, self._training, as_keys(seeds)
            updates = user_updates(self.model, *given)
        return torch.cat([each.flatten(1) for each in updates.values()], dim=1).numpy()

    def _before(self) -> ModuleState:
        """What the model holds before anybody's update."""
        if self._state is None:
            self._parameters = {name: value.clone() for name, value in sent(self.model).items()}
            self._state = ModuleState(self.model)
        return self._state

    def _mend(self) -> None:
        """Puts the model back after an error, or else makes it anew."""
        if not self._broken:
            return
        self._broken = False
        try:
            if self._state is not None:
                self._state.restore()
        except Exception:  # putting the model back may raise anything
            del self.model  # so that nobody sees what is in it, if no other can be made
            self.model = self._make_model()
            self.load(self._parameters)
