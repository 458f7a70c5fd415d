"""What builds cost is learnt from the decisions, and shared between builder and search."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_adaptive.search_strategy.knobs import Choice, KnobSpace, Point, Tile
from tvm_adaptive.search_strategy.surrogate_search import OTHER_SEC, BuildCost

SPACE = KnobSpace([[Tile(256, 4), Choice((0.25,) * 4)]])


def build_sec(point: Point) -> float:
    """As unrolling does it: the last of four values costs ten times as much."""
    return 1.0 if point.vector[-1] == 3 else 0.1


def learnt(n: int) -> BuildCost:
    rng = np.random.default_rng(0)
    cost = BuildCost(SPACE)
    for _ in range(n):
        point = SPACE.draw(rng)
        cost.add(point, build_sec(point))
    return cost


def test_the_dear_decision_is_found() -> None:
    rng = np.random.default_rng(1)
    points = [SPACE.draw(rng) for _ in range(60)]
    found = learnt(48).seconds(points)
    assert found is not None
    expected = OTHER_SEC + np.array([build_sec(point) for point in points])
    assert found == pytest.approx(expected, rel=0.35)


def test_a_few_builds_say_nothing() -> None:
    point = Point(0, (256, 1, 1, 1, 0))
    assert learnt(7).seconds([point]) is None
    assert learnt(8).seconds([point]) is not None
    assert learnt(8).seconds([]) is None


def test_later_builds_change_the_forecast() -> None:
    cost = learnt(20)
    dear = Point(0, (1, 1, 1, 256, 3))
    before = cost.seconds([dear])
    for _ in range(40):
        cost.add(dear, 9.0)
    after = cost.seconds([dear])
    assert before is not None
    assert after is not None
    assert after[0] > 3 * before[0]


def test_only_the_latest_builds_are_kept() -> None:
    dear, cheap = Point(0, (1, 1, 1, 256, 3)), Point(0, (256, 1, 1, 1, 0))
    cost = BuildCost(SPACE)
    for point, n in ((dear, 5000), (cheap, 4096)):
        for _ in range(n):
            cost.add(point, build_sec(point))
    points, seconds = cost.carry()
    assert points == [cheap] * 4096
    assert seconds == [0.1] * 4096
    other = BuildCost(SPACE)
    other.resume((points, seconds))
    assert other.carry() == (points, seconds)
