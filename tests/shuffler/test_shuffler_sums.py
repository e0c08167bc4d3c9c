"""The shuffler hands over sums: of whole messages, once each, with its own noise, and no vector."""

import errno
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from scipy import stats

import shuffler_world
from run_world import LIMIT
from shuffler_world import PUBLIC_KEY, SUMS, only, plan, read, stub_of
from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.mechanisms.summed_reports import mask, masked, new_seed, signed, steps_of_sums
from shufl.shuffler import ReportOpener, ShufflerRefused, Verdict, message_length, sealed_length
from shufl.shuffler.callers import Caller, Role
from shufl.shuffler.store import batch as module
from shufl.shuffler.store.batch import Piece
from shufl.shuffler.store.operator_minimum import Floor
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.store.summed_batch import SummedBatch
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.node_seeds import seal_seed
from shufl.shuffler.wire.seed_reader import read_seed

SEAL = 9  # bytes of a seed, sealed to nobody


def sums(users=1000, **others):
    return plan(users, **SUMS | others)


def begin(world, run_id, dimension):
    return world.begin(run_id, report_bytes=message_length(dimension, "sum"), **SUMS)


def batch(place, dimension=3, users=10, slots=2):
    some = SummedBatch(place, 4 * dimension + SEAL, users, slots, slots, allocate=False)
    some.begin(dimension, lambda: iter([(slice(None), np.zeros(dimension, dtype=np.int64))]))
    return some


@pytest.fixture
def piece_of_16_bytes(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 16)


def add_piece(some, sender, users, content, start):
    """Adds 16 bytes of a message."""
    piece = Piece(users.start, start, len(content))
    return some.add(sender, users, 100, content[start : start + 16], piece)


def message(*values, seed=b"s"):
    return np.array(values).astype("<u4").tobytes() + seed.ljust(SEAL, b".")


def released(some, limit=2**20):
    """The sum as it is released, and the seeds; in chunks of so many bytes."""
    some.end()
    vector, *seeds = read(some, limit)
    return signed(np.frombuffer(vector, dtype="<u4")).tolist(), seeds


def test_the_sum_holds_each_users_message_once_and_only_whole_ones(memory_path, piece_of_16_bytes):
    some = batch(memory_path)
    assert some.add("a", range(0, 3), 9, message(1, -2, 3, seed=b"z")) is Verdict.ACCEPTED
    assert some.add("a", range(2, 9, 2), 9, message(7, 7, 7)) is Verdict.DUPLICATE  # user 2
    assert some.add("a", range(4, 9, 2), 9, message(5, 0, -9, seed=b"a")) is Verdict.ACCEPTED
    assert some.add("a", only(3), 9, message(1, 1, 1)[:-1]) is Verdict.WRONG_LENGTH
    assert add_piece(some, "b", range(0, 3), message(100, 0, 0), 0) is None  # and no more of it
    assert some.add("b", range(0, 5), 5, message(1, 1, 1)) is Verdict.ROUND_FULL
    whole = message(100, 0, 0, seed=b"m")
    assert add_piece(some, "c", range(0, 4), whole, 16) is None
    assert add_piece(some, "c", range(0, 4), whole, 0) is Verdict.ACCEPTED
    assert (some.senders, some.count) == (10, 3)
    assert some.has_of("c") and not some.has_of("b")
    seeds = [each.ljust(SEAL, b".") for each in (b"a", b"m", b"z")]  # sorted: no order of arrival
    for limit in (2**20, 10, 12, 9):
        assert released(some, limit) == ([106, -2, -6], seeds)
    some.close()
    with pytest.raises(ShufflerRefused, match="DISCARDED"):
        next(some.chunks(10))


def test_the_shufflers_noise_is_in_it_once_however_often_it_is_asked_for(memory_path):
    """A sum goes around at 32 bits."""
    drawn = []
    some = batch(memory_path)
    some.begin(3, lambda: drawn.append(1) or iter([(slice(None), np.array([-1, 2**31, 0]))]))
    some.add("a", only(0), 1, message(1, 2**30, 3))
    assert released(some)[0] == released(some, 9)[0] == [0, 2**30 - 2**31, 3]
    some.close()
    assert drawn == [1]


