"""Limits of GPUs: no valid program breaks them, and most invalid ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import Target, contexts_of, functions_as_tasks, te_workload
from tvm_adaptive.search_strategy.knobs import Choice, KnobSpace, Limit, Point, Tile
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.strategy import AdaptiveSearch

# Without matrix units, whose intrinsics take ten seconds to import.
GPU = {
    "kind": "cuda",
    "arch": "sm_61",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
}
N_DRAWN = 120


@pytest.fixture
def open_sketches(tmp_path: Path) -> Any:
    def open_(name: str, size: int = 0) -> Sketches:
        tasks = functions_as_tasks(te_workload(name, size), Target(GPU))
        (context,) = contexts_of(tasks, str(tmp_path), AdaptiveSearch(), 0)
        return Sketches(context, context.space_generator.generate_design_space(context.mod))

    return open_


# A product, a window, operands of one use each, reductions; the others are of these kinds.
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("GRP", "T2D", "C3D", "TBG")]


@pytest.mark.parametrize("name", ["GMM", "C2D", "DEP", "SFM", *OTHERS])
def test_no_valid_program_breaks_a_limit_and_most_invalid_ones_do(
    open_sketches: Any, name: str
) -> None:
    sketches, rng = open_sketches(name), np.random.default_rng(0)
    limited = sketches.space
    unlimited = KnobSpace(limited.sketches, limited.names)
    drawn = [unlimited.draw(rng) for _ in range(N_DRAWN)]
    found = sketches.replay(drawn, rng)
    assert all(limited.allows(each[0]) for each in found if each is not None)
    invalid = [point for point, each in zip(drawn, found, strict=True) if each is None]
    n_refused = sum(not limited.allows(point) for point in invalid)
    # Reductions across threads split no loop into tiles, so that nothing bounds their decisions.
    assert n_refused > len(invalid) / 2 or name == "SFM"
    allowed = [limited.draw(rng) for _ in range(N_DRAWN)]
    n_valid = sum(each is not None for each in sketches.replay(allowed, rng))
    assert n_valid >= N_DRAWN / 10


def test_a_limit_bounds_a_sum_of_sizes() -> None:
    # Places 0 and 1 are one extent, 2 and 3 a window of as many steps and a size of its own.
    limit = Limit(sizes=((((0, 1),),), (((2,), (3,)),)), least=4, most=9)
    assert limit.allows((2, 3, 1, 3))
    assert not limit.allows((1, 2, 1, 1))
    assert not limit.allows((2, 3, 2, 3))
    assert limit.allows((1, 2, 1, 2))


def test_draws_and_variations_keep_to_the_limits() -> None:
    tile, rng = Tile(64, 3), np.random.default_rng(0)
    space = KnobSpace([[tile, Choice((1.0, 1.0))]], limits=[[Limit(((((1,),),),), 8, 16)]])
    points = [space.draw(rng) for _ in range(50)]
    assert {point.vector[1] for point in points} == {8, 16}
    assert not space.allows(Point(0, (1, 4, 16, 0)))


def test_where_nothing_is_within_the_limits_a_draw_still_ends() -> None:
    space = KnobSpace([[Tile(4, 2)]], limits=[[Limit(((((0,),),),), 100, 200)]])
    assert not space.allows(space.draw(np.random.default_rng(0)))
