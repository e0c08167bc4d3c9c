"""A sealed report opens with the server's key, for its round, unchanged; and not otherwise."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shufl.shuffler import (
    RejectReason,
    ReportOpener,
    ReportRejected,
    RoundHeader,
    generate_key_pair,
    model_digest,
    seal,
    sealed_length,
)

ROOT = Path(__file__).parents[2]
HEADER = RoundHeader("run", 7, "model 7", "ab" * 32, "cd" * 32)
HEADERS = st.builds(RoundHeader, st.text(), st.integers(0, 2**63 - 1), *[st.text(max_size=4)] * 3)


SUITES = ["x25519", "mlkem768-x25519"]


@pytest.fixture(scope="module", params=SUITES)
def sealing(request):
    return request.param


@pytest.fixture(scope="module")
def keys(sealing):
    return generate_key_pair(sealing)


def open_report(sealed, private_key, header):
    return ReportOpener(private_key).open(sealed, header)


@pytest.mark.parametrize("length", [0, 1, 100, 104_000])
def test_a_report_opens_and_has_the_announced_length(keys, sealing, length):
    payload = bytes(length)
    sealed = seal(payload, keys[1], HEADER)
    assert len(sealed) == sealed_length(length, sealing)
    assert open_report(sealed, keys[0], HEADER) == payload


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "run2"},
        {"round": 8},
        {"model_digest": "model 8"},
        {"plan_digest": "ac" * 32},
        {"key_digest": "ce" * 32},
    ],
)
def test_a_report_of_another_round_does_not_open(keys, change):
    sealed = seal(b"payload", keys[1], HEADER)
    with pytest.raises(ReportRejected):
        open_report(sealed, keys[0], dataclasses.replace(HEADER, **change))


@pytest.mark.parametrize("other", SUITES)
def test_a_report_sealed_to_another_key_does_not_open(keys, other):
    with pytest.raises(ReportRejected) as rejected:
        open_report(seal(b"payload", generate_key_pair(other)[1], HEADER), keys[0], HEADER)
    assert rejected.value.reason is RejectReason.NOT_OPENED


def test_a_report_opens_once_also_among_others(keys):
    reports = [seal(b"payload", keys[1], HEADER) for _ in range(5)]
    opener = ReportOpener(keys[0])
    assert [opener.open(sealed, HEADER) for sealed in reports] == [b"payload"] * 5
    for sealed in reports:
        with pytest.raises(ReportRejected) as rejected:
            opener.open(sealed, HEADER)
        assert rejected.value.reason is RejectReason.REPLAYED


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_a_dropped_private_key_is_nowhere_in_memory(name):
    """In a process of its own: the key is found while it is held, and not afterwards."""
    code = f"""
import ctypes, re, secrets
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from shufl.shuffler.wire import sealing
from shufl.shuffler import RoundHeader, ReportOpener, generate_key_pair, seal

made = []  # the parts of the pair, masked and wiped, to be searched for
def masked(raw):
    mask = secrets.token_bytes(len(raw))
    hidden = bytes(a ^ b for a, b in zip(raw, mask))
    ctypes.memset(id(raw) + bytes.__basicsize__ - 1, 0, len(raw))
    return hidden, mask
def spy(kind):
    class Spy:
        @staticmethod
        def generate():
            key = kind.generate()
            made.append(masked(key.private_bytes_raw()))
            return key
    return Spy
sealing_x, sealing_m = sealing.X25519PrivateKey, sealing.MLKEM768PrivateKey
sealing.X25519PrivateKey, sealing.MLKEM768PrivateKey = spy(sealing_x), spy(sealing_m)
key, public = generate_key_pair({name!r})
sealing.X25519PrivateKey, sealing.MLKEM768PrivateKey = sealing_x, sealing_m

def regions():
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if found and "[v" not in line:
            yield [int(bound, 16) for bound in found.groups()]
def held():
    result = []
    for hidden, mask in made:
        # By a byte that memory is not full of: zeros would take minutes.
        at = next(i for i in range(len(mask)) if 128 < hidden[i] ^ mask[i] < 255)
        byte, count = hidden[at] ^ mask[at], 0
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for start, end in regions():
                memory.seek(start)
                try:
                    data = memory.read(end - start)
                except OSError:
                    continue
                place = data.find(byte, at)
                while place >= 0:
                    piece = data[place - at:place - at + len(mask)]
                    if len(piece) == len(mask) and all(
                        a ^ b == c for a, b, c in zip(piece, mask, hidden)):
                        count += 1
                    place = data.find(byte, place + 1)
                del data
        result.append(count > 0)
    return result
