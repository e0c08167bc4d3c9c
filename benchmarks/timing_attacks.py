"""Can the server or the network tell a user with 20 records from one with 2000 by times alone?

    python benchmarks/timing_attacks.py
    python benchmarks/timing_attacks.py --rounds 4   # a smoke test

A real shuffler, and a real device process with one user under a plan with cover and a window.
Before each round a secret coin decides whether the user has few records or many. Another decides
whether the server closes the round before reports are sent, or when its window is over. Reports are
sent without a spread. The attackers:

    early close   the server counts the release: does what is in it depend on when it closed?
    closed        when the shuffler answers the closing, counted from the opening of the round.
    answer        how long the device takes to answer the round's message.
    probe         how long it takes to answer a query while its work goes on.
    arrival       when the report passes the network, counted from the opening of the round.
    sending       the same, counted from the round's message.

Each attacker compares what it sees when a coin fell heads with what it sees when it fell tails, by
the rank test of Mann and Whitney. The exit status is 1 if an attacker finds a difference. Without
any leak that happens in at most one of a thousand calls.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from scipy import stats

from shufl.accounting import PrivacyPlan
from shufl.clients import ClientSettings, Deployed, deployed_node, load_device, serve_device, worker
from shufl.clients.worker import Worker
from shufl.learning import LocalTraining, UserRecords
from shufl.learning.models import ModelMaker
from shufl.learning.tasks import Form
from shufl.protocol import GaussianMechanism
from shufl.protocol.mechanisms import most_blankets
from shufl.protocol.plan import Window
from shufl.shuffler import (
    ControlClient,
    Credentials,
    Outcome,
    ShufflerProcess,
    generate_key_pair,
    model_digest,
    report_length,
    sealed_length,
)
from shufl.vendor_internals import records_to_message

RECORDS = {"few": 20, "many": 2000}
SHAPE, CLASSES, BLANKETS = (1, 28, 28), 10, 5.0
FALSE_ALARMS = 1e-3  # of all attackers together, at most
_MOST_REFUSED = 100  # rounds of a call
make_model = ModelMaker("mlp", Form(SHAPE, CLASSES), 0, {"hidden": 256})


def load_users() -> UserRecords:
    """Users with many records; user 0's are exchanged."""
    most = max(RECORDS.values())
    features = torch.rand(most, *SHAPE, generator=torch.Generator().manual_seed(1))
    return lambda user: (features, torch.zeros(most, dtype=torch.int64))


def serve(
    folder: Path, plan: PrivacyPlan, address: str, own: Credentials, changes: Connection
) -> None:
    """The process of the device, which is told how many records its user has."""
    limits = 'ledger = "device.db"\nmost_epsilon = 1e9\ndelta = 1e-5\naccountant = "local"\n'
    (folder / "device.toml").write_text(limits)
    settings = ClientSettings(
        policy=Deployed(number=0, users=1, device=load_device(folder / "device.toml")),
        plan=plan,
        make_model=make_model,
        load_users=load_users,
        training=LocalTraining(),
        shufflers=((address, own),),
        sealing="x25519",
    )
    made: list[Worker] = []

    class Changing(Worker):
        def fill(self, records: UserRecords) -> int:
            made.append(self)
            return super().fill(records)

    def change() -> None:
        whole = load_users()(0)
        while True:
            count = changes.recv()
            own = tuple(each[:count] for each in whole)
            made[-1].fill(lambda user, own=own: own)
            changes.send(None)

    deployed_node.Worker = Changing
    own = "grpc", "flwr.app", "scipy.stats", "shufl.learning.models", worker.__name__
    worker._PROCESSES.set_forkserver_preload([*own])  # a child imports this file too
    threading.Thread(target=change, daemon=True).start()
    never = threading.Event()
    serve_device(settings, folder / "node.sock", never, never)


class Wire:
    """What the network sees: when a device's bytes pass on their way to the shuffler."""

    def __init__(self, address: str):
        host, port = address.rsplit(":", 1)
        self._to = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.passed: list[tuple[float, int]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self._server.accept()
            shuffler = socket.create_connection(self._to)
            for pair in ((device, shuffler, self.passed), (shuffler, device, [])):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, passed: list) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                passed.append((time.monotonic(), len(data)))
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


