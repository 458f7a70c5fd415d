from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.micro.finals import COLUMNS, choices, table

THREE, ALL_SAME, ALL_CHANGING, BEST = COLUMNS


def found(recorded_ms: list[float], same_ms: list[float], changing_ms: list[float]) -> Any:
    rounds = 1 + 0.001 * np.random.default_rng(0).normal(size=(len(recorded_ms), 12))
    return {
        "recorded_ms": recorded_ms,
        "same_ms": (rounds * np.array(same_ms)[:, None]).tolist(),
        "changing_ms": (rounds * np.array(changing_ms)[:, None]).tolist(),
    }


def test_a_fourth_record_that_is_faster_is_found_by_all_only() -> None:
    ratios = choices(found([1.0, 1.1, 1.2, 1.3], [2, 2.1, 2.2, 1], [2, 2.1, 2.2, 1]))
    assert ratios[THREE] == pytest.approx(1.0, abs=0.01)
    assert ratios[ALL_SAME] == ratios[ALL_CHANGING] == ratios[BEST]
    assert ratios[BEST] == pytest.approx(0.5, abs=0.01)


def test_what_suffers_from_changing_weights_is_seen_by_changing_them_only() -> None:
    each = found([1.0, 1.1, 1.2, 1.3], [1, 1.1, 1.2, 1.3], [4, 3, 2, 1])
    ratios = choices(each)
    assert ratios[ALL_SAME] == pytest.approx(1.0, abs=0.01)
    assert ratios[THREE] == pytest.approx(0.5, abs=0.01)
    assert ratios[ALL_CHANGING] == pytest.approx(0.25, abs=0.01)
    assert "| 4 | 1 | 0.500 | 1.000 | 0.250 | 0.250 |" in table([each])
