"""What the service promises, over real gRPC to a real process."""

import hashlib
import itertools
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from run_world import LIMIT, wait_until
from shuffler_world import (
    PUBLIC_KEY,
    REPORT_BYTES,
    SUMS,
    fill_up,
    open_batches,
    payload,
    plan,
    refusal,
)
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    Outcome,
    Refusal,
    ReportOpener,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
    generate_key_pair,
    sealed_length,
)
from shufl.shuffler.service import grpc_server
from shufl.shuffler.wire.errors import Closed


def test_a_release_is_exactly_the_accepted_reports_in_another_order(shared):
    header = shared.begin("exactly")
    reports = shared.reports(header, 200)
    assert shared.submit(header, reports) == [Verdict.ACCEPTED] * 200
    released = shared.released(header)
    arrived = [sealed for _, sealed in reports]
    assert sorted(released) == sorted(arrived)
    assert released != arrived  # equal with probability 1/200!
    opener = ReportOpener(shared.private_key)
    opened = [opener.open(sealed, header) for sealed in released]
    assert sorted(opened) == sorted(payload(user) for user in range(200))


def test_a_discarded_batch_is_gone_whatever_its_size(here):
    world = here()
    header = world.begin("discard")
    world.submit(header, world.reports(header, 50))
    world.control.end_round("discard", 1)
    world.control.end_round("discard", 1)
    assert world.control.close_round("discard", 1).outcome is Outcome.DISCARDED
    assert refusal(world.control.release, "discard", 1) is Refusal.DISCARDED
    assert open_batches(world) == 0
    header = world.begin("discard", 2)
    world.submit(header, world.reports(header, 50))
    world.control.close_round("discard", 2)
    assert open_batches(world) == 1
    world.control.end_round("discard", 2)
    assert refusal(world.control.release, "discard", 2) is Refusal.DISCARDED
    world.begin("discard", 3)
    world.control.end_run("discard")
    assert open_batches(world) == 0


def test_every_rule_has_its_verdict(shared):
    header = shared.begin("verdicts", 5)
    [(user, sealed)] = shared.reports(header, 1)

    def verdict(user=user, sealed=sealed, **changes):
        return shared.submit(replace(header, **changes), [(user, sealed)])[0]

    assert verdict(run_id="nobody's") is Verdict.UNKNOWN_RUN
    assert verdict(round=4) is Verdict.ROUND_NOT_OPEN
    assert verdict(round=6) is Verdict.ROUND_NOT_OPEN
    assert verdict(plan_digest="0" * 64) is Verdict.WRONG_COMMITMENT
    assert verdict(model_digest="model 4") is Verdict.WRONG_COMMITMENT
    assert verdict(key_digest="0" * 64) is Verdict.WRONG_COMMITMENT
    assert verdict(sealed=sealed + b"\0") is Verdict.WRONG_LENGTH
    assert verdict(sealed=b"") is Verdict.WRONG_LENGTH
    assert verdict(user=100_000) is Verdict.BAD_SENDER
    assert verdict(user=2**64 - 1) is Verdict.BAD_SENDER
    assert verdict() is Verdict.ACCEPTED
    assert verdict() is Verdict.DUPLICATE
    shared.control.close_round("verdicts", 5)
    assert verdict(user=1) is Verdict.ROUND_NOT_OPEN
    assert list(shared.control.release("verdicts", 5)) == [sealed]
    shared.control.end_run("verdicts")
    assert verdict() is Verdict.UNKNOWN_RUN


def test_verdicts_come_in_the_order_of_the_reports(shared):
    header = shared.begin("order", users=300)
    reports = shared.reports(header, 300)
    assert shared.submit(header, reports[:1]) == [Verdict.ACCEPTED]
    mixed = [*reports, (299, b"short")]
    expected = [Verdict.DUPLICATE, *[Verdict.ACCEPTED] * 299]
    assert shared.submit(header, mixed) == [*expected, Verdict.WRONG_LENGTH]
    extra = shared.reports(header, 1, first=300)
    assert shared.submit(header, extra) == [Verdict.BAD_SENDER]


def test_below_the_minimum_batch_nothing_is_released_and_no_count_is_told(here):
    world = here()
    header = world.begin(minimum_batch=38)
    world.submit(header, world.reports(header, 37))
    for _ in range(2):
        assert world.control.close_round("run", 1) == Closed(Outcome.BELOW_MINIMUM)
    with pytest.raises(ShufflerRefused) as refused:
        list(world.control.release("run", 1))
    assert refused.value.reason is Refusal.BELOW_MINIMUM
    assert not any(character.isdigit() for character in str(refused.value))
    assert open_batches(world) == 0

    header = world.begin(round=2, minimum_batch=38)
    world.submit(header, world.reports(header, 38))
    assert world.control.close_round("run", 2).outcome is Outcome.RELEASABLE


