from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tvm_adaptive.report.decisions import (
    Decisions,
    decisions_of,
    difference,
    importances,
    text_of,
)
from tvm_adaptive.report.tables import trial_table
from tvm_adaptive.report.trials import TrialJoiner, TrialRow

ROW = TrialRow("conv", "", "model", 1.0, 0.01, "precise", 0.1, False)


def test_what_a_journal_tells_is_read() -> None:
    event = {"decisions": [[1, [[4, 2], [0]]], None]}
    assert decisions_of(event, 2) == [Decisions(1, ((4, 2), (0,))), None]
    assert decisions_of(event, 3) == [None, None, None]  # some have no result
    assert decisions_of({}, 2) == [None, None]
    assert decisions_of({"decisions": None}, 1) == [None]


def test_only_what_differs_is_said() -> None:
    best = Decisions(0, ((4, 2), (8, 1), (3,)))
    assert difference(best, best) == ""
    assert difference(Decisions(0, ((2, 4), (8, 1), (2,))), best) == "1: 2 x 4; 3: choice 2"
    assert difference(Decisions(2, ((4, 2), (1, 8), (3,))), best) == "sketch 2; 2: 1 x 8"
    assert difference(Decisions(1, ((4, 2),)), best) == "sketch 1"
    assert difference(None, best) == difference(best, None) == ""
    assert text_of((7, 1, 8)) == "7 x 1 x 8"


def made_up(n: int, seed: int = 0) -> list[TrialRow]:
    """Return trials whose time is decided by the second split, and a little by the choice."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        first, second = 2 ** rng.integers(0, 5), 2 ** rng.integers(0, 5)
        choice = int(rng.integers(0, 3))
        ms = float((1 + abs(math.log2(second) - 2)) * (1 + 0.1 * choice) * rng.uniform(0.99, 1.01))
        parts = ((16 // first, int(first)), (16 // second, int(second)), (choice,))
        rows.append(dataclasses.replace(ROW, ms=ms, decisions=Decisions(0, parts)))
    return rows


def test_the_decision_that_matters_comes_first() -> None:
    found = importances(made_up(200))
    assert found[0].decision == "2: split of 16"
    assert found[0].fastest == "4 x 4"
    assert found[0].share > 0.7
    assert sum(each.share for each in found) <= 1.0 + 1e-9
    assert "1: split of 16" not in [each.decision for each in found]


def test_failures_and_other_sketches_are_left_out() -> None:
    rows = made_up(100)
    failed = [dataclasses.replace(row, ms=math.nan) for row in rows]
    others = [dataclasses.replace(ROW, ms=5.0, decisions=Decisions(1, ((2, 2, 4),)))] * 50
    unknown = [dataclasses.replace(row, decisions=None, ms=1e-6) for row in rows]
    assert importances(rows + failed + others + unknown) == importances(rows)


@pytest.mark.parametrize("n", [0, 1, 23])
def test_few_trials_say_nothing(n: int) -> None:
    assert importances(made_up(n)) == []


def test_random_times_have_no_cause() -> None:
    rng = np.random.default_rng(0)
    for n in (60, 200):
        rows = [dataclasses.replace(row, ms=float(rng.uniform(1, 2))) for row in made_up(n)]
        assert importances(rows) == []


def test_equal_times_have_no_cause() -> None:
    assert importances([dataclasses.replace(row, ms=1.0) for row in made_up(60)]) == []


def test_a_round_gives_its_decisions_to_its_trials() -> None:
    joiner = TrialJoiner()
    joiner.add_round({"task": "conv", "n_candidates": 2, "decisions": [[0, [[2, 4]]], None]})
    rows = joiner.add_measured({"task": "conv", "latencies_ms": [2.0, None]}, "")
    assert [row.decisions for row in rows] == [Decisions(0, ((2, 4),)), None]


def test_the_table_says_what_the_fastest_does_otherwise() -> None:
    best = Decisions(0, ((4, 2), (3,)))
    slow = dataclasses.replace(ROW, ms=2.0, decisions=Decisions(0, ((2, 4), (3,))), improves=True)
    fast = dataclasses.replace(ROW, ms=1.0, decisions=best, improves=True)
    failed = dataclasses.replace(ROW, task="other", ms=math.nan)
    text = trial_table([slow, fast, failed])
    assert '"1: 2 x 4"' in text
    assert '"fastest"' in text
    # The words of the last column: of the slow one, the fastest, and one without any success.
    assert trial_table([failed]).count("fastest") == 1  # of the caption
