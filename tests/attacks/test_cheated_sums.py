"""A shuffler that cheats with sums: it makes up vectors, leaves nodes out, adds no noise, lies."""

import dataclasses
import datetime
import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from rounds import make_plan
from shufl.accounting import make_accountant
from shufl.protocol.mechanisms import SeededRandomness, SystemRandomness
from shufl.protocol.mechanisms.summed_reports import (
    masked,
    new_seed,
    signed,
    steps_of_sums,
    whole_noise,
    whole_update,
)
from shufl.server.aggregate import Expected, SpoiledBatch, aggregate_sum
from shufl.server.plausible_counts import Counts
from shufl.shuffler import ReportOpener, RoundHeader, generate_key_pair, key_digest, seal
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.node_seeds import SEED_START, SUM_VERSION, seal_seed
from shufl.shuffler.wire.sealing import SEED_PAYLOAD_BYTES
from shufl.shuffler.wire.seed_reader import read_seed

PRIVATE, PUBLIC = generate_key_pair("mlkem768-x25519")
NODES = {"a": 20, "b": 30, "c": 50}
DIMENSION = 64
DAY = datetime.timedelta(days=1)
P256_OID = bytes.fromhex("06082a8648ce3d030107")
KEY_OID = bytes.fromhex("06072a8648ce3d0201")
SUBJECT_NAME_OID, ISSUER_NAME_OID = bytes.fromhex("0603551d11"), bytes.fromhex("0603551d12")


def plan_of(**changes):
    given = {"users": 100, "check_in_rate": 0.1, "noise_multiplier": 0.0, "central_noise": 2.0}
    given |= {"rounds": 100, "mixing": "sum", "cover": True, "accountant": "sum-central"}
    return make_plan(**given | changes)


DISTRIBUTED = plan_of(accountant="sum-distributed", noise_multiplier=0.5, central_noise=0.0)


def header_of(plan, round=3):
    return RoundHeader("run", round, "version", plan.digest(), key_digest(PUBLIC), b"n" * 16)


def published(plan, whole, users, draws):
    """What the server makes of a sum; whoever shifts the masked one has shifted `whole`."""
    header, seed = header_of(plan), new_seed()
    parts = [masked(whole, seed), seal_seed(seed, users, PUBLIC, header)]
    return aggregate_sum((header, iter(parts)), PRIVATE, plan, whole.size, draws, None)


def lift(estimate, plan, users):
    """The whole numbers that an estimate was made of, next to those of float32."""
    steps = steps_of_sums(users * plan.check_in_rate / plan.mechanism.clip_norm, estimate.size)
    return np.rint(estimate.astype(np.float64) * steps)


# The largest noise of a plan, so that a sum that goes around is not too long to be used.
LOUD, LOUD_DIMENSION = plan_of(central_noise=1e6), 400


def test_a_shuffler_reads_no_sign_out_of_a_sum_that_it_shifts_to_where_it_goes_around():
    """Whoever adds noise after the lift to signed numbers shows the sign in all rounds."""
    randomness, generator = SeededRandomness(1), np.random.default_rng(0)
    offset = np.zeros(LOUD_DIMENSION, dtype=np.int64)
    offset[7] = 2**31
    seen = 0
    for round in range(40):
        update = generator.standard_normal(LOUD_DIMENSION)
        update[7] = 3.0 * (-1) ** round
        whole = whole_update(update / np.linalg.norm(update), 1.0)
        draws = randomness.standard_normal(round, np.arange(1), LOUD_DIMENSION)[0]
        found = published(LOUD, whole + offset, 100, draws).estimate
        seen += (found[7] < 0) == (whole[7] > 0)
    assert 6 <= seen <= 34  # of 40, as of coins


