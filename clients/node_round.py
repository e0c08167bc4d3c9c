"""The users of one Flower node in one round: who checks in, and the reports they submit."""

from __future__ import annotations

import functools
import itertools
import logging
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import ArrayRecord
from pydantic import Field

from shufl.clients.device_ledger import RoundRefused, SimulatedLedger
from shufl.clients.policy import Simulated
from shufl.clients.settings import ClientSettings
from shufl.learning.node_updates import NodeUpdates, Records
from shufl.learning.parameters import frozen_digest, sent
from shufl.learning.your_code import CODE_ERRORS
from shufl.protocol.mechanisms import (
    Randomness,
    allocated,
    make_randomness,
    simulated_allocation_key,
)
from shufl.protocol.mechanisms.summed_reports import masked, new_seed, whole_noise, whole_update
from shufl.protocol.plan import Plan, shuffler_of
from shufl.protocol.validation import Record, Seconds
from shufl.shuffler import (
    Credentials,
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
from shufl.shuffler.wire.node_seeds import seal_seed
from shufl.shuffler.wire.sealing import is_of

log = logging.getLogger(__name__)


_LEAST_SECONDS = 1.0  # to submit in, also where local work took as long as the round


class ReportFailed(RuntimeError):
    """Computing or submitting a report failed; names the round, the user and the stage."""


_RunId = Annotated[str, Field(pattern="^[ -~]{1,256}$")]  # ASCII; no shuffler takes a longer one
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_LONGEST_KEY = 1216  # bytes: that of the post-quantum hybrid
_LONGEST_PLAN, _LONGEST_REFUSAL = 4096, 300  # characters


class _Said(Record):
    """What a server says. It is logged and kept, so its form and its length are checked."""

    about: ClassVar[str]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads a record of a message.

        Raises:
            RoundRefused: a field is missing, unknown or not what it should be.
        """
        try:
            return cls.model_validate(dict(fields))
        except ValueError:
            raise RoundRefused(f"the {cls.about}'s announcement is malformed") from None


class Question(_Said):
    """What the server asks before the first round: whether a node agrees.

    Attributes:
        plan: the server's, as JSON; where it is another than the node's, its keys are named.
        frozen: the `frozen_digest` of the server's model.
    """

    about: ClassVar[str] = "run"

    run_id: _RunId
    plan_digest: _Digest
    plan: Annotated[str, Field(max_length=_LONGEST_PLAN)] = ""
    frozen: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""


class Announcement(_Said):
    """What the server says of a round, beside the model.

    Attributes:
        round: the round's number; one below 1 is refused before any work.
        public_key: the server's, for this round.
        seconds: for how long the server waits for answers.
    """

    about: ClassVar[str] = "round"

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
        until: when it is over, by `time.monotonic`.
    """

    header: RoundHeader
    public_key: bytes
    parameters: dict[str, torch.Tensor]
    until: float


class Node:
    """A simulated node. It holds what a process needs over many rounds: model, records, channels.

    Args:
        settings: the client's side of the run.
        randomness: draws coins and noise. Default: that of the settings' seed.
    """

    def __init__(self, settings: ClientSettings, randomness: Randomness | None = None):
        self.settings, self._policy = settings, settings.policy
        self._plan_digest = settings.plan.digest()
        self._randomness = randomness or make_randomness(self._policy.seed)
        self._work = NodeUpdates(settings.make_model, settings.training, self._policy.together)
        self._records = settings.load_users()
        self._ledgers: dict[int, SimulatedLedger | None] = {}
        self._intakes = [
            IntakeClient(address, credentials) for address, credentials in settings.shufflers
        ]

    def close(self) -> None:
        """Closes the connections to the shufflers."""
        for intake in self._intakes:
            intake.close()

    @functools.cached_property
    def _last_round(self) -> int:
        return self._policy.last_round(self.settings.plan)

    @functools.cached_property
    def _frozen(self) -> str:
        return frozen_digest(self._work.model)

    def agree(self, run_id: str, plan_digest: str, plan: str = "") -> None:
        """Refuses a run or a plan that is not this client's.

        The server is told which keys of the `plan`, its own as JSON, differ from this client's.

        Raises:
            RoundRefused: it is another run or plan.
        """
        if self._policy.run_id not in (None, run_id):
            raise RoundRefused(f"run must be {self._policy.run_id}, got {run_id}")
        if plan_digest != self._plan_digest:
            told = f"privacy plan must be {self._plan_digest[:12]}, got {plan_digest[:12]}"
            with suppress(ValueError):  # where the server says no plan
                server = Plan.from_json(plan)
                told += f": {self.settings.plan.differs(server, 'at the node', 'at the server')}"
            raise RoundRefused(textwrap.shorten(told, _LONGEST_REFUSAL, placeholder=" …"))

    def check_frozen(self, digest: str) -> None:
        """Refuses a run of a model whose frozen parameters are others than this client's.

        Raises:
            RoundRefused: they are.
        """
        if digest != (own := self._frozen):
            raise RoundRefused(f"frozen parameters must be {own or 'none'}, got {digest or 'none'}")

    def prepare(self, announced: Announcement, model: ArrayRecord, node: int = 0) -> PreparedRound:
        """Agrees to a round, or refuses it. Depends on no coin and no data.

        The shuffler is asked which key and model the server gave it for this round. If the server
        shows nodes different ones, only nodes that were shown the shuffler's take part.
        A round that is agreed to is in the device's ledger, on disk, when this returns.

        The number `node` decides this node's shuffler and its ledger.

        Raises:
            RoundRefused: another run or plan, a model that is not this client's, a key that nothing
                can be sealed to, or of another suite than this client's, a round beyond the budget,
                a shuffler that does not confirm all of it, or what the device's owner does not
                accept.
        """
        until = time.monotonic() + announced.seconds
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
        suite = self.settings.sealing
        if not is_of(announced.public_key, suite):
            raise RoundRefused(f"the round's public key must be one of {suite}")
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
        header, window_ends = confirmed
        round = PreparedRound(
            header, announced.public_key, parameters, self._over_at(until, window_ends)
        )
        # The last step: the round is on disk when this returns.
        plan, what = self.settings.plan, f"round {header.round}"
        self._ask_owner(node, what, lambda each: each.offer(header, plan, self._last_round))
        return round

    def _over_at(self, until: float, window_ends: float) -> float:
        """When a round is over. A simulation has no window, so the server says it."""
        return until

    def accept_run(self, run_id: str, node: int = 0) -> None:
        """Refuses a run if the owner of the node's device would accept none of its rounds.

        Raises:
            RoundRefused: one constant line; the reason is in this node's log, for the owner alone.
        """
        plan, what = self.settings.plan, f"run {run_id}"
        self._ask_owner(node, what, lambda each: each.check(run_id, plan, self._last_round))

    def _ask_owner(self, node: int, what: str, ask: Callable[[SimulatedLedger], None]) -> None:
        """Asks a device's ledger, if there is one; why it refuses is for the owner alone."""
        try:
            if (ledger := self._ledger(node)) is not None:
                ask(ledger)
        except ValueError as error:
            log.warning("%s is refused: %s", what, error)
            kind = what.partition(" ")[0]
            raise RoundRefused(f"this device does not take part in this {kind}") from None

    def _ledger(self, node: int) -> SimulatedLedger | None:
        """The ledger of a node's device, opened once."""
        if node not in self._ledgers:
            ledger = self._policy.ledger(node)
            if ledger is None and self._policy.seed is None:  # a repeated offer would get new coins
                raise ValueError("a client without a seed needs a device's ledger")
            self._ledgers[node] = ledger
        return self._ledgers[node]

    def take_part(self, users: np.ndarray, round: PreparedRound, node: int = 0) -> None:
        """Users who check in, or drew this round, submit a sealed private report.

        Under a plan with cover the other users submit an empty report. With sums the node sends one
        message for all its users.

        `users` are the ids of this node's users, evenly spaced, int of shape (u,). The number
        `node` decides where it submits.

        Raises:
            ReportFailed: computing a report failed, or one was lost.
        """
        number = round.header.round
        coins = self._coins(users, round, node)
        self._work.load(round.parameters)
        if self.settings.plan.mixing == "sum":
            groups = self._updates(users[coins], number)
            updates = itertools.chain.from_iterable(each for _, each in groups)
            reports: Iterable[tuple[int | range, bytes]] = [self._message(users, updates, round)]
        else:
            reports = self._sealed_reports(users, coins, round)
        intake = self._intakes[self.shuffler_of(node)]
        left = max(round.until - time.monotonic(), _LEAST_SECONDS)
        try:
            for verdict in intake.submit(round.header, reports, deadline=left):
                if verdict is not Verdict.ACCEPTED:
                    raise ReportFailed(f"round {number}: a report was rejected: {verdict.name}")
        except ShufflerError as error:
            raise ReportFailed(f"round {number}: reports are lost: {error}") from error

    def _coins(self, users: np.ndarray, round: PreparedRound, node: int) -> np.ndarray:
        """Whether each user reports in a round: by coins, or as a node's device has drawn it."""
        plan, number = self.settings.plan, round.header.round
        if plan.participation == "check-in":
            return self._randomness.check_ins(number, users, plan.check_in_rate)
        if self._policy.seed is not None:
            key = simulated_allocation_key(self._policy.seed)
        else:
            ledger = self._ledger(node)
            assert ledger is not None  # without a seed there is one
            key = ledger.allocation_key(round.header.run_id)
        return allocated(key, number, users, plan.every)

    def _parameters(self, model: ArrayRecord) -> dict[str, torch.Tensor]:
        """The broadcast parameters, if they are this client's model's by name, type and shape."""
        try:
            given: dict[str, torch.Tensor] = dict(model.to_torch_state_dict())
        except Exception as error:
            raise RoundRefused("the model received cannot be read") from error
        own = sent(self._work.model)
        if _shapes(given) != _shapes(own):
            raise RoundRefused("the model received has other parameters than this client's")
        return given

    def shuffler_of(self, node: int) -> int:
        """To which of the shufflers, numbered from 0, the users of a node report."""
        return shuffler_of(node, len(self._intakes))

    def _sealed_reports(
        self, users: np.ndarray, coins: np.ndarray, round: PreparedRound
    ) -> Iterator[tuple[int | range, bytes]]:
        """(user, sealed report) of every user who sends, one at a time."""
        if not self.settings.plan.cover:
            users, coins = users[coins], coins[coins]
        reports = self._reports(users, round.header.round)
        for user, values, checked_in in zip(users.tolist(), reports, coins.tolist(), strict=True):
            yield user, self._sealed(values, checked_in, round)

    def _sealed(self, values: np.ndarray, checked_in: bool, round: PreparedRound) -> bytes:
        """A user's report; with cover an empty one of a user who did not check in."""
        report, empty = encode_report(values), empty_report(values.size)  # whichever is sent
        return seal(report if checked_in else empty, round.public_key, round.header)

    @property
    def _signer(self) -> Credentials | None:
        """Who signs this node's seeds: nobody does in a simulation."""
        if isinstance(self._policy, Simulated):
            return None
        return self._intakes[self.shuffler_of(self._policy.number)].credentials

    def _message(
        self, users: np.ndarray, updates: Iterable[np.ndarray], round: PreparedRound
    ) -> tuple[range, bytes]:
        """With sums: a node's one message for all its users, which adds up these `updates`."""
        plan, dimension, number = self.settings.plan, self._work.dimension, round.header.round
        (draws,) = self._randomness.standard_normal(number, users[:1], dimension)
        whole = whole_noise(draws, plan.mechanism.noise_multiplier, len(users))
        for update in updates:
            whole += whole_update(update, plan.mechanism.clip_norm)
        seed = new_seed()
        sealed = seal_seed(seed, len(users), round.public_key, round.header, self._signer)
        message = masked(whole, seed) + sealed
        step = int(users[1] - users[0]) if len(users) > 1 else 1
        return range(int(users[0]), int(users[-1]) + 1, step), message

    def _reports(self, users: np.ndarray, round: int) -> Iterator[np.ndarray]:
        """The users' reports, in order."""
        mechanism = self.settings.plan.mechanism
        draws = mechanism.draws(self._work.dimension)
        for together, updates in self._updates(users, round):
            noises = self._randomness.standard_normal(round, together, draws)
            for update, noise in zip(updates, noises, strict=True):
                yield mechanism.report(update, noise)

    def _updates(
        self, users: np.ndarray, round: int
    ) -> Iterator[tuple[np.ndarray, Iterator[np.ndarray]]]:
        """The users' updates, in order: of some at once, with their ids."""
        for group in self._groups(users, round):
            together, records = np.array([user for user, _ in group]), [each for _, each in group]
            seeds = self._randomness.training_seeds(round, together)
            yield together, _sound(round, together, self._work.updates(records, seeds))

    def _groups(self, users: np.ndarray, round: int) -> Iterator[list[tuple[int, Records]]]:
        """Users with their records, in order, in groups whose updates can be computed at once.

        The users of a group have equally many records, and few enough for memory.
        """
        group: list[tuple[int, Records]] = []
        for user in users.tolist():
            try:
                features, _ = records = self._records(user)
            except CODE_ERRORS as error:
                raise _failed(round, user, error) from error
            most = self._work.most_at_once(features)
            if group and (len(group) >= most or group[0][1][0].shape != features.shape):
                yield group
                group = []
            group.append((user, records))
        if group:
            yield group


def _sound(
    round: int, users: np.ndarray, updates: Iterable[np.ndarray | BaseException]
) -> Iterator[np.ndarray]:
    for user, update in zip(users.tolist(), updates, strict=True):
        if isinstance(update, BaseException):
            raise _failed(round, user, update) from update
        yield update


def _failed(round: int, user: int, error: BaseException) -> ReportFailed:
    why = f"{type(error).__name__}: {error}"
    return ReportFailed(f"round {round}, user {user}: computing the report failed: {why}")


def _shapes(parameters: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, value.dtype, value.shape) for name, value in parameters.items()]
