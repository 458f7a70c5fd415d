"""Which loop prefetches which lines, in known orders."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.models.prefetch.reading import Visits, bursts_of, visits_of


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0, 0, 0, 8, 8, 8, 16, 16, 16], Visits(1, 3)),
        ([0, 8, 0, 8, 16, 24, 16, 24], Visits(2, 2)),
        ([0, 8, 16, 24], Visits(1, 1)),
        ([0, 0, 0, 0], None),
        ([0, 8, 0, 8], None),
        ([0], None),
        ([], None),
        ([0, 8, 0, 16], None),
        ([0, 8, 8, 0, 16, 24], None),
    ],
    ids=["rows inside", "group", "stream", "one panel", "one group", "step", "none", "torn", "odd"],
)
def test_orders_are_recognised(offsets: list[int], expected: Visits | None) -> None:
    assert visits_of(offsets) == expected


@given(
    n_groups=st.integers(2, 4),
    n_panels=st.integers(1, 5),
    n_visits=st.integers(2, 5),
    size=st.integers(1, 64),
)
def test_every_regular_order_is_recognised(
    n_groups: int, n_panels: int, n_visits: int, size: int
) -> None:
    offsets = [
        (group * n_panels + panel) * size
        for group in range(n_groups)
        for _ in range(n_visits)
        for panel in range(n_panels)
    ]
    assert visits_of(offsets) == Visits(n_panels, n_visits)


@given(
    extents=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    n_lines=st.integers(1, 300),
    n_visits=st.integers(1, 20),
    at_once=st.integers(1, 64),
)
def test_the_visits_prefetch_every_line_of_the_next_panel(
    extents: list[int], n_lines: int, n_visits: int, at_once: int
) -> None:
    bursts = bursts_of(extents, n_lines, n_visits, at_once)
    assert extents[bursts.loop] % bursts.n_parts == 0
    outer = extents[: bursts.loop]
    rounds = [range(extent) for extent in outer]
    asked = []
    for visit in range(n_visits):
        burst = 0
        for _ in itertools.product(*rounds, range(bursts.n_parts)):
            first = (visit * bursts.n_bursts + burst) * bursts.n_lines
            asked += range(first, first + bursts.n_lines)
            burst += 1
        assert burst == bursts.n_bursts
    assert len(set(asked)) == len(asked)
    assert set(asked) >= set(range(n_lines))
    if math.prod(extents) >= n_lines:
        assert bursts.n_lines <= at_once


def test_the_outermost_loop_with_enough_rounds_prefetches() -> None:
    # 128 lines in 8 bursts of 16: the first loop has rounds enough, cut into 8 parts.
    assert vars(bursts_of([64, 8], 1024, 8, 16)) == {
        "loop": 0,
        "n_parts": 8,
        "n_bursts": 8,
        "n_lines": 16,
    }
    # Three rounds are too few, three by four will do.
    assert vars(bursts_of([3, 64], 160, 1, 16)) == {
        "loop": 1,
        "n_parts": 4,
        "n_bursts": 12,
        "n_lines": 14,
    }
    # All at once: before anything is summed.
    assert bursts_of([64, 8], 1024, 8, 1 << 16).n_bursts == 1