def test_a_batch_is_released_after_closing_in_one_order_until_the_round_is_ended(shared):
    header = shared.begin("once")
    shared.submit(header, shared.reports(header, 30))
    release = shared.control.release
    assert refusal(release, "once", 1) is Refusal.ROUND_NOT_CLOSED
    shared.control.close_round("once", 1)
    released = list(release("once", 1))
    assert len(released) == 30
    assert list(release("once", 1)) == released
    assert shared.control.close_round("once", 1).outcome is Outcome.RELEASABLE
    shared.control.end_round("once", 1)
    for run, round in (("once", 1), ("once", 2), ("nobody's", 1)):
        shared.control.end_round(run, round)  # also where there is none
    assert refusal(release, "once", 1) is Refusal.ALREADY_RELEASED
    assert shared.control.close_round("once", 1).outcome is Outcome.RELEASABLE
    assert refusal(release, "once", 2) is Refusal.UNKNOWN_ROUND
    assert refusal(release, "nobody's", 1) is Refusal.UNKNOWN_RUN


def test_a_batch_that_the_server_leaves_is_destroyed_in_time(
    here, tiny_disk, tmp_path, monkeypatch
):
    """And where its end cannot be entered in the record, as soon as there is room again."""
    monkeypatch.setattr(grpc_server, "_MEMORY_SECONDS", 0.0)
    log = tmp_path / "log"
    world = here(tiny_disk / "directory", log_file=log)
    header = world.begin(users=3)
    world.submit(header, world.reports(header, 3))
    filler = fill_up(tiny_disk, world.control)
    world.control.close_round("run", 1)
    monkeypatch.setattr(world.process._server, "_release_seconds", 0.0)
    wait_until(lambda: "old batches are not destroyed" in log.read_text(), LIMIT, "an attempt")
    assert open_batches(world) == 1
    filler.unlink()
    wait_until(lambda: not open_batches(world), LIMIT, "its end")
    assert refusal(world.control.release, "run", 1) is Refusal.DISCARDED


def test_rounds_increase_one_at_a_time_and_a_plan_never_changes(shared):
    control = shared.control
    digest = control.create_run("rules", plan(10, 2), 64)
    assert digest == hashlib.sha256(plan(10, 2)).hexdigest()
    assert control.create_run("rules", plan(10, 2), 64) == digest
    assert refusal(control.create_run, "rules", plan(10, 1), 64) is Refusal.RUN_EXISTS
    assert refusal(control.create_run, "rules", plan(10, 2), 65) is Refusal.RUN_EXISTS
    assert refusal(control.open_round, "nobody's", 1, "m", PUBLIC_KEY) is Refusal.UNKNOWN_RUN
    control.open_round("rules", 3, "m", PUBLIC_KEY)
    assert refusal(control.open_round, "rules", 3, "m", PUBLIC_KEY) is Refusal.ANOTHER_ROUND_OPEN
    assert refusal(control.open_round, "rules", 4, "m", PUBLIC_KEY) is Refusal.ANOTHER_ROUND_OPEN
    control.close_round("rules", 3)
    for round in (2, 3):
        reason = refusal(control.open_round, "rules", round, "m", PUBLIC_KEY)
        assert reason is Refusal.ROUND_NOT_INCREASING
    control.open_round("rules", 4, "m", PUBLIC_KEY)
    control.end_run("rules")
    control.end_run("rules")
    assert refusal(control.open_round, "rules", 5, "m", PUBLIC_KEY) is Refusal.RUN_ENDED
    assert refusal(control.create_run, "rules", plan(10, 2), 64) is Refusal.RUN_ENDED
    control.end_run("nobody's")


@pytest.mark.parametrize("sealing", ["x25519", "mlkem768-x25519"])
def test_a_round_whose_reports_are_too_short_to_be_sealed_is_not_opened(shared, sealing):
    """Those of the longer seal: too short for the other one, the run is refused."""
    length, key = sealed_length(0, sealing), generate_key_pair(sealing)[1]
    if sealing != "x25519":
        shared.control.create_run(f"short {sealing}", plan(), length - 1)
        reason = refusal(shared.control.open_round, f"short {sealing}", 1, "m", key)
        assert reason is Refusal.MALFORMED
    shared.control.create_run(f"empty {sealing}", plan(), length)
    shared.control.open_round(f"empty {sealing}", 1, "m", key)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        *((bad, "the plan") for bad in (b"", b"no json", b"[1]", b"{}")),
        *((plan(5, minimum), "minimum_batch must be") for minimum in (6, 0, True, 2.0)),
        (plan(shuffler_blankets=1e8), "shuffler_blankets must be"),
        (plan(mechanism={"name": "laplace"}), "must be one with the name 'gaussian', 'ldp-sgd'"),
        (plan(mechanism={"name": "gaussian"}), "noise_multiplier is missing"),
        (plan(**SUMS | {"cover": False}), "cover must be true with mixing sum"),
        (plan(masked=True), "unknown key masked"),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused(shared, bad, why):
    with pytest.raises(ShufflerRefused, match=f"^MALFORMED: .*{why}"):
        shared.control.create_run("bad plan", bad, 64)


