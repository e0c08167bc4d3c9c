"""The merge of permuted parts is a uniformly random permutation of all."""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from shuffler import merge as module
from shuffler.merge import merge

FALSE_ALARM = 1e-6


def probabilities(lengths: list[int]) -> dict[tuple[int, ...], Fraction]:
    """Of every interleaving, exactly: the merge run on all outcomes of its draws."""
    found: dict[tuple[int, ...], Fraction] = {}
    for draws in itertools.product(*(range(total) for total in range(sum(lengths), 0, -1))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.secrets, "randbelow", functools.partial(_next, iter(draws)))
            word = tuple(merge([[i] * n for i, n in enumerate(lengths)], lengths))
        weight = Fraction(1, math.factorial(sum(lengths)))
        found[word] = found.get(word, Fraction(0)) + weight
    return found


def _next(draws, total: int) -> int:
    return next(draws)


@pytest.mark.parametrize("lengths", [[1], [2, 2], [1, 2, 3], [3, 0, 2], [1, 1, 1, 1], [4, 3]])
def test_all_interleavings_have_exactly_the_same_probability(lengths):
    found = probabilities(lengths)
    words = math.factorial(sum(lengths)) // math.prod(math.factorial(n) for n in lengths)
    assert len(found) == words
    assert set(found.values()) == {Fraction(1, words)}


@pytest.mark.parametrize("lengths", [[5], [2, 3], [1, 4], [1, 2, 2], [0, 5], [1] * 5])
def test_permuted_parts_merge_to_all_orders_equally_often(lengths):
    counts: Counter = Counter()
    random = secrets.SystemRandom()
    for _ in range(6000):
        numbers = iter(range(5))
        parts = [list(itertools.islice(numbers, n)) for n in lengths]
        for part in parts:
            random.shuffle(part)
        counts[tuple(merge(parts, lengths))] += 1
    orders = list(itertools.permutations(range(5)))
    assert set(counts) <= set(orders)
    assert chisquare([counts[order] for order in orders]).pvalue > FALSE_ALARM


def test_the_test_sees_a_merge_that_is_not_uniform():
    """Choosing a part with equal probability, as one might, favours the short ones."""
    counts: Counter = Counter()
    random = secrets.SystemRandom()
    for _ in range(6000):
        parts = [[0], random.sample(range(1, 5), 4)]
        merged = []
        while any(parts):
            merged.append(random.choice([part for part in parts if part]).pop())
        counts[tuple(merged)] += 1
    orders = list(itertools.permutations(range(5)))
    assert chisquare([counts[order] for order in orders]).pvalue < FALSE_ALARM


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_nothing_is_lost_and_each_part_keeps_its_order(lengths):
    parts = [[(i, k) for k in range(n)] for i, n in enumerate(lengths)]
    merged = list(merge(parts, lengths))
    assert sorted(merged) == sorted(itertools.chain.from_iterable(parts))
    for i, part in enumerate(parts):
        assert [each for each in merged if each[0] == i] == part


@pytest.mark.parametrize(
    ("parts", "lengths"), [([[1]], [2]), ([[1, 2]], [1]), ([[1]], []), ([[1]], [-1])]
)
def test_wrong_lengths_are_noticed(parts, lengths):
    with pytest.raises(ValueError):
        list(merge(parts, lengths))
