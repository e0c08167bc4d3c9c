"""A sealed report opens with the server's key, for its round, unchanged; and not otherwise."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from shuffler import (
    ReportRejected,
    RoundHeader,
    generate_key_pair,
    open_report,
    private_key_from_bytes,
    private_key_to_bytes,
    public_key_from_bytes,
    public_key_to_bytes,
    seal,
    sealed_length,
)

HEADER = RoundHeader("run", 7, "model 7", "ab" * 32)
HEADERS = st.builds(
    RoundHeader, st.text(), st.integers(0, 2**63 - 1), st.text(max_size=4), st.text(max_size=4)
)


@pytest.fixture(scope="module")
def keys() -> tuple[X25519PrivateKey, bytes]:
    return generate_key_pair()


@pytest.mark.parametrize("length", [0, 1, 100, 104_000])
def test_a_report_opens_and_has_the_announced_length(keys, length):
    payload = bytes(length)
    sealed = seal(payload, keys[1], HEADER)
    assert len(sealed) == sealed_length(length)
    assert open_report(sealed, keys[0], HEADER) == payload


@pytest.mark.parametrize(
    "change",
    [{"run_id": "run2"}, {"round": 8}, {"model_version": "model 8"}, {"plan_digest": "ac" * 32}],
)
def test_a_report_of_another_round_does_not_open(keys, change):
    sealed = seal(b"payload", keys[1], HEADER)
    with pytest.raises(ReportRejected):
        open_report(sealed, keys[0], dataclasses.replace(HEADER, **change))


def test_a_report_sealed_to_another_key_does_not_open(keys):
    with pytest.raises(ReportRejected):
        open_report(seal(b"payload", generate_key_pair()[1], HEADER), keys[0], HEADER)


def test_every_flipped_bit_is_noticed(keys):
    sealed = seal(b"payload", keys[1], HEADER)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        # The top bit of an X25519 key is ignored on arithmetic (RFC 7748 section 5), yet the
        # encapsulated key is hashed into the context (RFC 9180 section 4.1).
        with pytest.raises(ReportRejected):
            open_report(bytes(changed), keys[0], HEADER)


def test_every_truncation_and_an_extension_are_noticed(keys):
    sealed = seal(b"payload", keys[1], HEADER)
    for changed in [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0"]:
        with pytest.raises(ReportRejected):
            open_report(changed, keys[0], HEADER)


def test_a_degenerate_key_in_a_report_is_rejected(keys):
    with pytest.raises(ReportRejected):
        open_report(bytes(sealed_length(7)), keys[0], HEADER)


def test_sealing_is_randomised_and_hides_the_payload(keys):
    sealed = {seal(b"known marker" * 10, keys[1], HEADER) for _ in range(50)}
    assert len(sealed) == 50
    assert not any(b"known marker" in report for report in sealed)


@given(HEADERS, HEADERS)
def test_different_headers_have_different_bindings(one, other):
    assert (one.binding() == other.binding()) == (one == other)


def test_text_moved_between_fields_changes_the_binding():
    assert (
        RoundHeader("ab", 1, "c", "").binding()
        != RoundHeader("a", 1, "bc", "").binding()
        != RoundHeader("a", 1, "b", "c").binding()
    )


@given(HEADERS)
def test_a_header_survives_a_dictionary_and_a_pickle(header):
    assert RoundHeader.from_dict(header.to_dict()) == header
    assert pickle.loads(pickle.dumps(header)) == header


@pytest.mark.parametrize("fields", [{}, {**HEADER.to_dict(), "more": 1}])
def test_a_header_with_other_fields_is_refused(fields):
    with pytest.raises(ValueError, match="a round header has the fields"):
        RoundHeader.from_dict(fields)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_round_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match="round must lie in"):
        RoundHeader("run", number, "m", "d")


@pytest.mark.parametrize("number", [1.0, True, "1"])
def test_a_round_that_is_no_integer_is_refused(number):
    with pytest.raises(TypeError, match="round must be an integer"):
        RoundHeader("run", number, "m", "d")


def test_keys_survive_their_bytes(keys):
    private_key, public_key = keys
    assert public_key_to_bytes(public_key_from_bytes(public_key)) == public_key
    restored = private_key_from_bytes(private_key_to_bytes(private_key))
    assert open_report(seal(b"payload", public_key, HEADER), restored, HEADER) == b"payload"


def test_keys_of_another_length_are_refused():
    with pytest.raises(ValueError, match="a public key has 32 bytes, got 31"):
        seal(b"payload", bytes(31), HEADER)
    with pytest.raises(ValueError, match="a private key has 32 bytes, got 33"):
        private_key_from_bytes(bytes(33))
    with pytest.raises(ValueError):
        seal(b"payload", bytes(32), HEADER)  # the point of order one