@pytest.mark.parametrize("length", [0, 63, 64 * 2**20 + 1])
def test_a_report_length_out_of_range_is_refused(shared, length):
    assert refusal(shared.control.create_run, "bad length", plan(), length) is Refusal.MALFORMED


def test_a_round_longer_than_the_file_system_allows_is_refused(here):
    world, limit = here(), 2**30
    users = limit // 4096
    world.control.create_run("long", plan(users + 1), 4096)
    world.control.create_run("as long", plan(users), 4096)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        why = f"^MALFORMED: .*a round's file would have {limit + 4096} bytes"
        with pytest.raises(ShufflerRefused, match=why):
            world.control.open_round("long", 1, "model", PUBLIC_KEY)
        world.control.open_round("as long", 1, "model", PUBLIC_KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_closing_while_nodes_submit_splits_accepted_from_late(here):
    world = here()
    header = world.begin(users=15_000)
    accepted = [[] for _ in range(3)]
    late, closed = threading.Event(), threading.Event()

    def node(number):
        sent = []

        def reports():
            for index in range(5000):
                if late.is_set():
                    return
                if index == 2500:  # more than may be without a verdict
                    assert closed.wait(LIMIT)
                sent.append(os.urandom(REPORT_BYTES))
                yield number * 5000 + index, sent[-1]

        with IntakeClient(world.process.address, world.process.submit) as intake:
            for index, verdict in enumerate(intake.submit(header, reports())):
                if verdict is Verdict.ACCEPTED:
                    accepted[number].append(sent[index])
                else:
                    assert verdict is Verdict.ROUND_NOT_OPEN
                    late.set()

    with ThreadPoolExecutor(3) as pool:
        nodes = [pool.submit(node, number) for number in range(3)]
        wait_until(lambda: min(map(len, accepted)) >= 50, LIMIT, "reports of every node")
        released = world.released(header)
        closed.set()
        for each in nodes:
            each.result(LIMIT)
    assert late.is_set()
    assert sorted(released) == sorted(itertools.chain.from_iterable(accepted))


def test_reports_are_read_no_further_ahead_than_there_are_calls(shared):
    header = shared.begin("window", report_bytes=2**20, users=40)
    read = []

    def reports():
        for index in range(40):
            read.append(index)
            yield index, bytes(2**20)

    verdicts = shared.intake.submit(header, reports())
    for answered in range(1, 41):
        assert next(verdicts) is Verdict.ACCEPTED
        assert len(read) <= answered + 3  # eight calls for two reports, and one that waits
    assert len(read) == 40


def test_an_error_of_the_caller_s_generator_reaches_the_caller(shared):
    header = shared.begin("generator")

    def reports():
        yield from shared.reports(header, 1)
        raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        list(shared.intake.submit(header, reports()))


@pytest.mark.slow
def test_the_largest_report_passes_and_a_larger_one_is_refused(shared):
    header = shared.begin("large", report_bytes=64 * 2**20, users=1)
    report = os.urandom(2**20) * 64
    assert shared.submit(header, [(0, report)]) == [Verdict.ACCEPTED]
    assert shared.submit(header, [(0, report + b"\0")]) == [Verdict.WRONG_LENGTH]
    assert shared.released(header) == [report]


@pytest.mark.slow
def test_a_shuffler_that_is_not_there_or_hangs_is_unavailable(start):
    world = start()
    header = world.begin()
    control = ControlClient(world.process.address, world.process.control, timeout=0.2)
    intake = IntakeClient(world.process.address, world.process.submit, timeout=0.2)
    os.kill(world.process.pid, signal.SIGSTOP)
    try:
        for call in (
            lambda: control.open_round("run", 2, "m", PUBLIC_KEY),
            lambda: list(control.release("run", 1)),
            lambda: list(intake.submit(header, world.reports(header, 1))),
        ):
            with pytest.raises(ShufflerUnavailable, match=r"does not answer: nothing within 0.2 s"):
                call()
    finally:
        os.kill(world.process.pid, signal.SIGCONT)
    world.process.__exit__(None, None, None)
    with pytest.raises(ShufflerUnavailable, match=rf"shuffler at {world.process.address} does not"):
        control.end_run("run")
    with pytest.raises(ShufflerUnavailable, match="does not answer"):
        list(intake.submit(header, world.reports(header, 1)))
