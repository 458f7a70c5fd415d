import json
import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.decisions import (
    check_decision,
    decision_fields,
    slot_fields,
)
from tvm_adaptive.task_scheduler.slots import Slot


@pytest.fixture
def arms():
    return (
        Arm("a", 1.0, 1.0, np.array([3.0, 2.0]), 1, 4.0),
        Arm("b", 2.0, 1.0, np.empty(0), 0, 0.0, finished=True),
    )


@pytest.mark.parametrize(
    "decision",
    [Decision(0, "x"), Decision(0, "x", n_trials=1), Decision(None, "x", retired=(0, 1))],
)
def test_good_decisions_pass(decision, arms):
    check_decision(decision, arms)
    json.dumps(decision_fields(decision, arms), allow_nan=False)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision(2, "x"), "named arm 2; there are arms 0 to 1"),
        (Decision(-1, "x"), "named arm -1"),
        (Decision(None, "x", retired=(5,)), "named arm 5"),
        (Decision(1, "x"), r"chose arm 1 \(b\), which is finished"),
        (Decision(0, "x", retired=(0,)), r"chose arm 0 \(a\), which is finished"),
        (Decision(0, "x", n_trials=0), "asked for 0 trials; ask for at least 1, or None"),
    ],
)
def test_bad_decisions_are_refused(decision, text, arms):
    with pytest.raises(InvalidOptionError, match=text):
        check_decision(decision, arms)


def test_what_the_journal_keeps_of_a_decision(arms):
    scores = np.array([0.25, math.nan])
    fields = decision_fields(Decision(0, "index", 4, scores, "ms/s", retired=(1,)), arms)
    assert math.isnan(fields["scores"].pop())
    assert fields == {
        "task": "a",
        "task_id": 0,
        "reason": "index",
        "n_asked": 4,
        "n_trials": 2,
        "best_ms": 2.0,
        "gain": 0.25,
        "unit": "ms/s",
        "scores": [0.25],
        "retired": ["b"],
    }


def test_what_the_journal_keeps_of_a_slot(arms):
    slot = Slot(0, 10.0, n_rounds=2, n_trials=8)
    assert slot_fields(slot, arms, 12.5, 7.0) == {
        "task": "a",
        "task_id": 0,
        "n_rounds": 2,
        "n_trials": 8,
        "seconds": 2.5,
        "best_ms": 2.0,
        "weighted_ms": 7.0,
        "finished": False,
    }
