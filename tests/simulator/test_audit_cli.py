"""`shufl audit` as a user calls it."""

import pytest

from rounds import check_in
from run_world import invoke, refused, told
from shufl.accounting import accountants_for

COUNTEREXAMPLE = (
    "audit -n 10 --noise-multiplier 2 --adjacency zero-out --epsilon 0.3 --samples 20000 --seed 1"
)


@pytest.mark.slow
def test_the_zero_out_counterexample_is_flagged_and_claims_for_every_pair_stand():
    checks = told(COUNTEREXAMPLE)
    for name in ("theorem3", "rdp"):
        assert checks[name]["violated_for_every_pair"]
        assert checks[name]["placement"] == "opposite"
        assert checks[name]["delta_lower"] > checks[name]["claimed_delta"]
    for name in ("crowd", "local"):
        assert not checks[name]["violated_for_every_pair"]
    table = invoke(f"{COUNTEREXAMPLE} --accountant rdp --accountant crowd").output
    assert "violated" in table and "not refuted" in table


def test_only_those_who_make_a_claim_are_audited(fixed_size_only):
    command = "audit -n 5 --noise-multiplier 1 --samples 2000 --seed 1"
    assert set(told(command)) == set(accountants_for(check_in(5, 1.0, 1.0)))
    assert "got 'fixed-size-only'" in refused(command, "--accountant", fixed_size_only)
