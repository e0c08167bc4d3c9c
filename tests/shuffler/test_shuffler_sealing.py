"""A sealed report opens with the server's key, for its round, unchanged; and not otherwise."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
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
@example(RoundHeader("ab", 1, "c", "", ""), RoundHeader("a", 1, "bc", "", ""), 1, 1)
@example(RoundHeader("a", 1, "b", "c", ""), RoundHeader("a", 1, "b", "", "c"), 1, 1)
def test_different_headers_or_lengths_have_different_bindings(one, other, first, second):
    """Whatever text is moved between fields."""
    assert (one.commitment == other.commitment) == (one == other)
    same = one == other and first == second
    assert (one.binding(first) == other.binding(second)) == same


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