header = RoundHeader("r", 1, "m", "d", "k")
sealed = seal(b"x", public, header)
assert ReportOpener(key).open(sealed, header) == b"x"
before = held()
del key
after = held()
print(before, after)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    before, after = done.stdout.strip().split("] [") if done.stdout else (done.stderr, "")
    assert "True" in before, done
    assert "True" not in after, done


def test_every_flipped_bit_is_noticed(keys, sealing):
    sealed = seal(b"payload", keys[1], HEADER)
    for bit in range(0, 8 * len(sealed), 1 if sealing == "x25519" else 5):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        # The top bit of an X25519 key is ignored on arithmetic (RFC 7748 section 5), yet the
        # encapsulated key is hashed into the context (RFC 9180 section 4.1).
        with pytest.raises(ReportRejected):
            open_report(bytes(changed), keys[0], HEADER)


def test_every_truncation_an_extension_and_a_degenerate_key_are_noticed(keys):
    sealed = seal(b"payload", keys[1], HEADER)
    cut = [sealed[:length] for length in range(len(sealed))]
    for changed in [*cut, sealed + b"\0", bytes(len(sealed))]:
        with pytest.raises(ReportRejected):
            open_report(changed, keys[0], HEADER)


def test_sealing_is_randomised_and_hides_the_payload(keys):
    sealed = {seal(b"known marker" * 10, keys[1], HEADER) for _ in range(50)}
    assert len(sealed) == 50
    assert not any(b"known marker" in report for report in sealed)


@given(HEADERS, HEADERS, st.integers(0, 3), st.integers(0, 3))
def test_different_headers_or_lengths_have_different_bindings(one, other, first, second):
    same = one == other and first == second
    assert (one.binding(first) == other.binding(second)) == same


def test_text_moved_between_fields_changes_the_commitment():
    fields = [("ab", 1, "c", "", ""), ("a", 1, "bc", "", ""), ("a", 1, "b", "c", "")]
    headers = [RoundHeader(*each) for each in [*fields, ("a", 1, "b", "", "c")]]
    assert len({header.commitment for header in headers}) == 4
    assert len({header.binding(1) for header in headers}) == 4


def test_a_models_digest_covers_names_types_shapes_and_values():
    """Two biases of one length that are swapped are another model."""
    one, two = np.arange(3.0), np.arange(3.0) + 1
    models = [
        {"a.bias": one, "b.bias": two},
        {"b.bias": one, "a.bias": two},
        {"a.bias": two, "b.bias": one},
        {"a.bias": one, "b.bias": two.reshape(3, 1)},
        {"a.bias": one, "b.bias": two.view(np.int64)},
        {"a.bias": one},
        {"a.biasb.bias": np.concatenate([one, two])},
    ]
    assert len({model_digest(model) for model in models}) == len(models)
    transposed = np.arange(6.0).reshape(2, 3).T
    assert model_digest({"a": transposed}) == model_digest({"a": transposed.copy()})


@given(HEADERS)
def test_a_header_survives_a_pickle(header):
    assert header.commitment == pickle.loads(pickle.dumps(header)).commitment
    assert pickle.loads(pickle.dumps(header)) == header


@pytest.mark.parametrize("number", [-1, 2**63, 1.0, True, "1"])
def test_a_round_that_is_out_of_range_or_no_integer_is_refused(number):
    with pytest.raises(ValueError, match=r"Input should be (greater|less) than|a valid integer"):
        RoundHeader("run", number, "m", "d", "k")


def test_keys_of_another_length_are_refused():
    with pytest.raises(ValueError, match="a public key has 32 or 1216 bytes, got 31"):
        seal(b"payload", bytes(31), HEADER)
    with pytest.raises(ValueError):
        seal(b"payload", bytes(32), HEADER)  # the point of order one
    with pytest.raises(ValueError):
        seal(b"payload", b"\xff" * 1216, HEADER)  # no ML-KEM key
