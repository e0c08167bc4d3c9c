"""The users of one Flower node in one round: who checks in, and the reports they submit."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from flwr.app import ArrayRecord
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from shufl.accounting.mechanisms import Randomness, make_randomness
from shufl.accounting.plan import shuffler_of
from shufl.accounting.validation import Seconds
from shufl.clients.device import DeviceLedger, RoundRefused
from shufl.clients.module_state import ModuleState, StateError
from shufl.clients.settings import ClientSettings
from shufl.clients.update import local_update, record_orders, user_updates
from shufl.shuffler import (
    IntakeClient,
    RoundHeader,
    ShufflerError,
    Verdict,
    empty_report,
    encode_report,
    key_digest,
    model_digest,
    seal,
)

log = logging.getLogger(__name__)


_TOGETHER = 256  # records of users whose updates are computed at once, at most
_ALONE = 7  # so many at most are computed one by one: what vmap imports takes a second
_NUMBERS_TOGETHER = 2**22  # in their updates, and in their records, at most
_LEAST_SECONDS = 1.0  # to submit in, also where local work took as long as the round


_ERRORS = (Exception, SystemExit)  # the latter from a model or dataset that calls sys.exit()

_Records = tuple[torch.Tensor, torch.Tensor]
"""A user's features and labels."""


class ReportFailed(RuntimeError):
    """Computing or submitting a report failed; names the round, the user and the stage."""


_RunId = Annotated[str, Field(pattern="^[ -~]{1,256}$")]  # ASCII; no shuffler takes a longer one
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_LONGEST_KEY = 1216  # bytes: that of the post-quantum hybrid