def test_whatever_vector_a_shuffler_makes_up_only_the_noisy_sum_counts():
    """The same offset, and a node's vector and noise that add up to the same, give the same."""
    generator = np.random.default_rng(2)
    draws = SeededRandomness(3).standard_normal(1, np.arange(1), LOUD_DIMENSION)[0]
    noise = whole_noise(draws, LOUD.central_noise, 1)
    for _ in range(5):
        offset = np.zeros(LOUD_DIMENSION, dtype=np.int64)
        offset[generator.choice(LOUD_DIMENSION, 5)] = generator.integers(0, 2**32, 5)
        x = generator.integers(-(2**20), 2**20, LOUD_DIMENSION)
        expected = signed((x + offset + noise).astype(np.uint32))
        found = lift(published(LOUD, x + offset, 100, draws).estimate, LOUD, 100)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_no_sum_that_is_accepted_goes_around():
    """`check_dimension` asks for so few bits that all coordinates of it keep their signs."""
    plan = plan_of(users=60_000, check_in_rate=1.0, central_noise=236.0)
    with pytest.raises(ValueError, match=r"at most 31 bits with mixing sum, got 31\.89: take"):
        plan.check_dimension(10**6, 1)
    plan.check_dimension(3 * 10**5, 1)
    longest = plan.longest_sum(plan.users, 3 * 10**5)
    assert steps_of_sums(longest, 3 * 10**5) < 2**31


@pytest.fixture(scope="module")
def authority():
    return Authority.create()


@pytest.fixture(scope="module")
def credentials(authority):
    """Of the nodes, and of others who would like to be some."""
    made = {name: authority.issue(Role.NODE, name, users=users) for name, users in NODES.items()}
    made["server"] = authority.issue(Role.SERVER, "server")
    made["unknown"] = authority.issue(Role.NODE, "unknown", users=50)
    stranger = Authority.create().issue(Role.NODE, "c", users=50)
    return made | {"stranger": stranger}


def message(plan, credentials, name, header=None, users=None):
    """A node's vector of zero updates, and its sealed seed; nobody signs for the name ""."""
    header, users = header or header_of(plan), users or NODES.get(name, 50)
    seed, draws = new_seed(), SystemRandomness().standard_normal(1, np.arange(1), DIMENSION)[0]
    noise = whole_noise(draws, plan.mechanism.noise_multiplier, users)
    signer = credentials[name] if name else None
    return masked(noise, seed), seal_seed(seed, users, PUBLIC, header, signer)


def handed_over(messages):
    """What a shuffler releases of some nodes' messages."""
    total = sum(np.frombuffer(vector, dtype="<u4") for vector, _ in messages)
    return [total.astype("<u4").tobytes(), *(sealed for _, sealed in messages)]


def server_takes(plan, authority, parts, names=tuple(NODES)):
    expected = Expected({name: NODES[name] for name in names}, authority.certificate)
    draws = SystemRandomness().standard_normal(1, np.arange(1), DIMENSION)[0]
    return aggregate_sum((header_of(plan), iter(parts)), PRIVATE, plan, DIMENSION, draws, expected)


def test_a_sum_of_fewer_users_than_are_counted_on_is_refused(authority, credentials):
    """A shuffler that leaves nodes out, or stands in for them, has nothing published."""
    plan = DISTRIBUTED

    def of(*names, **about):
        return [message(plan, credentials, name, **about) for name in names]

    honest = of("a", "b", "c")
    assert server_takes(plan, authority, handed_over(honest)).reports == 100
    another = header_of(plan, round=4)
    for messages, why in (
        (honest[:1], "must stand for at least 100 users, got 20"),
        (honest[:2], "must stand for at least 100 users, got 50"),
        ([*honest[:2], honest[1]], "does not open: REPLAYED"),
        ([*honest[:2], *of("b")], "a seed of b stands for 30 users, 0 are allowed"),
        ([*honest[:2], *of("")], "no node with a valid certificate has signed it"),
        ([*honest[:2], *of("stranger")], "no node with a valid certificate has signed"),
        ([*honest[:2], *of("server", users=50)], "no node with a valid certificate has signed"),
        ([*honest[:2], *of("unknown")], "a seed of unknown stands for 50 users, 0 are allowed"),
        (of("a", users=100), "a says that it stands for 100 users, its certificate for 20"),
        ([*honest[:2], *of("c", header=another)], "does not open: NOT_OPENED"),
    ):
        with pytest.raises(SpoiledBatch, match=why):
            server_takes(plan, authority, handed_over(messages))
    with pytest.raises(SpoiledBatch, match="a seed of c stands for 50 users, 0 are allowed"):
        server_takes(plan, authority, handed_over(honest), ["a", "b"])  # c is at another shuffler