class Attack:
    """The server's side of the rounds, and what it and the network see of each."""

    def __init__(self, plan: PrivacyPlan, control: ControlClient, wire: Wire, calls: tuple):
        self._plan, self._control, self._wire, self._calls = plan, control, wire, calls
        self._state = make_model().state_dict()
        self._window = plan.window
        self._round = self._refused = 0
        dimension = sum(each.numel() for each in self._state.values())
        length = sealed_length(report_length(dimension))
        control.create_run("timing", plan.to_json().encode(), length)

    def play(self, early: bool) -> dict[str, float]:
        """What one round of the device shows; `early`: the server tries to close it before."""
        self._round += 1
        _, public_key = generate_key_pair()
        about = {"run_id": "timing", "plan_digest": self._plan.digest()}
        opened = time.monotonic()
        digest = model_digest(self._state)
        self._control.open_round("timing", self._round, digest, public_key)
        round = about | {"round": self._round, "public_key": public_key, "seconds": 60.0}
        model = ArrayRecord(self._state)
        message = serialised({"model": model, "round": ConfigRecord(round)})
        train, query = self._calls
        began = time.monotonic()
        try:
            train(message, timeout=60)
        except grpc.RpcError:  # before any coin: on a busy machine too little of the window is left
            self._control.end_round("timing", self._round)
            self._refused += 1
            if self._refused > _MOST_REFUSED:
                print(f"timing_attacks.py: {self._refused} rounds refused: raise --work-until")
                sys.exit(2)
            return self.play(early)
        answered = time.monotonic()
        query(serialised({"round": ConfigRecord(about)}), timeout=60)
        probed = time.monotonic()
        window = self._window
        cut = secrets.SystemRandom().uniform(0.0, window.send_after) if early else window.seconds
        time.sleep(max(0.0, opened + cut - time.monotonic()))
        outcome = self._control.close_round("timing", self._round).outcome
        closed = time.monotonic()
        released = 0
        if outcome is Outcome.RELEASABLE:
            released = len(list(self._control.release("timing", self._round)))
        time.sleep(max(0.0, opened + window.seconds + 0.2 - time.monotonic()))
        self._control.end_round("timing", self._round)
        sent = [at for at, size in self._wire.passed if at > opened and size > 2**12]
        return {
            "early close": float(released > most_blankets(BLANKETS)),
            "closed": closed - opened,
            "answer": answered - began,
            "probe": probed - answered,
            "arrival": min(sent, default=math.inf) - opened,
            "sending": min(sent, default=math.inf) - began,
        }


def serialised(content: dict) -> bytes:
    return records_to_message(RecordDict(content)).SerializeToString()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--work-until", type=float, default=4.0)
    options = parser.parse_args()
    window = Window(
        work_until=options.work_until,
        send_after=options.work_until + 0.1,
        send_spread=0.0,
        grace=0.5,
        answer_every=0.05,
        query_every=0.05,
        most_records=max(RECORDS.values()),
    )
    plan = PrivacyPlan(
        users=1,
        check_in_rate=0.5,
        mechanism=GaussianMechanism(noise_multiplier=2.0),
        rounds=10_000,
        delta=1e-5,
        target_epsilon=1e9,
        minimum_batch=1,
        shuffler_blankets=BLANKETS,
        cover=True,
        least_present=1,
        accountant="local",
        window=window,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shufl-")))
        process = stack.enter_context(ShufflerProcess(folder / "shuffler"))
        control = stack.enter_context(ControlClient(process.address, process.control))
        wire = Wire(process.address)
        ours, theirs = multiprocessing.Pipe()
        about = folder, plan, wire.address, process.submit, theirs
        device = multiprocessing.get_context("spawn").Process(target=serve, args=about)
        device.start()
        stack.callback(device.join)
        stack.callback(device.terminate)
        while not (folder / "node.sock").exists():
            if not device.is_alive():
                return 2  # it has said why
            time.sleep(0.1)
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{folder}/node.sock"))
        calls = tuple(channel.unary_unary(f"/shufl.Device/{kind}") for kind in ("train", "query"))
        attack = Attack(plan, control, wire, calls)
        attack.play(False)  # connects
        seen = []
        for _ in range(options.rounds):
            who, early = secrets.choice([*RECORDS]), secrets.choice([False, True])
            ours.send(RECORDS[who])
            ours.recv()
            seen.append((who, early, attack.play(early)))
    if not any(shown["early close"] for *_, shown in seen):
        print("timing_attacks.py: no report came, so that no attacker could see any")
        return 2
    leaks = [found(attacker, seen) for attacker in seen[0][2]]
    return int(any(leaks))


def found(attacker: str, seen: list) -> bool:
    """Whether an attacker sees a difference; prints what it sees."""
    sides: dict[str, list[float]] = {}
    for who, early, shown in seen:
        side = ("early" if early else "late") if attacker == "early close" else who
        sides.setdefault(side, []).append(shown[attacker])
    if len(sides) < 2:
        chance = 1.0
    else:
        chance = float(stats.mannwhitneyu(*sides.values(), method="asymptotic").pvalue)
    leaks = chance < FALSE_ALARMS / len(seen[0][2])
    medians = "  ".join(f"{side} {np.median(each):.4f}" for side, each in sorted(sides.items()))
    print(f"{attacker:12} {'LEAK' if leaks else 'none':5} by chance {chance:.2g}  {medians}")
    return leaks


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main())
