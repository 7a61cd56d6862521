"""Interval arithmetic agrees with counting nanoseconds one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_profiling.report.intervals import (
    EMPTY,
    covered_before,
    crowded,
    divided,
    intersection,
    length,
    spans_of,
    subtract,
    union,
    within,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def covered(spans: np.ndarray) -> set[int]:
    """Return every instant of a set of time."""
    return {instant for begin, end in spans.tolist() for instant in range(begin, end)}


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    """Return every instant covered by pairs that may overlap or be empty."""
    return {instant for begin, end in pairs for instant in range(begin, end)}


@given(PAIRS, PAIRS)
def test_set_operations_are_those_of_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    """Union, difference and intersection hold exactly the instants they should."""
    left, right = spans_of(a), spans_of(b)
    assert covered(union(left, right)) == instants(a) | instants(b)
    assert covered(subtract(left, right)) == instants(a) - instants(b)
    assert covered(intersection(left, right)) == instants(a) & instants(b)


@given(PAIRS)
def test_results_are_disjoint_and_sorted(pairs: list[tuple[int, int]]) -> None:
    """Spans that touch are one span, so the length is the number of instants."""
    spans = spans_of(pairs)
    assert (spans[1:, 0] > spans[:-1, 1]).all()
    assert length(spans) == len(instants(pairs))


@given(PAIRS, st.integers(0, 40), st.integers(0, 40))
def test_within_clips(pairs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Only what lies between both ends stays."""
    assert covered(within(spans_of(pairs), begin, max(begin, end))) == instants(pairs) & set(
        range(begin, max(begin, end))
    )


@given(PAIRS, st.integers(-5, 50))
def test_time_before_an_instant_is_counted(pairs: list[tuple[int, int]], instant: int) -> None:
    """As the instants of the set that are earlier."""
    (found,) = covered_before(spans_of(pairs), np.array([instant])).tolist()
    assert found == len({one for one in instants(pairs) if one < instant})


@given(st.lists(PAIRS, max_size=5))
def test_time_in_several_sets_is_divided(sets: list[list[tuple[int, int]]]) -> None:
    """Each instant counts for the sets that hold it with equal parts; what more than one holds is crowded."""
    each = [instants(pairs) for pairs in sets]
    held = Counter(instant for one in each for instant in one)
    spans = [spans_of(pairs) for pairs in sets]
    assert covered(crowded(spans)) == {instant for instant, count in held.items() if count > 1}
    expected = [sum(1 / held[instant] for instant in one) for one in each]
    np.testing.assert_allclose(divided(spans), expected, atol=1e-9)


def test_nothing_is_nothing() -> None:
    """The empty set is neutral."""
    assert divided([]) == []
    assert length(crowded([EMPTY, EMPTY])) == 0
    assert length(union()) == 0
    assert length(subtract(EMPTY, EMPTY)) == 0