def test_a_disk_that_fails_loses_a_message_and_nothing_else(
    memory_path, monkeypatch, piece_of_16_bytes
):
    some, whole = batch(memory_path, slots=1), message(1, 1, 1)

    def failing(*given):
        raise OSError(errno.EIO, "fails")

    assert add_piece(some, "a", only(0), whole, 0) is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", failing)
        assert add_piece(some, "a", only(0), whole, 16) is Verdict.STORAGE_FAILED
    # There is one place, and it was given back.
    assert add_piece(some, "a", only(0), whole, 0) is None
    assert add_piece(some, "a", only(0), whole, 16) is Verdict.ACCEPTED
    assert released(some)[0] == [1, 1, 1]
    some.close()


def test_many_threads_add_up_exactly(memory_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 2048)
    some, nodes = batch(memory_path, dimension=1000, users=800, slots=8), 8
    together = threading.Barrier(nodes)

    def send(node):
        together.wait(LIMIT)
        verdicts = set()
        for user in range(100):
            content = message(*[node * 1000 + user] * 1000)
            about = str(node), only(user), 100
            if user % 2:
                pieces = [Piece(user, start, len(content)) for start in (0, 2048)]
                assert some.add(*about, content[:2048], pieces[0]) is None
                verdicts.add(some.add(*about, content[2048:], pieces[1]))
            else:
                verdicts.add(some.add(*about, content))
        return verdicts

    with ThreadPoolExecutor(nodes) as pool:
        assert set.union(*pool.map(send, range(nodes))) == {Verdict.ACCEPTED}
    assert set(released(some)[0]) == {sum(1000 * n + u for n in range(nodes) for u in range(100))}
    some.close()


def messages(world, header, vectors):
    """A node's message for each vector."""
    for vector in vectors:
        seed = new_seed()
        yield masked(vector, seed) + seal_seed(seed, 1, world.public_key, header)


def opened(world, header):
    """The server's view of the released sum."""
    vector, *seeds = world.control.release(header.run_id, header.round)
    total, opener = np.frombuffer(vector, dtype="<u4").copy(), ReportOpener(world.private_key)
    for sealed in seeds:
        seed = read_seed(opener.open(sealed, header), header, None)
        total -= mask(seed.seed, total.size)
    return signed(total), len(seeds)