def test_what_one_node_has_signed_is_good_for_its_own_seed_and_number_alone(credentials, authority):
    plan = DISTRIBUTED
    header = header_of(plan)
    _, sealed = message(plan, credentials, "a")
    payload = ReportOpener(PRIVATE).open(sealed, header)
    assert read_seed(payload, header, authority.certificate).node == "a"
    for place in (1, 32, 40, 60):  # of the seed, of the number of users, of the signature
        changed = bytearray(payload)
        changed[place] ^= 1
        with pytest.raises(ValueError, match="a has not signed it"):
            read_seed(bytes(changed), header, authority.certificate)
    other = dataclasses.replace(header, nonce=b"m" * 16)
    with pytest.raises(ValueError, match="a has not signed it"):
        read_seed(payload, other, authority.certificate)


def test_a_shuffler_with_nodes_of_its_own_gets_the_sum_of_the_others(authority, credentials):
    """What is said beside ε: n counts no user of such a node. Here c, with 50 of 100, is one."""
    seed = new_seed()
    nothing = masked(np.zeros(DIMENSION, dtype=np.int64), seed)

    def of_a_and_c(plan):
        own = nothing, seal_seed(seed, 50, PUBLIC, header_of(plan), credentials["c"])
        return server_takes(plan, authority, handed_over([message(plan, credentials, "a"), own]))

    with pytest.raises(SpoiledBatch, match="at least 100 users, got 70"):
        of_a_and_c(DISTRIBUTED)
    fewer = DISTRIBUTED.replace(least_present=70)
    assert of_a_and_c(fewer).reports == 70
    stated = fewer.make_accountant().epsilon_after(fewer.event(), 1e-5, 10)
    left = fewer.replace(users=20, least_present=20)
    assert left.make_accountant().epsilon_after(left.event(), 1e-5, 10) > stated


def test_a_release_without_end_is_not_read_to_its_end():
    """Of seeds that are all good: each stands for a user at least, and the plan has 100."""
    plan, header = plan_of(), header_of(plan_of())
    read = []

    def seeds():
        for number in itertools.count():
            read.append(number)
            yield seal_seed(new_seed(), 1, PUBLIC, header)

    parts, draws = itertools.chain([bytes(4 * DIMENSION)], seeds()), np.zeros(DIMENSION)
    with pytest.raises(SpoiledBatch, match="for more users than the plan has, 100"):
        aggregate_sum((header, parts), PRIVATE, plan, DIMENSION, draws, None)
    assert len(read) == 101


@pytest.mark.parametrize("by", ["shuffler", "nodes"])
def test_a_shuffler_or_nodes_that_add_no_noise_to_sums_are_named(by):
    """And nobody is by whose noise and updates sums are as they should be."""
    d, rounds = 2_000, 6
    plan = plan_of(
        users=1000,
        least_present=1000,
        central_noise=23.6 if by == "shuffler" else 0.0,
        noise_multiplier=0.0 if by == "shuffler" else 0.75,
        accountant="sum-central" if by == "shuffler" else "sum-distributed",
    )
    generator, randomness = np.random.default_rng(1), SystemRandomness()
    for honest in (True, False):
        counts = Counts(plan)
        for round in range(1, rounds):
            whole = sum(whole_update(generator.standard_normal(d), 1.0) for _ in range(100))
            draws, servers = randomness.blanket_noise(round, np.arange(2), d)
            if honest:
                whole = whole + whole_noise(draws, plan.noise_of_batch, 1)
            counts.add_sum(published(plan, whole, 1000, servers).length, 1000, d)
        assert bool(counts.doubt) != honest
    assert counts.doubt.startswith("released sums that are shorter than their noise (")


def test_missing_noise_is_named_however_long_it_was_there_before():
    """Long updates in earlier rounds do not pay for a later sum."""
    plan = plan_of(users=1000, central_noise=23.6)
    noise, d = plan.noise_of_sum(1000), 26_010
    counts = Counts(plan)
    for _ in range(1000):
        counts.add_sum(math.hypot(noise * math.sqrt(d), 1800.0), 1000, d)
    assert not counts.doubt
    counts.add_sum(math.hypot(plan.central_noise * math.sqrt(d), 300.0), 1000, d)
    assert counts.doubt.startswith("released sums that are shorter than their noise (")


