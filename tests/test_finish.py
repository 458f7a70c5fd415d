from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_adaptive.config import FinishConfig
from tvm_adaptive.finish import playoff_reserve_sec


def session(seconds: float | None, left_sec: float) -> Any:
    budget = SimpleNamespace(seconds=seconds, left_sec=left_sec, elapsed_sec=600.0)
    return SimpleNamespace(budget=budget, config=SimpleNamespace(finish=FinishConfig()))


@pytest.mark.parametrize(
    ("seconds", "left_sec", "later_sec", "expected"),
    [
        (600.0, 580.0, 20.0, 20 + 30 + 19.2),  # checks, timings, qualifying
        (80.0, 50.0, 20.0, 15.0),
        (80.0, 15.0, 20.0, 0.0),
        (None, math.inf, 20.0, 20 + 160 + 19.2),
    ],
)
def test_playoffs_leave_a_short_run_time_to_search(
    seconds: float | None, left_sec: float, later_sec: float, expected: float
) -> None:
    found = playoff_reserve_sec(session(seconds, left_sec), 20, later_sec)
    assert found == pytest.approx(expected)
