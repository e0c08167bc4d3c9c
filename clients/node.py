"""The users of one Flower node in one round: who checks in, and the reports they submit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import numpy as np
from flwr.app import ArrayRecord

from accounting import rounds_within_budget
from accounting.mechanisms import Randomness, make_randomness
from clients.settings import ClientSettings
from clients.update import local_update
from shuffler import (
    IntakeClient,
    RoundHeader,
    ShufflerError,
    Verdict,
    encode_report,
    key_digest,
    model_version,
    seal,
)

log = logging.getLogger(__name__)


class RoundRefused(ValueError):
    """The announced round is not one this client agreed to; nobody's coin was flipped."""


class ReportFailed(RuntimeError):
    """Computing a report failed; names the round, the user and the stage."""


class Node:
    """Holds what a process needs over many rounds: model, users' records, channels.

    Args:
        settings: the client's side of the run.
        randomness: draws coins and noise; left out, it is that of the settings' seed.
    """

    def __init__(self, settings: ClientSettings, randomness: Randomness | None = None):
        self.settings = settings
        self._plan_digest = settings.plan.digest()
        self._randomness = randomness or make_randomness(settings.seed)
        self._model = settings.make_model()
        self._records = settings.load_users()
        self._intakes = [IntakeClient(*shuffler) for shuffler in settings.shufflers]

    @functools.cached_property
    def _last_round(self) -> int:
        """The last round within the budget by this client's own accountant, not the server's."""
        return rounds_within_budget(self.settings.plan)

    def agree(self, header: RoundHeader) -> None:
        """Refuses a run or a plan that is not this client's.

        Raises:
            RoundRefused: the header names another run or plan.
        """
        if header.run_id != self.settings.run_id:
            raise RoundRefused(f"run must be {self.settings.run_id}, got {header.run_id}")
        if header.plan_digest != self._plan_digest:
            raise RoundRefused(
                f"privacy plan must be {self._plan_digest}, got {header.plan_digest}"
            )

    def check(
        self, header: RoundHeader, model: ArrayRecord, public_key: bytes, answered: int
    ) -> None:
        """Refuses a round that is not this client's to answer. Depends on no coin and no data.

        Args:
            header: the announced round.
            model: the broadcast model.
            public_key: the server's key for this round.
            answered: the last round this node answered, 0 before the first.

        Raises:
            RoundRefused: another run or plan, a model or a key other than the header names, a key
                that nothing can be sealed to, a round already answered, or one beyond the budget.
        """
        self.agree(header)
        if header.model_version != model_version(array.data for array in model.values()):
            raise RoundRefused("the model received is not the one that the round's header names")
        try:
            seal(b"", public_key, header)
        except Exception as error:
            raise RoundRefused("the round's public key is not one to seal to") from error
        if header.key_digest != key_digest(public_key):
            raise RoundRefused("the key received is not the one that the round's header names")
        if header.round <= answered:
            raise RoundRefused(
                f"round must be above {answered}, the last answered, got {header.round}"
            )
        if header.round > self._last_round:
            raise RoundRefused(
                f"round must be at most {self._last_round}, where the privacy budget ends, "
                f"got {header.round}"
            )

    def take_part(
        self,
        users: np.ndarray,
        header: RoundHeader,
        model: ArrayRecord,
        public_key: bytes,
        node: int = 0,
    ) -> None:
        """Each user flips its coin; those who check in submit a sealed private report.

        Whatever goes wrong from the coins on is logged on this node and not told to the server: an
        error only nodes with check-ins can have would tell who checked in. In simulation a failing
        computation is told, since it would otherwise be hard to find.

        Args:
            users: ids of this node's users, int of shape (u,).
            header: the checked round.
            model: the broadcast model.
            public_key: the server's key for this round.
            node: this node's number, which decides where it submits.

        Raises:
            ReportFailed: in simulation, when computing a report failed.
        """
        rate = self.settings.plan.check_in_rate
        try:
            coins = self._randomness.check_ins(header.round, users, rate)
            self._model.load_state_dict(model.to_torch_state_dict())
            self._model.train()
            reports = self._sealed_reports(users[coins], header, public_key)
            intake = self._intakes[self.shuffler_of(node)]
            for verdict in intake.submit(header, reports):
                if verdict is not Verdict.ACCEPTED:
                    log.warning("round %d: a report was rejected: %s", header.round, verdict.name)
        except ShufflerError as error:
            log.warning("round %d: reports not submitted: %s", header.round, error)
        except Exception:
            if self.settings.seed is not None:
                raise
            log.exception("round %d: reports not submitted", header.round)

    def shuffler_of(self, node: int) -> int:
        """To which of the shufflers, numbered from 0, the users of a node report."""
        return node % len(self._intakes)

    def _sealed_reports(
        self, users: np.ndarray, header: RoundHeader, public_key: bytes
    ) -> Iterator[tuple[int, bytes]]:
        """(user, sealed report) of every user in `users`, one at a time."""
        for user in users.tolist():
            try:
                sealed = seal(encode_report(self._report(user, header.round)), public_key, header)
            except Exception as error:
                raise ReportFailed(
                    f"round {header.round}, user {user}: computing the report failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            yield user, sealed

    def _report(self, user: int, round: int) -> np.ndarray:
        """One user's report."""
        features, labels = self._records(user)
        alone = np.array([user])
        (seed,) = self._randomness.training_seeds(round, alone).tolist()
        update = local_update(self._model, features, labels, self.settings.training, seed)
        (noise,) = self._randomness.standard_normal(round, alone, update.size)
        return self.settings.plan.mechanism.report(update, noise)