@pytest.mark.parametrize("dimension", [2, 100, 10_000])
def test_honest_noise_is_never_named(dimension):
    """Without updates, which only make sums longer: 2 000 runs of 100 rounds."""
    plan = plan_of(central_noise=1.0)
    noise, generator = plan.noise_of_sum(100), np.random.default_rng(5)
    shortest = 0.0
    for _ in range(2000):
        counts = Counts(plan)
        for square in generator.chisquare(dimension, 100):
            counts.add_sum(noise * math.sqrt(square), 100, dimension)
        assert not counts.doubt
        shortest = max(shortest, counts._short)
    # exp(-x) bounds the chance that a run's largest value is x, times its rounds.
    assert shortest < math.log(2000 * 100 * 1e3)


def made_up_certificate(extension):
    """One of nobody, DER, with a subject's alternative name and this extension."""
    key, now, name = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(), x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + DAY)
    names = x509.SubjectAlternativeName([x509.DNSName("a")])
    builder = builder.add_extension(names, False).add_extension(extension, False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


@pytest.mark.parametrize("kind", ["version", "curve", "key", "names", "cut", "rubbish"])
def test_no_certificate_that_somebody_makes_up_ends_a_run(authority, credentials, kind):
    """Whoever has the round's public key can seal one: it is a spoiled sum, and no other error."""
    der = x509.load_pem_x509_certificate(credentials["a"].certificate).public_bytes(Encoding.DER)
    with_two_names = made_up_certificate(x509.IssuerAlternativeName([x509.DNSName("a")]))
    changed = {
        "version": der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05", 1),
        "curve": der.replace(P256_OID, P256_OID[:-1] + b"\x7f", 1),
        "key": der.replace(KEY_OID, KEY_OID[:-1] + b"\x7f", 1),
        "names": with_two_names.replace(ISSUER_NAME_OID, SUBJECT_NAME_OID),
        "cut": der[:-9],
        "rubbish": b"rubbish",
    }[kind]
    plan = DISTRIBUTED
    header = header_of(plan)
    payload = SEED_START.pack(SUM_VERSION, bytes(32), 20, b"s", len(changed))
    sealed = seal((payload + changed).ljust(SEED_PAYLOAD_BYTES, b"\0"), PUBLIC, header)
    with pytest.raises(SpoiledBatch, match="no node with a valid certificate has signed it"):
        server_takes(plan, authority, [bytes(4 * DIMENSION), sealed])


def test_how_far_one_node_moves_a_sum_is_what_the_documents_say():
    """docs/sums.md: the vector that a cheating node adds at most, with a sum of noise as usual."""
    plan = plan_of(users=1000, central_noise=23.6)
    d = 26_010
    most = plan.longest_cheat(d)
    assert most == pytest.approx(2170, abs=5)
    (draws, shufflers) = SystemRandomness().blanket_noise(1, np.arange(2), d)
    cheat = np.zeros(d, dtype=np.int64)
    for share, accepted in ((0.8, True), (1.2, False)):
        cheat[0] = share * most * steps_of_sums(1.0, d)
        with nullcontext() if accepted else pytest.raises(SpoiledBatch):
            published(plan, cheat + whole_noise(shufflers, plan.central_noise, 1), 1000, draws)


def test_the_servers_noise_alone_is_what_a_cheating_shuffler_faces():
    """It leaves its noise out and hands over one node: ε of one noise is stated, not of both."""
    plan = plan_of()
    assert plan.noise_of_sum(100) == pytest.approx(math.sqrt(2) * plan.central_noise)
    (draws,) = SystemRandomness().blanket_noise(1, np.arange(1), 20_000)
    found = published(plan, np.zeros(20_000, dtype=np.int64), 20, draws)
    left = found.estimate * (20 * plan.check_in_rate)
    assert left.std() == pytest.approx(plan.central_noise, rel=0.05)
    one_noise = make_accountant("sum-distributed").epsilon_after(
        plan.replace(central_noise=left.std()).event(), 1e-5, 10
    )
    assert one_noise == pytest.approx(plan.epsilon(rounds=10), rel=0.05)
