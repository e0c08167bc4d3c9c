"""Reports per second through the shuffler, against a gRPC server that only counts their bytes.

Both are Python processes on one core, called by the same client on the other core, in turn:

    python benchmarks/shuffler_throughput.py
    python benchmarks/shuffler_throughput.py --payloads 4000000 --megabytes 10000   # a 10 GB round

Two ways of calling, with TLS:

    sealed      the client seals every report while it sends, as user devices do. Sealing and
                sending take most of the time, so this is what a user of the shuffler sees.
    presealed   the client sends bytes that are ready: as much load as one core can make.

`sink` reads and counts; its client gets one verdict for each report, without any work for it.
`shuffler` has every acknowledged report in its batch. `ratio` is shuffler/sink, the median over
rounds that alternate between the two. `disk` is the same disk in the same round without anything
else: 4 MB written and synced, again and again. Peak memory is VmHWM of the shuffler's process.

`blankets` is the shuffler again, in a round that gets as many blankets as reports in expectation,
made while the reports come in. The columns are reports a second until all are acknowledged;
blankets a second of the shuffler's core, by its CPU time beyond that of a round without blankets;
and `ready`, the time from opening the round until it is closed, over that without blankets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from shufl.accounting import PrivacyPlan
from shufl.protocol import GaussianMechanism
from shufl.protocol.mechanisms import most_blankets
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    Verdict,
    generate_key_pair,
    key_digest,
    seal,
    sealed_length,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import SERVER_OPTIONS

CLIENT_CORE, SERVER_CORE = 0, 1


def pin(pid: int, core: int) -> None:
    """Every thread there is; later ones inherit it from theirs."""
    if os.cpu_count() == 1:
        return
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def count_bytes(request, context):
    """Takes reports; a verdict for each, for one in pieces with the last of them."""
    end = request.start + len(request.sealed)
    reports = 0 if end < request.length else len(request.users)
    return shuffler_pb2.SubmitReply(verdicts=[1] * reports)


async def serve_sink(directory: Path) -> None:
    credentials = Credentials.read(directory, "shuffler")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    submit = grpc.unary_unary_rpc_method_handler(
        count_bytes,
        shuffler_pb2.SubmitRequest.FromString,
        shuffler_pb2.SubmitReply.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("shufl.v1.Intake", {"Submit": submit})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials(
            [(credentials.private_key, credentials.certificate)], credentials.authority, True
        ),
    )
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def reports(
    header: RoundHeader, count: int, payload: bytes, public_key: bytes, sealing: bool
) -> Iterator[tuple[int, bytes]]:
    ready = seal(payload, public_key, header)
    for user in range(count):
        yield user, seal(payload, public_key, header) if sealing else ready


def disk_rate(directory: Path, payload: int) -> float:
    """Payloads per second that the disk takes when they are written and synced 4 MB at a time."""
    block = os.urandom(4_000_000)
    with (directory / "disk").open("wb", buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(25):
            file.write(block)
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - begun
    (directory / "disk").unlink()
    return 25 * len(block) / payload / seconds


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--payloads", type=int, nargs="+", default=[1_000, 100_000, 4_000_000])
    parser.add_argument("--megabytes", type=float, default=300, help="in a round, at most")
    parser.add_argument("--reports", type=int, default=20_000, help="in a round, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--sink", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        asyncio.run(serve_sink(options.sink))
        return
    pin(os.getpid(), CLIENT_CORE)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = measure(Path(directory), options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(directory: Path, options: argparse.Namespace) -> list[dict]:
    authority = Authority.create()
    credentials = authority.issue(Role.SHUFFLER, "shuffler", hosts=["127.0.0.1"])
    credentials.write(directory, "shuffler")
    command = [sys.executable, __file__, "--sink", str(directory)]
    sink = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rows = []
    print(
        f"{'payload':>9} {'':9} {'sink':>17} {'shuffler':>17} {'ratio':>6} "
        f"{'disk':>8} {'release':>8} {'peak':>8} {'with blankets':>13} {'blankets':>8} ready"
    )
    try:
        address = f"127.0.0.1:{int(sink.stdout.readline())}"
        pin(sink.pid, SERVER_CORE)
        for payload in options.payloads:
            for sealing in (True, False):
                with (
                    ShufflerProcess(directory / "state", authority=authority) as process,
                    ControlClient(process.address, process.control) as control,
                    IntakeClient(process.address, process.submit) as intake,
                    IntakeClient(address, process.submit) as sink_intake,
                ):
                    pin(process.pid, SERVER_CORE)
                    clients = control, intake, sink_intake
                    rows.append(
                        compare(*clients, process.pid, directory, payload, sealing, options)
                    )
                    rows[-1]["peak_mb"] = peak_mb(process.pid)
                    show(rows[-1])
    finally:
        sink.terminate()
        sink.wait()
    return rows


def compare(
    control: ControlClient,
    intake: IntakeClient,
    sink: IntakeClient,
    pid: int,
    directory: Path,
    payload: int,
    sealing: bool,
    options: argparse.Namespace,
) -> dict:
    """Rounds that alternate between the sink, the shuffler, and the shuffler with blankets."""
    count = max(20, min(options.reports, int(options.megabytes * 1e6 / payload)))
    length = sealed_length(payload)
    plan = PrivacyPlan(
        users=count,
        check_in_rate=1.0,
        mechanism=GaussianMechanism(noise_multiplier=1.0),
        rounds=options.rounds + 1,
        delta=1e-6,
        target_epsilon=1.0,
        minimum_batch=count,
    )
    run_id = f"{payload}-{sealing}-{os.getpid()}"
    digest = control.create_run(run_id, plan.to_json().encode(), length)
    _, public_key = generate_key_pair()
    content = os.urandom(payload)
    names = "sink", "shuffler", "release", "disk", "blanketed", "blankets"
    rates: dict[str, list[float]] = {name: [] for name in names}
    ready = []
    blanketed = f"{run_id}-blankets"
    noisy = plan.replace(shuffler_blankets=float(count))
    noisy_digest = control.create_run(blanketed, noisy.to_json().encode(), length)
    for round in range(options.rounds + 1):  # the first warms up
        opened, before = time.perf_counter(), cpu_seconds(pid)
        nonce = control.open_round(run_id, round, "model", public_key)
        header = RoundHeader(run_id, round, "model", digest, key_digest(public_key), nonce)
        for name, client in (("shuffler", intake), ("sink", sink)):
            begun = time.perf_counter()
            stream = reports(header, count, content, public_key, sealing)
            accepted = sum(verdict is Verdict.ACCEPTED for verdict in client.submit(header, stream))
            rates[name].append(count / (time.perf_counter() - begun))
            assert accepted == count, f"{accepted} of {count} accepted by the {name}"
            if name == "shuffler":
                assert control.close_round(run_id, round).outcome is Outcome.RELEASABLE
                plain = time.perf_counter() - opened
                plain_cpu = cpu_seconds(pid) - before
        rates["disk"].append(disk_rate(directory, payload))
        opened, before = time.perf_counter(), cpu_seconds(pid)
        nonce = control.open_round(blanketed, round, "model", public_key)
        header = RoundHeader(blanketed, round, "model", noisy_digest, key_digest(public_key), nonce)
        stream = reports(header, count, content, public_key, sealing)
        begun = time.perf_counter()
        assert all(verdict is Verdict.ACCEPTED for verdict in intake.submit(header, stream))
        rates["blanketed"].append(count / (time.perf_counter() - begun))
        assert control.close_round(blanketed, round).outcome is Outcome.RELEASABLE
        ready.append((time.perf_counter() - opened) / plain)
        beyond = cpu_seconds(pid) - before - plain_cpu
        rates["blankets"].append(most_blankets(count) / max(beyond, 0.01))
        assert sum(1 for _ in control.release(blanketed, round)) > count
        begun = time.perf_counter()
        assert sum(1 for _ in control.release(run_id, round)) == count
        rates["release"].append(count / (time.perf_counter() - begun))
        control.end_round(run_id, round)
        control.end_round(blanketed, round)
    control.end_run(run_id)
    control.end_run(blanketed)
    for values in rates.values():
        del values[0]
    pairs = zip(rates["shuffler"], rates["sink"], strict=True)
    return {
        "payload": payload,
        "sealed": sealing,
        "reports": count,
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "ready": statistics.median(ready[1:]),
        **{f"{name}_per_second": statistics.median(values) for name, values in rates.items()},
    }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(row: dict) -> None:
    def rate(name: str) -> str:
        per_second = row[f"{name}_per_second"]
        return f"{per_second:7.0f}/s {per_second * row['payload'] / 1e6:4.0f} MB/s"

    print(
        f"{row['payload']:9} {'sealed' if row['sealed'] else 'presealed':9} {rate('sink'):>17} "
        f"{rate('shuffler'):>17} {row['ratio']:6.2f} "
        f"{row['disk_per_second'] * row['payload'] / 1e6:4.0f} MB/s "
        f"{row['release_per_second'] * row['payload'] / 1e6:4.0f} MB/s {row['peak_mb']:5.0f} MB "
        f"{row['blanketed_per_second']:7.0f}/s {row['blankets_per_second']:7.0f}/s "
        f"{row['ready']:5.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
