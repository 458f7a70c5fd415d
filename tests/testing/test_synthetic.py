import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.synthetic import SyntheticArm, record_arms


def test_the_curve_by_hand():
    arm = SyntheticArm("a", start_ms=9.0, floor_ms=1.0, tau_trials=10.0)
    assert arm.curve_ms(np.array([0.0, 10.0, 1e9])) == pytest.approx([9.0, 1 + 8 / math.e, 1.0])


def test_without_noise_a_recording_is_the_curve():
    arm = SyntheticArm("a", 9.0, 1.0, 10.0, weight=3.0, sec_per_trial=0.25, overhead_sec=2.0)
    recording = record_arms((arm,), n_trials=20, batch=8)
    (task,) = recording.tasks
    np.testing.assert_allclose(task.latencies_ms, arm.curve_ms(np.arange(20.0)))
    assert task.round_sizes.tolist() == [8, 8, 4]
    assert task.total_sec == pytest.approx(20 * 0.25 + 3 * 2.0)


def test_noise_is_seeded_slower_and_fails_at_its_rate():
    arm = SyntheticArm("a", 1.0, 1.0, 10.0, spread=0.5, failing=0.25)
    first, again, other = (
        record_arms((arm,), n_trials=4000, seed=seed).tasks[0].latencies_ms for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other, equal_nan=True)
    # Three standard deviations of a share of 0.25, and of an exponential's mean.
    assert np.isnan(first).mean() == pytest.approx(0.25, abs=0.021)
    assert np.nanmin(first) >= 1.0
    assert np.nanmean(first) == pytest.approx(1.5, abs=0.03)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"start_ms": 1.0, "floor_ms": 2.0}, "0 < floor_ms <= start_ms but got 2.0 and 1.0"),
        ({"start_ms": 1.0, "floor_ms": 0.0}, "0 < floor_ms"),
        ({"start_ms": 2.0, "floor_ms": 1.0, "tau_trials": 0.0}, "tau_trials must be above 0"),
    ],
)
def test_impossible_arms_are_refused(options, match):
    with pytest.raises(InvalidOptionError, match=match):
        SyntheticArm("a", **{"tau_trials": 5.0, **options})
