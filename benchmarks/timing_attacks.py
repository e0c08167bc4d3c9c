"""Does the server or the network tell a user of 20 records from one of 2000 by moments alone?

    python benchmarks/timing_attacks.py
    python benchmarks/timing_attacks.py --learn 2 --rounds 2   # a smoke test

A real shuffler, and two real device processes with one user each under a plan with cover and a
window: one user has few records, the other many. Each round is one of the two devices', by a secret
coin. Reports are sent without a spread. The attackers:

    early close   the server closes the round at some moment of its window and counts the release:
                  was the report in by then?
    answer        how long the device takes to answer the round's message.
    probe         how long it takes to answer a query while its work goes on.
    arrival       when the report passes the network, counted from the opening of the round.

Each attacker first sees rounds of which it knows whose they are, and then guesses whichever of the
two means is nearer. It fails if one of them is right more often than chance is in one of a thousand
tries: more than 124 of 200 times.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from shufl.accounting import GaussianMechanism, PrivacyPlan
from shufl.accounting.mechanisms import most_blankets
from shufl.accounting.plan import Window
from shufl.clients import ClientSettings, LocalTraining, load_device, serve_device
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
from shufl.simulator.models import build_model
from shufl.simulator.tasks import Form

RECORDS = {"few": 20, "many": 2000}
SHAPE, CLASSES, BLANKETS = (1, 28, 28), 10, 5.0
make_model = functools.partial(build_model, "mlp", Form(SHAPE, CLASSES), 0, {"hidden": 256})


def load_users(records: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(records, *SHAPE, generator=generator)
    return lambda user: (features, torch.zeros(records, dtype=torch.int64))


def serve(folder: Path, plan: PrivacyPlan, address: str, own: Credentials, records: int) -> None:
    """The process of one device."""
    limits = 'ledger = "device.db"\nmost_epsilon = 1e9\ndelta = 1e-5\naccountant = "local"\n'
    (folder / "device.toml").write_text(limits)
    settings = ClientSettings(
        run_id=None,
        plan=plan,
        make_model=make_model,
        load_users=functools.partial(load_users, records),
        training=LocalTraining(),
        shufflers=((address, own),),
        seed=None,
        ledger=lambda number: load_device(folder / "device.toml"),
        users=1,
    )
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

    def __init__(self, plan: PrivacyPlan, control: ControlClient, wire: Wire, calls: dict):
        self._plan, self._control, self._wire, self._calls = plan, control, wire, calls
        self._state = make_model().state_dict()
        self._window = plan.window
        self._round = 0
        dimension = sum(each.numel() for each in self._state.values())
        length = sealed_length(report_length(dimension))
        control.create_run("timing", plan.to_json().encode(), length)

    def play(self, who: str) -> dict[str, float]:
        """What one round of a device shows."""
        self._round += 1
        _, public_key = generate_key_pair()
        about = {"run_id": "timing", "plan_digest": self._plan.digest()}
        opened = time.monotonic()
        digest = model_digest(self._state)
        self._control.open_round("timing", self._round, digest, public_key)
        round = about | {"round": self._round, "public_key": public_key, "seconds": 60.0}
        model = ArrayRecord(self._state)
        message = serialised({"model": model, "round": ConfigRecord(round)})
        train, query = self._calls[who]
        began = time.monotonic()
        try:
            train(message, timeout=60)
        except grpc.RpcError:  # before any coin: on a busy machine too little of the window is left
            self._control.end_round("timing", self._round)
            return self.play(who)
        answered = time.monotonic()
        query(serialised({"round": ConfigRecord(about)}), timeout=60)
        probed = time.monotonic()
        cut = opened + secrets.SystemRandom().uniform(0.0, self._window.seconds)
        time.sleep(max(0.0, cut - time.monotonic()))
        outcome = self._control.close_round("timing", self._round).outcome
        released = 0
        if outcome is Outcome.RELEASABLE:
            released = len(list(self._control.release("timing", self._round)))
        time.sleep(max(0.0, opened + self._window.seconds + 0.2 - time.monotonic()))
        self._control.end_round("timing", self._round)
        sent = [at for at, size in self._wire.passed if at > opened and size > 2**12]
        return {
            "early close": float(released > most_blankets(BLANKETS)),
            "answer": answered - began,
            "probe": probed - answered,
            "arrival": sent[0] - opened if sent else math.inf,
        }


def serialised(content: dict) -> bytes:
    return recorddict_to_proto(RecordDict(content)).SerializeToString()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learn", type=int, default=40, help="rounds whose device is known")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--work-until", type=float, default=1.5)
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
        users=2,
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
        wire, calls = Wire(process.address), {}
        for who, records in RECORDS.items():
            (folder / who).mkdir()
            about = folder / who, plan, wire.address, process.submit, records
            device = multiprocessing.get_context("spawn").Process(target=serve, args=about)
            device.start()
            stack.callback(device.join)
            stack.callback(device.terminate)
            while not (folder / who / "node.sock").exists():
                if not device.is_alive():
                    return 1  # it has said why
                time.sleep(0.1)
            channel = stack.enter_context(grpc.insecure_channel(f"unix:{folder / who}/node.sock"))
            calls[who] = tuple(
                channel.unary_unary(f"/shufl.Device/{kind}") for kind in ("train", "query")
            )
        attack = Attack(plan, control, wire, calls)
        for who in RECORDS:
            attack.play(who)  # connects
        sides = [*RECORDS] * (options.learn // 2)
        known = [(who, attack.play(who)) for who in sides]
        coins = [secrets.choice([*RECORDS]) for _ in range(options.rounds)]
        seen = [(who, attack.play(who)) for who in coins]
    if not any(shown["early close"] and math.isfinite(shown["arrival"]) for _, shown in seen):
        raise SystemExit("timing_attacks.py: no report came, so that no attacker could see any")
    most = options.rounds / 2 + 3.4 * math.sqrt(options.rounds) / 2
    print(f"right guesses of {options.rounds}; more than {most:.0f} is not chance")
    worst = 0
    for attacker in seen[0][1]:
        means = {
            who: np.mean([shown[attacker] for side, shown in known if side == who])
            for who in RECORDS
        }
        right = sum(
            min(means, key=lambda side: abs(means[side] - shown[attacker])) == who
            for who, shown in seen
        )
        print(f"{attacker:12} {right:4}", "  ".join(f"{k} {v:.4f}" for k, v in means.items()))
        worst = max(worst, right)
    return int(worst > most)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main())
