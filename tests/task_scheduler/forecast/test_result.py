import dataclasses
import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.forecast.result import Forecast, ThroughputHistory, unchanged


def history(values, expected_peak=None):
    return ThroughputHistory(np.asarray(values, dtype=float), expected_peak)


def test_what_a_history_knows():
    known = history([0.0, 0.0, 2.0, 2.0, 3.0])
    assert (len(known), known.incumbent, known.first_success) == (5, 3.0, 3)
    np.testing.assert_array_equal(known.records, [2.0, 3.0])


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_a_history_without_a_success(values):
    known = history(values)
    assert (known.incumbent, known.first_success, len(known.records)) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], r"has shape \(n,\), but this one has \(1, 1\)"),
        ([1.0, np.inf], "give failed trials as 0"),
        ([np.nan, 1.0], "give failed trials as 0"),
        ([-1.0, 1.0], "give failed trials as 0"),
        ([2.0, 1.0], "accumulate the maximum first"),
    ],
)
def test_what_is_no_history(values, message):
    with pytest.raises(ValueError, match=message):
        history(values)


@pytest.mark.parametrize("peak", [0.0, -1.0, np.inf, np.nan])
def test_what_is_no_peak(peak):
    with pytest.raises(
        InvalidOptionError, match="expected_peak must be positive and finite but got"
    ):
        history([1.0], peak)


@pytest.mark.parametrize(
    ("peak", "gain"), [(None, math.inf), (6.0, 1.5), (4.0, math.inf), (1.0, math.inf)]
)
def test_what_is_expected_counts_until_it_is_reached(peak, gain):
    assert history([4.0], peak).expected_gain == gain


def test_the_expected_drop_is_converted_draw_by_draw():
    # Stays, or doubles its throughput: half of the latency in half of the cases.
    drawn = Forecast(3.0, np.array([2.0, 4.0]), incumbent=2.0)
    assert drawn.expected_drop == pytest.approx(0.25)
    assert dataclasses.replace(drawn, exact_drop=0.2).expected_drop == 0.2
    assert unchanged(history([3.0])).expected_drop == 0.0
    assert unchanged(history([0.0])).expected_drop == 0.0


def test_quantiles_are_those_of_the_samples():
    forecast = Forecast(1.25, np.array([1.0, 2.0, 1.0, 1.0]), 1.0)
    np.testing.assert_array_equal(forecast.quantile([0.0, 0.5, 1.0]), [1.0, 1.0, 2.0])
    assert math.isclose(unchanged(history([3.0])).mean, 3.0)
