"""The privacy plan: validation, canonical JSON, digest."""

import json
import math
import re
from typing import get_args

import attrs
import numpy as np
import pydantic
import pytest

from rounds import check_in, make_plan
from shufl import accounting
from shufl.protocol import Allocation, RandomisedResponse, shuffler_of
from shufl.protocol.mechanisms import MECHANISMS
from shufl.protocol.plan import Plan, Times, differing
from shufl.protocol.plan_fields import AccountantName, Adjacency, MechanismName, Privacy
from shufl.protocol.validation import words_of

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
        ({"users": 0}, "users must be a whole number from 1 to .*, got 0"),
        ({"users": True}, "users must be a whole number from 1 to .*, got True"),
        ({"check_in_rate": 1.3}, r"check_in_rate must be a number in \[1e-12, 1\], got 1.3"),
        ({"clip_norm": 0.0}, r"clip_norm must be a number in \[1e-18, 1e15\], got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a number in .*, got nan"),
        ({"noise_multiplier": 5e-324}, r"noise_multiplier of a plan must lie in .*, got 4.94"),
        ({"noise_multiplier": 1e15}, r"noise_multiplier of a plan must lie in .*, got 1e"),
        ({"rounds": 2**63}, r"rounds must be a whole number from 1 to 10\^9, got 92"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a number"),
        ({"delta": 0.0}, r"delta must be a number in \(0, 1\), got 0.0"),
        ({"delta": 9.9e-21}, r"delta of a plan of 100 rounds must be at least 1e-20, .* 9.9e-21"),
        ({"target_epsilon": math.inf}, "target_epsilon must be a number above 0"),
        ({"minimum_batch": 0}, "minimum_batch must be a whole number from 1 to .*, got 0"),
        ({"minimum_batch": 60_001}, "minimum_batch must be at most the number of users, 60000"),
        ({"adjacency": "add"}, "adjacency must be one of replace, zero-out, got 'add'"),
        ({"shuffler_blankets": -0.5}, "shuffler_blankets must be a number from 0 to .* got -0.5"),
        ({"shuffler_blankets": "5"}, "shuffler_blankets must be a number"),
        ({"accountant": "magic"}, "accountant must be one of theorem3, rdp, pld"),
        ({"chek_in_rate": 0.1, "users": 0}, "unknown key chek_in_rate; did you mean check_in_"),
        ({"least_present": 0}, "least_present must be"),
        ({"least_present": 60_001}, "least_present must be"),
        ({"mechanism": {"name": "randomised-response", "categories": 3, "local_epsilon": 1.0}},
         "randomised-response rounds without shuffler blankets must be .* got 'theorem3'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_in_one_line(change, message):
    mechanism = {name: change.get(name, GOOD[name]) for name in ("clip_norm", "noise_multiplier")}
    values = {name: value for name, value in (GOOD | change).items() if name not in mechanism}
    with pytest.raises(ValueError, match=message) as caught:
        accounting.PrivacyPlan(**{"mechanism": {"name": "gaussian"} | mechanism} | values)
    assert "\n" not in str(caught.value)


WINDOW = {"most_records": 9}
ALLOTTED = {"participation": "allocation", "accountant": "local"}
OF_SUMS = {"mixing": "sum", "cover": True, "accountant": "sum-central", "central_noise": 1.0}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        *(({name: 2e-5}, {f"privacy.{name}"}) for name in ("delta", "target_epsilon")),
        *(({name: 7}, {f"privacy.{name}"}) for name in ("rounds", "minimum_batch")),
        *(({name: 7}, {f"privacy.{name}"}) for name in ("least_present", "shuffler_blankets")),
        *(({name: 0.7}, {f"privacy.{name}"}) for name in ("check_in_rate", "clip_norm")),
        ({"noise_multiplier": 7.0}, {"privacy.noise_multiplier"}),
        ({"adjacency": "zero-out"}, {"privacy.adjacency"}),
        ({"cover": True}, {"privacy.cover"}),
        (ALLOTTED, {f"privacy.{name}" for name in ALLOTTED}),
        (OF_SUMS, {f"privacy.{name}" for name in OF_SUMS}),
        ({"users": 60_001, "least_present": 60_000}, {"data.users"}),
        ({"window": WINDOW | {"grace": 7.0}}, {"window.grace"}),
        ({"window": {"most_records": 7}}, {"data.most_records"}),
    ],
)
def test_every_value_that_makes_another_digest_is_named_by_its_key(change, keys):
    plan = make_plan(**GOOD | {"window": WINDOW})
    other = make_plan(**GOOD | {"window": WINDOW} | change)
    assert differing(plan.by_key(), other.by_key()).keys() == keys
    told = plan.differs(other).split("; ")
    assert {each.partition(":")[0] for each in told} == keys
    assert all(re.fullmatch(r"[\w.]+: \S+ here, \S+ there", each) for each in told)
    assert plan.differs(plan) == ""
    assert {*plan.by_key()} >= {f"window.{key}" for key in Times.model_fields}