@pytest.mark.parametrize("dimension", [1, 300, PIECE_BYTES // 4 + 5])
def test_over_the_wire_nodes_of_several_users_add_up(shared, dimension):
    header = begin(shared, f"wire {dimension}", dimension)
    vectors = np.random.default_rng(dimension).integers(-(2**20), 2**20, (3, dimension))
    users = [range(0, 10, 2), range(1, 10, 2), range(10, 11)]
    sent = list(zip(users, messages(shared, header, vectors), strict=True))
    assert list(shared.intake.submit(header, sent)) == [Verdict.ACCEPTED] * 3
    again = list(zip(users, messages(shared, header, vectors), strict=True))
    assert list(shared.intake.submit(header, again)) == [Verdict.DUPLICATE] * 3
    closed = shared.control.close_round(header.run_id, 1)
    assert closed.senders == 11
    total, seeds = opened(shared, header)
    assert (total == vectors.sum(0)).all()
    assert seeds == 3
    assert (opened(shared, header)[0] == total).all()  # asked again


def test_a_credential_speaks_for_its_own_users_only(shared):
    store = shared.process.store
    begin(shared, "users", 1)
    header, _ = store.batches.agree("users", 1, "", "")
    few = Caller(Role.NODE, "few", 4)
    report = shuffler_world.report(store, 0, bytes(message_length(1, "sum")), run_id="users")
    for users in (range(0, 5), range(3, 10**15), range(0, 2**63 * 3, 2**63), range(4, 5)):
        asked = type(report)("users", 1, header.commitment, users, report.sealed, few)
        assert store.batches.accept(asked) is Verdict.BAD_SENDER


def test_where_reports_are_shuffled_a_message_is_of_one_user(shared):
    header = shared.begin("shuffled")
    (one,) = shared.reports(header, 1)
    verdicts = list(shared.intake.submit(header, [(range(0, 2), one[1])]))
    assert verdicts == [Verdict.BAD_SENDER]


def test_one_message_of_several_users_is_in_a_message_of_its_own(shared):
    header = begin(shared, "malformed", 1)
    request = shuffler_pb2.SubmitRequest(
        run_id="malformed", round=1, commitment=header.commitment, users=[0, 1], count=2,
        sealed=bytes(2 * message_length(1, "sum")),
    )  # fmt: skip
    with (
        shuffler_world.raw_channel(shared) as channel,
        pytest.raises(grpc.RpcError, match="a report per user, a piece"),
    ):
        stub_of("Intake", channel).Submit(request, timeout=LIMIT)


@pytest.mark.parametrize("seed", [None, 5])
def test_the_shuffler_adds_noise_of_the_plans_size(tmp_path, seed):
    sigma, dimension = 3.0, 20_000
    with_noise = RunStore(tmp_path / "a", randomness=make_randomness(seed), durable=False)
    about = sums(5, central_noise=sigma), message_length(dimension, "sum")
    with_noise.create_run("run", *about)
    found = []
    for round in (1, 2):
        with_noise.open_round("run", round, "model", PUBLIC_KEY)
        zero = bytes(message_length(dimension, "sum"))
        sent = shuffler_world.report(with_noise, 0, zero, round=round)
        assert with_noise.batches.accept(sent) is Verdict.ACCEPTED
        with_noise.close_round("run", round)
        found.append(np.array(released(with_noise.release("run", round))[0]))
    with_noise.close()
    for noise in found:
        scaled = noise / steps_of_sums(sigma, dimension)
        assert stats.kstest(scaled, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(found)[0, 1]) < 5 / math.sqrt(dimension)


@pytest.mark.parametrize("sealing", ["x25519", "mlkem768-x25519"])
def test_a_server_of_version_1_is_told_that_versions_differ(tmp_path, sealing):
    """Before any round. It sealed the 32 bytes of a seed alone, whatever the model."""
    store = RunStore(tmp_path / "directory", durable=False)
    for dimension in (1, 26_010):
        length = 4 * dimension + sealed_length(32, sealing)
        with pytest.raises(ShufflerRefused, match="must have the same version of shufl"):
            store.create_run("run", sums(), length)
        store.create_run(f"{dimension}", sums(), message_length(dimension, "sum", sealing))
    store.close()


def test_a_plan_whose_whole_numbers_do_not_fit_is_refused_at_the_key(tmp_path):
    """Among them noise so large that a shuffler would draw it for hours; and no numbers at all."""
    store = RunStore(tmp_path / "directory", durable=False)
    for central, dimension, why in (
        *((1e6, 2**20, "31 bits"), (0.1, 3, "at least 0.924"), (0.0, 0, "no vector with its seed")),
    ):
        length = message_length(dimension, "sum")
        store.create_run(why, sums(central_noise=central), length)
        with pytest.raises(ShufflerRefused, match=why):
            store.open_round(why, 1, "model", PUBLIC_KEY)
    store.close()


def test_an_operators_floor_holds_for_sums(tmp_path):
    store = RunStore(tmp_path / "directory", floor=Floor(least_sum_noise=20.0), durable=False)
    about = {"users": 400, "least_present": 400}
    counting = {"accountant": "sum-distributed"}
    for central, own, more, has in (
        (19.9, 0.0, {}, "19.9"),
        (0.0, 1.0, {}, "1"),  # an accountant that counts on nobody holds nobody to least_present
        (0.0, 0.99, counting, "19.8"),
        (0.0, 1.0, counting, ""),
    ):
        mechanism = {"name": "gaussian", "clip_norm": 1.0, "noise_multiplier": own}
        asked = sums(**about, central_noise=central, mechanism=mechanism, **more)
        if not has:
            store.create_run("counting", asked, message_length(3, "sum"))
            continue
        with pytest.raises(ShufflerRefused, match=rf"least_sum_noise = 20, the plan has {has}$"):
            store.create_run("run", asked, message_length(3, "sum"))
    store.create_run("run", sums(**about, central_noise=20.0), message_length(3, "sum"))
    store.create_run("shuffled", plan(), 64)
    store.close()


def test_a_message_that_breaks_off_leaves_nothing_in_the_sum(shared):
    """After each of its pieces; then the node sends it again."""
    dimension = PIECE_BYTES  # four pieces and the seed
    header = begin(shared, "cut", dimension)
    vector = np.arange(dimension)
    (whole,) = messages(shared, header, [vector])
    batch = shared.process.store._runs["cut"].rounds[1].batch
    about = {"run_id": "cut", "round": 1, "commitment": header.commitment, "length": len(whole)}
    with shuffler_world.raw_channel(shared) as channel:
        for pieces in range(1, 5):
            for start in range(0, pieces * PIECE_BYTES, PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                request = shuffler_pb2.SubmitRequest(
                    users=[0], sealed=piece, start=start, upload=pieces, **about
                )
                assert not stub_of("Intake", channel).Submit(request, timeout=LIMIT).verdicts
    assert len(batch._uploads) == 4
    assert list(shared.intake.submit(header, [(only(0), whole)])) == [Verdict.ACCEPTED]
    shared.control.close_round("cut", 1)
    assert (opened(shared, header)[0] == vector).all()
