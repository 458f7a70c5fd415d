from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.errors import MACHINE_FAILURE, OUT_OF_TIME
from tvm_adaptive.values.trial import (
    RECORDED_FAILURE_SEC,
    Exploration,
    Prediction,
    StopDecision,
    Timing,
    Trial,
    median_sec,
)


def test_prediction_has_a_length() -> None:
    assert len(Prediction(np.zeros(3), np.ones(3))) == 3


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (np.zeros(3), np.zeros(2)),
        (np.zeros((3, 1)), np.zeros((3, 1))),
        (np.zeros(()), np.zeros(())),
    ],
)
def test_prediction_rejects_other_shapes(mean: np.ndarray, std: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"same shape \(n,\)"):
        Prediction(mean, std)


def test_stop_decision_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        StopDecision(stop=True, reason="")


@pytest.mark.parametrize("epsilon", [-0.01, 1.01, float("nan")])
def test_exploration_is_a_share(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon must be in \[0, 1\]"):
        Exploration(epsilon=epsilon, reason="fixed")


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0])
def test_exploration_accepts_both_ends(epsilon: float) -> None:
    assert Exploration(epsilon=epsilon, reason="fixed").epsilon == epsilon


@pytest.mark.parametrize(
    "record",
    [
        Prediction(np.zeros(1), np.zeros(1)),
        StopDecision(stop=False, reason="more"),
        Timing(1e-3, 1e-5, 300, 6, "precise", 0.4),
        Exploration(epsilon=0.1, reason="fixed"),
        Trial((1e-3,)),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_are_frozen(record: object) -> None:
    name = dataclasses.fields(record)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        setattr(record, name, None)


@pytest.mark.parametrize(
    ("run_secs", "expected"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([1.0, 2.0], 1.5),
        ([1e10], math.nan),
        ([0.0], math.nan),
        ([-1.0, -2.0], math.nan),
        ([math.inf], math.nan),
        ([math.nan], math.nan),
        ([], math.nan),
        (None, math.nan),
    ],
)
def test_what_a_trial_took(run_secs: list[float] | None, expected: float) -> None:
    assert median_sec(run_secs) == pytest.approx(expected, nan_ok=True)


def ran(*seconds: float, error: str | None = None) -> Any:
    return SimpleNamespace(run_secs=list(seconds) or None, error_msg=error)


@pytest.mark.parametrize(
    ("result", "seconds", "recorded"),
    [
        (ran(1e-3, 9e-3, 2e-3), 2e-3, [1e-3, 9e-3, 2e-3]),
        (ran(error="a segmentation fault"), math.nan, [RECORDED_FAILURE_SEC]),
        (ran(1e-3, error="a wrong result"), math.nan, [RECORDED_FAILURE_SEC]),
        (ran(), math.nan, [RECORDED_FAILURE_SEC]),
        (ran(0.0), math.nan, [0.0]),
    ],
)
def test_a_result_with_a_message_has_no_time(
    result: Any, seconds: float, recorded: list[float]
) -> None:
    trial = Trial.of(result)
    assert trial.seconds == pytest.approx(seconds, nan_ok=True)
    assert trial.recorded_secs == recorded
    assert not trial.is_untried


def test_the_builders_message_comes_first() -> None:
    trial = Trial.of(ran(error="not run"), SimpleNamespace(error_msg="not built"))
    assert trial.failure == "not built"


@pytest.mark.parametrize("message", [OUT_OF_TIME, f"{MACHINE_FAILURE}no process"])
def test_what_was_not_tried_is_no_failure(message: str) -> None:
    assert Trial.of(ran(error=message)).is_untried
