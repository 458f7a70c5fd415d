import dataclasses

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.replay import draw
from tvm_adaptive.testing.synthetic import SyntheticArm, record_arms


def arms(n, spread=0.3, failing=0.05):
    return tuple(
        SyntheticArm(f"arm{k}", 9.0 + k, 1.0 + k, 20.0, spread=spread, failing=failing)
        for k in range(n)
    )


RECORDING = record_arms(arms(3), n_trials=40, batch=8)


def test_a_seed_is_one_course_of_events():
    first, again, other = draw(RECORDING, 1), draw(RECORDING, 1), draw(RECORDING, 2)
    for a, b, c in zip(first.tasks, again.tasks, other.tasks, strict=True):
        np.testing.assert_array_equal(a.latencies_ms, b.latencies_ms)
        assert not np.array_equal(a.latencies_ms, c.latencies_ms, equal_nan=True)


@pytest.mark.parametrize("seed", range(10))
def test_trials_stay_within_two_rounds_and_keep_their_cost(seed):
    n_trials = np.arange(1.0, 41.0)
    numbered = dataclasses.replace(
        RECORDING.tasks[0], latencies_ms=n_trials, trial_sec=10.0 * n_trials
    )
    recording = dataclasses.replace(RECORDING, tasks=(numbered,))
    (task,) = draw(recording, seed).tasks
    np.testing.assert_array_equal(np.sort(task.latencies_ms), n_trials)
    np.testing.assert_array_equal(task.trial_sec, 10.0 * task.latencies_ms)
    assert np.abs(task.latencies_ms - n_trials).max() < 2 * 8
    assert not np.array_equal(task.latencies_ms, n_trials)


def test_each_task_comes_from_one_of_the_recordings():
    fast = arms(12, spread=0.0, failing=0.0)
    slow = tuple(
        dataclasses.replace(arm, floor_ms=2 * arm.floor_ms, start_ms=2 * arm.start_ms)
        for arm in fast
    )
    pair = [record_arms(each, n_trials=16, seed=k) for k, each in enumerate((fast, slow))]
    drawn = draw(pair, seed=0)
    finals = [[task.final_ms for task in recording.tasks] for recording in (*pair, drawn)]
    is_first = np.isclose(finals[2], finals[0])
    is_second = np.isclose(finals[2], finals[1])
    assert (is_first ^ is_second).all()
    assert is_first.any()
    assert is_second.any()


def test_recordings_of_different_networks_are_refused():
    other = record_arms(arms(2), n_trials=16)
    with pytest.raises(InvalidOptionError, match=r"the same tasks.*arm2"):
        draw([RECORDING, other], 0)
    with pytest.raises(InvalidOptionError, match="at least one recording"):
        draw([], 0)