def test_values_without_names_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"PrivacyPlan takes values by name \(users=, .*got 100"):
        accounting.PrivacyPlan(100)


def test_the_least_delta_that_is_named_is_allowed():
    assert make_plan(**GOOD | {"delta": 1e-20}).delta == 1e-20
    assert make_plan(**GOOD | {"delta": 5.54e-19, "rounds": 5540}).rounds == 5540


def test_json_is_byte_stable_and_comes_back_equal():
    plan = make_plan(**GOOD)
    text = plan.to_json()
    assert text == (
        '{"users":60000,"check_in_rate":0.1,'
        '"mechanism":{"name":"gaussian","clip_norm":1.0,"noise_multiplier":5.0},'
        '"rounds":100,"delta":0.00001,"target_epsilon":2.0,"minimum_batch":10,'
        '"adjacency":"replace","shuffler_blankets":0.0,"cover":false,'
        '"participation":"check-in","mixing":"shuffle","central_noise":0.0,"least_present":60000,'
        '"accountant":"theorem3","window":null}'
    )
    again = accounting.PrivacyPlan.from_json(text)
    assert again == plan and hash(again) == hash(plan)
    assert again.to_json() == text
    assert accounting.PrivacyPlan.from_json(text.encode()) == plan
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        plan.users = 3


@pytest.mark.parametrize(
    ("change", "event"),
    [
        ({"shuffler_blankets": 300}, check_in(60_000, 0.1, 5.0, 300.0)),
        ({"least_present": 40_000}, check_in(40_000, 0.1, 5.0)),  # the fewest who may be present
        *(({name: 2e-5}, check_in(60_000, 0.1, 5.0)) for name in ("delta", "target_epsilon")),
        ({"users": 60_001}, check_in(60_001, 0.1, 5.0)),
        ({"adjacency": "zero-out"}, check_in(60_000, 0.1, 5.0)),
        (
            {"participation": "allocation", "accountant": "local"},
            attrs.evolve(check_in(60_000, 0.1, 5.0), participation=Allocation(10)),
        ),
    ],
)
def test_another_plan_has_its_own_event_and_digest_and_comes_back_equal(change, event):
    plan = make_plan(**GOOD | change)
    assert accounting.PrivacyPlan.from_json(plan.to_json()) == plan
    assert plan.event() == event
    assert len(plan.digest()) == 64 and plan.digest() != make_plan(**GOOD).digest()
    assert plan.sigma == (5.0 if "adjacency" in change else 2.5)
    relation = plan.make_accountant("rdp").neighboring_relation
    assert (relation.name == "REPLACE_SPECIAL") == ("adjacency" in change)


