"""The privacy plan: validation, canonical JSON, digest."""

import dataclasses
import json
import math

import numpy as np
import pytest

import accounting

GOOD = {
    "users": 60_000,
    "check_in_rate": 0.1,
    "clip_norm": 1.0,
    "noise_multiplier": 5.0,
    "rounds": 100,
    "delta": 1e-5,
    "target_epsilon": 2.0,
    "minimum_batch": 10,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 0}, "users must be at least 1, got 0"),
        ({"users": True}, "users must be an integer at least 1, got True"),
        ({"users": 10.5}, "users must be an integer"),
        ({"check_in_rate": 1.3}, r"check-in rate must lie in \(0, 1\], got 1.3"),
        ({"check_in_rate": 0}, r"check-in rate must lie in \(0, 1\], got 0.0"),
        ({"check_in_rate": True}, "check-in rate must be a number"),
        ({"clip_norm": 0.0}, r"clip norm must lie in \(0, inf\), got 0.0"),
        ({"clip_norm": math.nan}, "clip norm must lie"),
        ({"noise_multiplier": 0.0}, r"noise multiplier must lie in \(0, inf\), got 0.0"),
        ({"noise_multiplier": math.inf}, "noise multiplier must lie"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"delta": 0.0}, r"delta must lie in \(0, 1\), got 0.0"),
        ({"delta": 1.0}, r"delta must lie in \(0, 1\), got 1.0"),
        ({"target_epsilon": -1.0}, "target epsilon must lie"),
        ({"target_epsilon": math.inf}, "target epsilon must lie"),
        ({"minimum_batch": 0}, r"minimum batch must be in 1..60000, got 0"),
        ({"minimum_batch": 60_001}, "minimum batch must be in"),
        ({"adjacency": "add"}, "adjacency must be 'replace' or 'zero-out', got 'add'"),
        ({"shuffler_blankets": -0.5}, r"shuffler blankets must lie in \[0, inf\), got -0.5"),
        ({"shuffler_blankets": math.inf}, r"shuffler blankets must lie in .* got inf"),
        ({"shuffler_blankets": math.nan}, r"shuffler blankets must lie in .* got nan"),
        ({"shuffler_blankets": "5"}, "shuffler blankets must be a number"),
        ({"accountant": "magic"}, "accountant must be 'theorem3' or 'rdp' or 'pld'"),
        ({"accountant": 3}, "accountant must be"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        accounting.PrivacyPlan(**GOOD | change)
    assert "\n" not in str(caught.value)


def test_a_plan_is_frozen_and_hashable():
    plan = accounting.PrivacyPlan(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.users = 3
    assert plan == accounting.PrivacyPlan(**GOOD)
    assert hash(plan) == hash(accounting.PrivacyPlan(**GOOD))


def test_json_is_byte_stable_and_comes_back_equal():
    plan = accounting.PrivacyPlan(**GOOD)
    text = plan.to_json()
    assert text == (
        '{"accountant":"theorem3","adjacency":"replace","check_in_rate":0.1,"clip_norm":1.0,'
        '"delta":1e-05,"least_present":60000,"minimum_batch":10,"noise_multiplier":5.0,"rounds":100,'
        '"shuffler_blankets":0.0,"target_epsilon":2.0,"users":60000}'
    )
    again = accounting.PrivacyPlan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert accounting.PrivacyPlan.from_json(text.encode()) == plan


def test_a_plan_with_blankets_comes_back_equal_and_has_its_own_digest():
    plan = accounting.PrivacyPlan(**GOOD, shuffler_blankets=300)
    text = plan.to_json()
    assert '"shuffler_blankets":300.0,' in text
    assert accounting.PrivacyPlan.from_json(text) == plan
    assert plan.event() == accounting.ShuffledCheckInGaussianDpEvent(60_000, 0.1, 5.0, 300.0)
    for other in ({}, {"shuffler_blankets": 301.0}):
        assert accounting.PrivacyPlan(**GOOD | other).digest() != plan.digest()
    values = json.loads(text)
    del values["shuffler_blankets"]
    with pytest.raises(ValueError, match="lacks keys: shuffler_blankets"):
        accounting.PrivacyPlan.from_json(json.dumps(values))


def test_rounds_are_priced_at_the_fewest_users_who_may_be_present():
    plan = accounting.PrivacyPlan(**GOOD, least_present=40_000)
    assert plan.event().users == 40_000
    assert accounting.PrivacyPlan(**GOOD).least_present == 60_000
    assert accounting.PrivacyPlan.from_json(plan.to_json()) == plan
    for wrong in (0, 60_001, 2.5):
        with pytest.raises(ValueError, match="least users present must be"):
            accounting.PrivacyPlan(**GOOD, least_present=wrong)


def test_accountants_that_count_on_others_have_no_epsilon_when_too_few_were_there():
    plan = accounting.PrivacyPlan(**GOOD, shuffler_blankets=300, accountant="blanket")
    rows = {row.name: row for row in accounting.epsilon_table(plan, 10, too_few_present=True)}
    priced = {name for name, row in rows.items() if row.epsilon is not None}
    assert priced == {"blanket", "local"}
    assert rows["crowd"].warning == "counts on more users than were present in some rounds"
    everybody = accounting.epsilon_table(plan, 10)
    assert all(row.epsilon is not None for row in everybody)


def test_an_accountant_that_does_not_price_the_plans_rounds_is_refused(fixed_size_only):
    message = "without shuffler blankets must be 'theorem3' or .* got 'fixed-size-only'"
    with pytest.raises(ValueError, match=message) as caught:
        accounting.PrivacyPlan(**GOOD, accountant=fixed_size_only)
    assert "\n" not in str(caught.value)


def test_the_same_numbers_in_other_types_give_the_same_digest():
    other = GOOD | {"clip_norm": 1, "users": np.int64(60_000), "noise_multiplier": np.float64(5)}
    plan = accounting.PrivacyPlan(**GOOD)
    assert accounting.PrivacyPlan(**other).digest() == plan.digest()
    assert len(plan.digest()) == 64
    for change in ({"users": 60_001}, {"delta": 1.1e-5}, {"adjacency": "zero-out"}):
        assert accounting.PrivacyPlan(**GOOD | change).digest() != plan.digest()


def test_json_with_other_keys_is_refused():
    values = json.loads(accounting.PrivacyPlan(**GOOD).to_json())
    with pytest.raises(ValueError, match="unknown keys: color"):
        accounting.PrivacyPlan.from_json(json.dumps(values | {"color": 1}))
    del values["adjacency"], values["users"]
    with pytest.raises(ValueError, match="lacks keys: adjacency, users"):
        accounting.PrivacyPlan.from_json(json.dumps(values))
    for text in ("[]", "{", "3", b"\xff"):
        with pytest.raises(ValueError, match="privacy plan must be"):
            accounting.PrivacyPlan.from_json(text)


def test_sigma_follows_the_adjacency():
    assert accounting.PrivacyPlan(**GOOD).sigma == 2.5
    assert accounting.PrivacyPlan(**GOOD, adjacency="zero-out").sigma == 5.0


def test_event_and_accountants_carry_the_plans_numbers():
    plan = accounting.PrivacyPlan(**GOOD, adjacency="zero-out")
    assert plan.event() == accounting.ShuffledCheckInGaussianDpEvent(60_000, 0.1, 5.0)
    assert plan.make_accountant().name == "theorem3"
    assert plan.make_accountant("rdp").neighboring_relation.name == "REPLACE_SPECIAL"
