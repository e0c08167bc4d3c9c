"""A deployed node: its timetable in a round, which does not depend on its users' records."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from shufl.clients.device_ledger import DeviceLedger, RoundRefused
from shufl.clients.node_round import Node, PreparedRound
from shufl.clients.policy import Deployed
from shufl.clients.settings import ClientSettings
from shufl.clients.worker import DONE, FAILED, Worker
from shufl.protocol.mechanisms import Randomness
from shufl.protocol.mechanisms.summed_reports import SEED_BYTES
from shufl.shuffler import RoundHeader, ShufflerError, generate_key_pair
from shufl.shuffler.wire.node_seeds import seal_seed

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


class Clock:
    """Says when it is, and waits; tests have others."""

    def now(self) -> float:
        """Seconds, as `time.monotonic`."""
        return time.monotonic()

    def wait(self, until: float, over: threading.Event) -> bool:
        """Returns at that moment, or as soon as `over` is set: then True."""
        return over.wait(max(0.0, until - self.now()))


class DeviceNode(Node):
    """A deployed node, whose updates a child process computes.

    A round's moments are those of the plan's window, counted from when the shuffler opened it. For
    every user the same work is done and one report is sent, whatever became of its update and its
    coin. Whatever goes wrong after a round was agreed to is in this node's log alone.

    Args:
        settings: of a deployed node, with a plan that has cover and a window.
        randomness, clock: for tests.

    Raises:
        ValueError: the settings are others, the work does not fit into the window, or it cannot be
            done; names a user with whose records it cannot.
    """

    def __init__(
        self,
        settings: ClientSettings,
        randomness: Randomness | None = None,
        clock: Clock | None = None,
    ):
        policy, plan, window = settings.policy, settings.plan, settings.plan.window
        if not (isinstance(policy, Deployed) and isinstance(policy.device, DeviceLedger)):
            raise ValueError("a deployed node needs a ledger with the limits of the device's owner")
        if window is None or not plan.cover:
            raise ValueError("a deployed node needs a plan with cover and a window")
        super().__init__(settings, randomness)
        plan.check_dimension(self._work.dimension, policy.users)  # settings may come from anywhere
        if plan.mixing == "sum":  # refuses a key with which no seed can be signed
            header = RoundHeader("", 0, "", "", "")
            seal_seed(bytes(SEED_BYTES), 1, generate_key_pair()[1], header, self._signer)
        self.policy, self.window, self.clock = policy, window, clock or Clock()
        self.round: PreparedRound | None = None
        self._playing: threading.Thread | None = None
        self._over, self._beginning = threading.Event(), threading.Lock()
        self._worker = Worker(
            settings.make_model,
            settings.training,
            policy.users,
            window.most_records,
            self._records(0),
        )
        try:
            more = self._worker.load(self._records, window)
        except BaseException:
            self._worker.close()
            raise
        del self._records
        log.info("%d users, at most %d rounds of this plan", policy.users, self._last_round)
        if more:
            told = "%d of %d users have more than the %d records (data.most_records) that are used"
            log.warning(told, more, policy.users, window.most_records)

    def finish(self, at_once: threading.Event) -> None:
        """Returns when no round is under way any more, or as soon as `at_once` is set."""
        while self._playing and self._playing.is_alive() and not at_once.is_set():
            self._playing.join(_LOOK_SECONDS)

    def close(self) -> None:
        """Ends the child and what is under way."""
        self._over.set()
        self._worker.close()
        super().close()

    def _over_at(self, until: float, window_ends: float) -> float:
        left = window_ends - self.clock.now()
        if not left <= self.window.seconds:
            raise RoundRefused(f"the shuffler says that {left:g} s are left of this round's window")
        if left - self.window.seconds + self.window.work_until < self._worker.seconds:
            raise RoundRefused("too little of the round's window is left for this node's work")
        return window_ends

    def take_part(self, users: np.ndarray, round: PreparedRound, node: int = 0) -> None:
        """Begins a round, which ends an older one that is still under way, and returns at once."""
        over = threading.Event()
        playing = threading.Thread(
            target=self._play,
            args=(users, round, over, node),
            name=f"round {round.header.round}",
            daemon=True,
        )
        with self._beginning:  # gRPC's threads may begin two at once
            self._over.set()
            self._over, self.round = over, round
            playing.start()
            self._playing = playing

    def _play(
        self, users: np.ndarray, round: PreparedRound, over: threading.Event, node: int
    ) -> None:
        number, opened = round.header.round, round.until - self.window.seconds
        intake, verdicts = self._intakes[self.shuffler_of(node)], Counter[str]()
        try:
            seeds = self._randomness.training_seeds(number, users)
            left = opened + self.window.work_until - self.clock.now()
            try:
                failed = self._worker.compute(round.parameters, seeds, left, over)
                for user, why in [*failed.items()][:1]:  # one line, however many there are
                    told = "%d of the updates cannot be computed, and count as zero; user %d: %s"
                    log.warning(told, len(failed), user, why)
            except Exception:  # users without an update report noise alone
                log.exception("round %d: not all updates are computed", number)
            first = opened + self.window.send_after
            reports = self._reports_in_time(users, first, round, over, node)
            left = max(round.until - self.clock.now(), 1e-3)
            for verdict in intake.submit(round.header, reports, deadline=left):
                verdicts[verdict.name] += 1
        except ShufflerError as error:
            log.warning("round %d: not all reports were submitted: %s", number, error)
        except Exception:
            log.exception("round %d: not all reports were submitted", number)
        if verdicts["WRONG_LENGTH"]:
            log.warning("round %d: node and server must have the same version of shufl", number)
        done, failures = ((self._worker.states == each).sum() for each in (DONE, FAILED))
        answers = ", ".join(f"{count} {name}" for name, count in verdicts.items()) or "none"
        told = "round %d: of %d users %d updates are done and %d failed; reports: %s"
        log.info(told, number, len(users), done, failures, answers)

    def _reports_in_time(
        self,
        users: np.ndarray,
        first: float,
        round: PreparedRound,
        over: threading.Event,
        node: int,
    ) -> Iterator[tuple[int | range, bytes]]:
        """(user, sealed report) of every user, each made when it is sent; with sums one message.

        All reports leave together: a stream open for the whole spread would keep other nodes out.
        """
        plan, number = self.settings.plan, round.header.round
        draws = plan.mechanism.draws(self._work.dimension)
        coins = self._coins(users, round, node)
        over_spread = secrets.SystemRandom().uniform(0.0, self.window.send_spread)
        if plan.mixing == "sum":
            kept = zip(users.tolist(), coins.astype(np.float32), strict=True)
            updates = (self._worker.update(user) * coin for user, coin in kept)
            message = self._message(users, updates, round)
            if not self.clock.wait(first + over_spread, over):
                yield message
            return
        for place, user in enumerate(users.tolist()):
            if self.clock.wait(first + over_spread, over):
                return
            (noise,) = self._randomness.standard_normal(number, users[[place]], draws)
            values = plan.mechanism.report(self._worker.update(user), noise)
            yield user, self._sealed(values, bool(coins[place]), round)
