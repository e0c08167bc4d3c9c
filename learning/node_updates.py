"""The updates of a node's users, by one model object: together where that pays, or one by one."""

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
from shufl.learning.parameters import dimension, load_sent, sent
from shufl.learning.user_update import as_keys, local_update, user_updates
from shufl.learning.your_code import CODE_ERRORS

log = logging.getLogger(__name__)

Records = tuple[torch.Tensor, torch.Tensor]
"""A user's features and labels."""

_TOGETHER = 256  # most records of a group of users whose updates are computed together
_ALONE = 7  # groups of at most this many users are computed one by one: to import vmap is slow
_NUMBERS_TOGETHER = 2**22  # most numbers in the updates, or in the records, of a group


def lacks_memory(error: BaseException) -> bool:
    """Whether it is Python's error of too little memory, or says what torch's does."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def raised(error: BaseException) -> str:
    """The kind of an error and the line that raised it, for a log: its text may quote a record."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return ("MemoryError" if lacks_memory(error) else type(error).__name__) + place


class NodeUpdates:
    """Computes the updates of a node's users; `together` is what `try_users` returned."""

    def __init__(
        self, make_model: Callable[[], nn.Module], training: LocalTraining, together: bool
    ):
        self._make_model, self._training, self._together = make_model, training, together
        self.model = make_model()
        self.dimension = dimension(self.model)
        self._state: ModuleState | None = None  # of the round's model, once it was needed
        self._broken = False  # whether an error may have left the model as it should not be

    def load(self, parameters: dict[str, torch.Tensor]) -> None:
        """Loads the parameters that a server has broadcast."""
        self._mend()
        load_sent(self.model, parameters)
        self.model.train()
        self._state = None

    def most_at_once(self, features: torch.Tensor) -> int:
        """How many users with records of this shape fit into memory as one group."""
        size = max(self.dimension, features.numel())
        return max(1, min(_NUMBERS_TOGETHER // size, _TOGETHER // max(1, len(features))))

    def alone(self, records: Records, seed: int, real: int | None = None) -> np.ndarray:
        """One user's update: float32 of shape (d,). For the arguments see `local_update`.

        If this raises an error, the model is put back before the next update, which may be in
        another thread.
        """
        self._mend()
        state, self._broken = self._before(), True
        features, labels = records
        update = local_update(self.model, features, labels, self._training, seed, state, real)
        self._broken = False
        return update

    def updates(
        self, records: Sequence[Records], seeds: np.ndarray
    ) -> Iterator[np.ndarray | BaseException]:
        """The updates of a group, in order; for an update that failed, its error.

        Args:
            records: of k users, who have equally many records.
            seeds: of their local training, uint64 of shape (k,).
        """
        if self._together and len(records) > _ALONE:
            try:
                updates = self._at_once(records, seeds)
            except CODE_ERRORS as error:  # for example, the model draws random numbers
                self._broken = True
                log.info("updates are computed one by one: %s", raised(error))
            else:
                yield from updates
                return
        for each, seed in zip(records, seeds.tolist(), strict=True):
            update: np.ndarray | BaseException
            try:
                update = self.alone(each, seed)
            except CODE_ERRORS as error:
                update = error
            yield update

    def _at_once(self, records: Sequence[Records], seeds: np.ndarray) -> np.ndarray:
        """`local_update` of users with equally many records, by vmap: shape (k, d)."""
        self._before()
        features, labels = map(torch.stack, zip(*records, strict=True))
        with warnings.catch_warnings():  # vmap warns of operations that it is slow for
            warnings.simplefilter("ignore", UserWarning)
            updates = user_updates(self.model, features, labels, self._training, as_keys(seeds))
        return torch.cat([each.flatten(1) for each in updates.values()], dim=1).numpy()

    def _before(self) -> ModuleState:
        """What the model holds before any update of the round."""
        if self._state is None:
            self._parameters = {name: value.clone() for name, value in sent(self.model).items()}
            self._state = ModuleState(self.model)
        return self._state

    def _mend(self) -> None:
        """Puts the model back after an error; builds it anew if it cannot be put back."""
        if not self._broken:
            return
        self._broken = False
        try:
            if self._state is not None:
                self._state.restore()
        except Exception:  # putting the model back may raise anything
            del self.model  # if no other can be made, nobody sees what this one holds
            self.model = self._make_model()
            self.load(self._parameters)
