import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.recording import Recording, TaskRecording


def make_task(name="conv", latencies=(4.0, np.nan, 3.0, 2.0, 5.0), sizes=(3, 2), **changes):
    n = len(latencies)
    options = {
        "name": name,
        "weight": 2.0,
        "flop": 1e9,
        "latencies_ms": np.array(latencies, dtype=float),
        "trial_sec": np.linspace(0.5, 1.0, n),
        "round_sizes": np.array(sizes, dtype=np.int64),
        "overhead_sec": np.arange(1.0, len(sizes) + 1),
    }
    return TaskRecording(**{**options, **changes})


def make_recording(*tasks, **changes):
    options = {"network": "net", "batch": 3, "machine": "two cores", "tvm": "0.27", "seed": 5}
    return Recording(tasks=tasks or (make_task(),), **{**options, **changes})


def test_what_a_batch_costs():
    task = make_task()
    assert task.slot_sec(0, 3) == pytest.approx(1.0 + 0.5 + 0.625 + 0.75)
    assert task.slot_sec(0, 1) == pytest.approx(1.0 + 0.5)
    assert task.slot_sec(1, 4) == pytest.approx(1.0 + 0.625 + 0.75 + 0.875)
    assert task.slot_sec(3, 5) == pytest.approx(2.0 + 0.875 + 1.0)
    assert task.slot_sec(5, 5) == 0.0
    assert task.total_sec == pytest.approx(task.slot_sec(0, 3) + task.slot_sec(3, 5))


def test_totals():
    failed = make_task("broken", latencies=[np.nan] * 5)
    recording = make_recording(make_task(), failed)
    assert recording.final_ms == pytest.approx(2 * 2.0)
    assert recording.n_trials == 10
    assert not failed.is_valid
    assert np.isnan(failed.final_ms)
    assert np.isnan(failed.slowest_ms)
    assert make_task().slowest_ms == 5.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trial_sec": np.ones(4)}, "trial_sec and latencies_ms differ"),
        ({"overhead_sec": np.ones(3)}, "overhead_sec and round_sizes differ"),
        ({"round_sizes": np.array([3, 3])}, "do not sum"),
        ({"round_sizes": np.array([5, 0])}, "a round has no trials"),
        ({"latencies_ms": np.array([1.0, 0.0, 1.0, 1.0, 1.0])}, "latency is not > 0"),
        ({"latencies_ms": np.array([1.0, np.inf, 1.0, 1.0, 1.0])}, "latency is not > 0"),
        ({"trial_sec": -np.ones(5)}, "seconds are negative"),
        ({"overhead_sec": np.array([np.nan, 1.0])}, "not finite"),
        ({"flop": 0.0}, "flop >= 1"),
    ],
)
def test_what_cannot_be_is_refused(changes, problem):
    with pytest.raises(InvalidOptionError, match=f"recording of conv cannot be used: .*{problem}"):
        make_task(**changes)


def test_a_network_needs_distinct_tasks():
    with pytest.raises(InvalidOptionError, match="two tasks have the same name"):
        make_recording(make_task(), make_task())
    with pytest.raises(InvalidOptionError, match="it has no tasks"):
        Recording("net", (), 3, "", "", 0)
    with pytest.raises(InvalidOptionError, match="batch must be at least 1"):
        make_recording(batch=0)
