"""One round over many shufflers: the merge at full size, and what a round of 10^8 users takes.

    python benchmarks/shuffler_scale.py --reports 100000000 --workers 64
    python benchmarks/shuffler_scale.py --front --reports 4000 --workers 4

Runs `shuffler.merge` over that many reports (numbers stand for them) from so many parts, and checks
what a uniform interleaving must show: how many of each part are in each tenth of the release is
hypergeometric. Then, from a rate of reports per second and worker (benchmarks/
shuffler_throughput.py), how long the parts of the round take.

With `--front` instead: real workers and a front, and how fast a release comes out of it, beside the
same release of one shuffler alone.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from shuffler import ControlClient, IntakeClient, RoundHeader, Verdict, start_shufflers
from shuffler.merge import merge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2000, help="reports/s of one worker")
    parser.add_argument("--report-bytes", type=int, default=100_000)
    parser.add_argument("--front", action="store_true", help="time a real front instead")
    options = parser.parse_args()
    if options.front:
        for workers in (1, options.workers):
            time_release(workers, options.reports, options.report_bytes)
        return
    reports, workers = options.reports, options.workers
    lengths = [reports // workers + (i < reports % workers) for i in range(workers)]
    tenths = np.zeros((10, workers), dtype=np.int64)
    begun = time.perf_counter()
    merged = merge([_repeat(i, n) for i, n in enumerate(lengths)], lengths)
    size = 1_000_000
    for start in range(0, reports, size):
        block = np.fromiter(merged, dtype=np.uint16, count=min(size, reports - start))
        for tenth in range(start * 10 // reports, min(9, (start + size) * 10 // reports) + 1):
            low = max(0, math.ceil(tenth * reports / 10) - start)
            high = max(0, math.ceil((tenth + 1) * reports / 10) - start)
            tenths[tenth] += np.bincount(block[low:high], minlength=workers)
    seconds = time.perf_counter() - begun
    assert sum(1 for _ in merged) == 0
    assert (tenths.sum(axis=0) == lengths).all()
    shares = np.array(lengths) / reports
    # Of a hypergeometric count: draws m of n, share p of the part.
    m = reports / 10
    deviation = np.sqrt(m * shares * (1 - shares) * (reports - m) / (reports - 1))
    worst = float(np.abs((tenths - m * shares) / deviation).max())
    print(
        f"{reports:.3g} reports of {workers} workers merged in {seconds:.1f} s, "
        f"{reports / seconds:.3g}/s; peak "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"
    )
    print(f"farthest count of a part in a tenth: {worst:.2f} standard deviations of {10 * workers}")
    assert worst < 6
    intake = reports / workers / options.rate
    gigabytes = reports * options.report_bytes / 1e9
    print(
        f"at {options.rate:g} reports/s each: intake {intake / 60:.1f} min on {workers} workers; "
        f"{gigabytes:.3g} GB in all, {gigabytes / workers:.3g} GB on a worker's disk"
    )


def time_release(workers: int, reports: int, report_bytes: int) -> None:
    """How fast a release comes out of so many shufflers; more than one behind a front."""
    plan = json.dumps({"users": reports, "minimum_batch": 1}).encode()
    with (
        tempfile.TemporaryDirectory() as logs,
        start_shufflers(workers, -(-reports // workers), Path(logs)) as shufflers,
        ControlClient(shufflers.address, shufflers.control) as control,
    ):
        digest = control.create_run("run", plan, report_bytes)
        control.open_round("run", 1, "model")
        header = RoundHeader("run", 1, "model", digest)
        for number, shuffler in enumerate(shufflers.intakes):
            users = range(number, reports, workers)
            with IntakeClient(*shuffler) as intake:
                sealed = ((user, bytes(report_bytes)) for user in users)
                assert all(v is Verdict.ACCEPTED for v in intake.submit(header, sealed))
        control.close_round("run", 1)
        begun = time.perf_counter()
        assert sum(1 for _ in control.release("run", 1)) == reports
        seconds = time.perf_counter() - begun
    name = "one shuffler" if workers == 1 else f"a front of {workers}"
    megabytes = reports * report_bytes / 1e6
    print(f"{name}: {megabytes:.0f} MB in {seconds:.2f} s, {megabytes / seconds:.0f} MB/s")


def _repeat(value: int, count: int):
    for _ in range(count):
        yield value


if __name__ == "__main__":
    main()