class _Said:
    """What a server says. It is logged and kept, so its form and its length are checked."""

    _name = "round's announcement"

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads a record of a message.

        Raises:
            RoundRefused: a field is missing, unknown or not what it should be.
        """
        try:
            return cls(**fields)
        except (ValueError, TypeError):
            raise RoundRefused(f"the {cls._name} is malformed") from None


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Question(_Said):
    """What the server asks before the first round: whether a node agrees.

    Attributes:
    """

    _name = "run's announcement"

    run_id: _RunId
    plan_digest: _Digest


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Announcement(_Said):
    """What the server says of a round, beside the model.

    Attributes:
        round: the round's number, from 1.
        public_key: the server's, for this round.
        seconds: for how long the server waits for answers.
    """

    run_id: _RunId
    round: Annotated[int, Field(ge=0, lt=2**63)]
    plan_digest: _Digest
    public_key: Annotated[bytes, Field(max_length=_LONGEST_KEY)]
    seconds: Seconds


@dataclass(frozen=True)
class PreparedRound:
    """A round that was agreed to: its coins may be flipped, once.

    Attributes:
        header: what its reports are bound to.
        public_key: what they are sealed to.
        parameters: the model's, by name.
        until: when the server stops waiting, by `time.monotonic`.
    """

    header: RoundHeader
    public_key: bytes
    parameters: dict[str, torch.Tensor]
    until: float


class Node:
    """Holds what a process needs over many rounds: model, users' records, channels.

    Args:
        settings: the client's side of the run.
        randomness: draws coins and noise; left out, it is that of the settings' seed.

    Raises:
        ValueError: there is neither a seed nor a device's ledger.
    """

    def __init__(self, settings: ClientSettings, randomness: Randomness | None = None):
        if settings.seed is None and settings.ledger is None:
            raise ValueError("a client whose coins nobody can repeat needs a device's ledger")
        self.settings = settings
        self._plan_digest = settings.plan.digest()
        self._randomness = randomness or make_randomness(settings.seed)
        self._model = settings.make_model()
        self._dimension = sum(each.numel() for each in self._model.parameters())
        self._records = settings.load_users()
        self._ledgers: dict[int, DeviceLedger] = {}
        self._work = threading.Lock()  # a round may still be at work when the next one comes
        self._failures: dict[int, BaseException] = {}  # of work after an answer, by node
        self._alone = not settings.together  # updates cannot be computed together
        self._intakes = [IntakeClient(*shuffler) for shuffler in settings.shufflers]

    def close(self) -> None:
        """Closes the connections to the shufflers."""
        for intake in self._intakes:
            intake.close()

    @functools.cached_property
    def _last_round(self) -> int:
        """The last round within the budget by this client's own accountant, not the server's."""
        if self.settings.last_round is not None:
            return self.settings.last_round
        from shufl.accounting import rounds_within_budget  # a second of imports

        return rounds_within_budget(self.settings.plan)

    def agree(self, run_id: str, plan_digest: str) -> None:
        """Refuses a run or a plan that is not this client's.

        Raises:
            RoundRefused: it is another run or plan.
        """
        if self.settings.run_id not in (None, run_id):
            raise RoundRefused(f"run must be {self.settings.run_id}, got {run_id}")
        if plan_digest != self._plan_digest:
            raise RoundRefused(f"privacy plan must be {self._plan_digest}, got {plan_digest}")

    def prepare(self, announced: Announcement, model: ArrayRecord, node: int = 0) -> PreparedRound:
        """Agrees to a round, or refuses it. Depends on no coin and no data.

        The shuffler is asked what the server gave it for this round: so a server that shows nodes
        different keys or models is refused by all nodes but those who were shown the shuffler's.
        A round that is agreed to is in the device's ledger, on disk, when this returns.

        The number `node` decides this node's shuffler and its ledger.

        Raises:
            RoundRefused: another run or plan, a model that is not this client's, a key that nothing
                can be sealed to, a round beyond the budget, a shuffler that does not confirm all of
                it, or what the device's owner does not accept.
            ReportFailed: in simulation, when an earlier round failed after it was answered.
        """
        until = time.monotonic() + announced.seconds
        if node in self._failures:
            raise self._failures.pop(node)
        self.agree(announced.run_id, announced.plan_digest)
        parameters = self._parameters(model)
        header = RoundHeader(
            announced.run_id,
            announced.round,
            model_digest(parameters),
            self._plan_digest,
            key_digest(announced.public_key),
        )
        try:
            seal(b"", announced.public_key, header)
        except Exception as error:
            raise RoundRefused("the round's public key is not one to seal to") from error
        if not 1 <= header.round <= self._last_round:
            raise RoundRefused(
                f"round must lie in 1 to {self._last_round}, where the privacy budget ends, "
                f"got {header.round}"
            )
        try:
            confirmed = self._intakes[self.shuffler_of(node)].agree(header)
        except (ShufflerError, ValueError) as error:
            raise RoundRefused(f"the shuffler does not confirm the round: {error}") from None
        if confirmed is None:
            raise RoundRefused(
                "the shuffler was given another key, model or plan for this round than this node"
            )
        self._ask_owner(node, confirmed)
        return PreparedRound(confirmed, announced.public_key, parameters, until)

    def accept_run(self, run_id: str, node: int = 0) -> None:
        """Refuses a run of which the owner of a node's device accepts no round.

        Raises:
            RoundRefused: one constant line; why is in this node's log, for the owner alone.
        """
        try:
            ledger = self._ledger(node)
            if ledger is not None:
                ledger.check(run_id, self.settings.plan, self._last_round)
        except ValueError as error:
            log.warning("the run is refused: %s", error)
            raise RoundRefused("this device does not take part in this run") from None

    def _ask_owner(self, node: int, header: RoundHeader) -> None:
        """Enters a round in the device's ledger; why it is refused is for the owner alone."""
        try:
            ledger = self._ledger(node)
            if ledger is not None:
                ledger.offer(header, self.settings.plan, self._last_round)
        except ValueError as error:
            log.warning("round %d is refused: %s", header.round, error)
            raise RoundRefused("this device does not take part in this round") from None

    def _ledger(self, node: int) -> DeviceLedger | None:
        """The ledger of a node's device, opened once."""
        if node not in self._ledgers and self.settings.ledger is not None:
            self._ledgers[node] = self.settings.ledger(node)
        return self._ledgers.get(node)

    def take_part(self, users: np.ndarray, round: PreparedRound, node: int = 0) -> None:
        """Each user flips its coin; those who check in submit a sealed private report.

        Under a plan with cover the others submit an empty one.

        Whatever goes wrong from the coins on is logged on this node and not told to the server: an
        error only nodes with check-ins can have would tell who checked in. A user whose update
        cannot be computed sends a report all the same, of noise alone. With a numeric seed, so in
        simulation, a failing computation and a lost report are told. A round whose time is over
        before the one before it has ended is given up without a coin.

        `users` are the ids of this node's users, int of shape (u,). The number `node` decides where
        it submits.

        Raises:
            ReportFailed: in simulation, when computing a report failed, or one was lost.
        """
        number = round.header.round
        if not self._work.acquire(timeout=max(round.until - time.monotonic(), 0.0)):
            log.warning("round %d: no reports, an earlier round is still at work", number)
            return
        try:
            coins = self._randomness.check_ins(number, users, self.settings.plan.check_in_rate)
            self._model.load_state_dict(round.parameters)
            self._model.train()
            reports = self._sealed_reports(users, coins, round)
            intake = self._intakes[self.shuffler_of(node)]
            left = max(round.until - time.monotonic(), _LEAST_SECONDS)
            for verdict in intake.submit(round.header, reports, deadline=left):
                if verdict is not Verdict.ACCEPTED:
                    self._lost(f"round {number}: a report was rejected: {verdict.name}")
        except ShufflerError as error:
            lost = self._intakes[self.shuffler_of(node)].counts["LOST"]
            self._lost(f"round {number}: {lost} reports lost so far: {error}")
        except _ERRORS:
            if self.settings.seed is not None:
                raise
            log.exception("round %d: reports not submitted", number)
        finally:
            self._work.release()

    def take_part_later(self, users: np.ndarray, round: PreparedRound, node: int = 0) -> None:
        """Begins `take_part` in a thread; in simulation the next round tells how it failed."""

        def work() -> None:
            try:
                self.take_part(users, round, node)
            except _ERRORS as error:
                self._failures[node] = error

        threading.Thread(target=work, name=f"take_part {round.header.round}").start()

    def _parameters(self, model: ArrayRecord) -> dict[str, torch.Tensor]:
        """The broadcast parameters, if they are this client's model's by name, type and shape."""
        try:
            given: dict[str, torch.Tensor] = dict(model.to_torch_state_dict())
        except Exception as error:
            raise RoundRefused("the model received cannot be read") from error
        own = self._model.state_dict()
        if _shapes(given) != _shapes(own):
            raise RoundRefused("the model received has other parameters than this client's")
        return given

    def shuffler_of(self, node: int) -> int:
        """To which of the shufflers, numbered from 0, the users of a node report."""
        return shuffler_of(node, len(self._intakes))

    def _sealed_reports(
        self, users: np.ndarray, coins: np.ndarray, round: PreparedRound
    ) -> Iterator[tuple[int, bytes]]:
        """(user, sealed report) of every user who checked in, one at a time.

        With cover, of every user: the others do the same work, and send an empty report of it.
        """
        cover = self.settings.plan.cover
        if not cover:
            users, coins = users[coins], coins[coins]
        number = round.header.round
        reports = self._reports(users, number)
        for user, checked_in in zip(users.tolist(), coins.tolist(), strict=True):
            try:
                values = next(reports)
                payload = encode_report(values)
                if cover:  # both are made, whichever is sent
                    empty = empty_report(values.size)
                    payload = payload if checked_in else empty
                sealed = seal(payload, round.public_key, round.header)
            except _ERRORS as error:
                raise ReportFailed(
                    f"round {number}, user {user}: computing the report failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            yield user, sealed

    def _reports(self, users: np.ndarray, round: int) -> Iterator[np.ndarray]:
        """The users' reports, in order."""
        mechanism = self.settings.plan.mechanism
        for group in self._groups(users):
            together, records = np.array([user for user, _ in group]), [each for _, each in group]
            seeds = self._randomness.training_seeds(round, together)
            draws = mechanism.draws(self._dimension)
            noises = self._randomness.standard_normal(round, together, draws)
            for update, noise in zip(self._updates(records, seeds), noises, strict=True):
                yield mechanism.report(update, noise)

    def _groups(self, users: np.ndarray) -> Iterator[Sequence[tuple[int, _Records | None]]]:
        """Users with their records, in order, in groups whose updates can be computed at once.

        The users of a group have equally many records, and few enough for memory. One whose records
        cannot be loaded is alone, and has none.
        """
        group: list[tuple[int, _Records]] = []
        for user in users.tolist():
            try:
                features, _ = records = self._records(user)
                size = max(self._dimension, features.numel())
            except _ERRORS as error:
                if group:  # those before this one lose nothing
                    yield group
                    group = []
                self._failed(error)
                yield [(user, None)]
                continue
            fit = min(_NUMBERS_TOGETHER // size, _TOGETHER // max(1, len(features)))
            if group and (len(group) >= fit or group[0][1][0].shape != features.shape):
                yield group
                group = []
            group.append((user, records))
        if group:
            yield group

    def _failed(self, error: BaseException) -> None:
        """Notes that a user's update cannot be computed; it then counts as zero.

        On a real machine the user must report all the same, and those after it: whether a report is
        sent may not depend on anybody's records. In simulation the error is raised.
        """
        if self.settings.seed is not None:
            raise error
        log.warning("an update cannot be computed, and counts as zero: %s", error)

    def _lost(self, what: str) -> None:
        """Notes that a report is not in the batch; in simulation this is an error."""
        if self.settings.seed is not None:
            raise ReportFailed(what)
        log.warning("%s", what)

    def _updates(self, records: list[_Records | None], seeds: np.ndarray) -> Iterator[np.ndarray]:
        """The updates of users with these records: at once where that pays, else one by one.

        One that cannot be computed is zero; see `_failed`.
        """
        training = self.settings.training
        known = [each for each in records if each is not None]
        if len(known) == len(records) > _ALONE and not self._alone:
            try:
                together = self._updates_together(known, seeds)
            except _ERRORS as error:  # above all: a model with dropout
                self._replace(error)
                self._alone = True
                log.info("updates are computed one by one: %s", error)
            else:
                yield from together
                return
        state = ModuleState(self._model)
        for each, seed in zip(records, seeds.tolist(), strict=True):
            update = np.zeros(self._dimension, dtype=np.float32)
            if each is not None:
                try:
                    update = local_update(self._model, *each, training, seed, state)
                except _ERRORS as error:
                    self._failed(error)
                    if self._replace(error):
                        state = ModuleState(self._model)
            yield update

    def _replace(self, error: BaseException) -> bool:
        """Makes the model anew where it could not be put back, so that nobody else sees what is."""
        if not isinstance(error, StateError):
            return False
        parameters = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._model = self.settings.make_model().train()
        self._model.load_state_dict(parameters)
        return True

    def _updates_together(self, records: list[_Records], seeds: np.ndarray) -> np.ndarray:
        """`local_update` of users with equally many records, by vmap: shape (k, d)."""
        training = self.settings.training
        features, labels = map(torch.stack, zip(*records, strict=True))
        orders = None
        if training.algorithm != "fedsgd":
            orders = record_orders(seeds, training.local_epochs, labels.shape[1])
        with warnings.catch_warnings():  # of a vmap that is slow for one of the operations
            warnings.simplefilter("ignore", UserWarning)
            updates = user_updates(self._model, features, labels, training, orders).values()
        return torch.cat([each.flatten(1) for each in updates], dim=1).numpy()


def _shapes(parameters: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, value.dtype, value.shape) for name, value in parameters.items()]