def test_the_same_numbers_in_other_types_give_the_same_digest():
    other = GOOD | {"clip_norm": 1, "users": np.int64(60_000), "noise_multiplier": np.float64(5)}
    assert make_plan(**other).digest() == make_plan(**GOOD).digest()


def test_accountants_that_count_on_others_have_no_epsilon_when_too_few_were_there():
    plan = make_plan(**GOOD, shuffler_blankets=300, accountant="blanket")
    rows = {row.name: row for row in accounting.epsilon_table(plan, 10, too_few_present=True)}
    priced = {name for name, row in rows.items() if row.epsilon is not None}
    assert priced == {"blanket", "local"}
    assert rows["crowd"].warning == "counts on more users than were present in some rounds"
    everybody = accounting.epsilon_table(plan, 10)
    assert all(row.epsilon is not None for row in everybody)


def test_the_names_written_out_are_those_of_the_registries():
    for names, registry in (
        (AccountantName, accounting.ACCOUNTANTS),
        (Adjacency, accounting.ADJACENCIES),
        (MechanismName, (*MECHANISMS, "randomised-response")),
    ):
        assert get_args(names) == tuple(registry)


def test_a_plan_and_its_open_form_allow_the_same():
    """Of each value they say the same words; what is left out is open, or as in a plan."""
    assert Plan.model_fields.keys() - Privacy.model_fields.keys() == {"users", "window"}
    for name in Plan.model_fields.keys() & Privacy.model_fields.keys() - {"mechanism"}:
        closed, opened = Plan.model_fields[name], Privacy.model_fields[name]
        words = closed.description or words_of(closed.annotation)
        assert words in (opened.description or words_of(opened.annotation)), name
        assert opened.default in (None, "1/n", closed.default), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanism": {"name": "ldp-sgd", "noise_multiplier": 2.0}, "accountant": "crowd"},
        {"mechanism": RandomisedResponse(categories=9, local_epsilon=2.0), "accountant": "local"},
        {"participation": "allocation", "check_in_rate": 0.25, "accountant": "local"},
        {"mixing": "sum", "cover": True, "central_noise": 3.0, "accountant": "sum-central"},
    ],
)
def test_the_section_of_a_plan_is_that_plan(changes):
    values = make_plan(**GOOD).model_dump() | changes
    plan = accounting.PrivacyPlan.model_validate(values)
    again = accounting.OpenPlan(users=plan.users, **plan.section())
    assert again.open == () and again.closed() == plan


@pytest.mark.parametrize("cover", [False, True])
def test_a_batch_is_large_enough_by_its_reports_or_with_cover_by_who_sent(cover):
    plan = make_plan(**GOOD, cover=cover)
    assert plan.enough_sent(10, 0) and not plan.enough_sent(9, 0)
    assert plan.enough_sent(4, 6) is not cover
    sent, blankets = np.array([4, 10, 3]), np.array([6, 0, 6])
    assert plan.enough_sent(sent, blankets).tolist() == [not cover, True, False]


def test_the_users_of_every_node_have_one_shuffler_each():
    nodes = np.arange(7)
    assert shuffler_of(nodes, 3).tolist() == [shuffler_of(int(each), 3) for each in nodes]
    assert np.bincount(shuffler_of(nodes, 3)).tolist() == [3, 2, 2]
    assert set(shuffler_of(nodes, 1)) == {0}


def test_json_with_other_keys_is_refused():
    values = json.loads(make_plan(**GOOD).to_json())
    with pytest.raises(ValueError, match="privacy plan: unknown key color"):
        accounting.PrivacyPlan.from_json(json.dumps(values | {"color": 1}))
    del values["rounds"], values["delta"]
    with pytest.raises(ValueError, match="privacy plan: rounds is missing"):
        accounting.PrivacyPlan.from_json(json.dumps(values))
    for text in ("[]", "{", "3", b"\xff"):
        with pytest.raises(ValueError, match="privacy plan: it must be "):
            accounting.PrivacyPlan.from_json(text)
