import numpy as np
import pytest

from tvm_adaptive.cost_model.ceilings import ceilings_of
from tvm_adaptive.cost_model.features import FEATURE_LENGTH, MAX_STORES, log_work_of, to_rows
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions


def tasks(n=10, n_trials=40):
    """Tasks that all reach the same operations per second."""
    return {str(i): (1e-6 * 2.0**i, n_trials, i * np.log(2.0)) for i in range(n)}


def test_a_task_of_few_trials_has_headroom_where_others_are_faster():
    slow = {**tasks(), "few": (8e-5, 4, 4 * np.log(2.0))}
    ceiling_sec = ceilings_of(slow)["few"]
    # Five times as slow as the line, of which a third is what its own trials say.
    assert 1.6e-5 < ceiling_sec < 4e-5
    more = ceilings_of({**tasks(), "few": (8e-5, 12, 4 * np.log(2.0))})["few"]
    assert ceiling_sec < more < 8e-5
    assert ceilings_of({**tasks(), "few": (8e-5, 20, 4 * np.log(2.0))})["few"] == pytest.approx(
        8e-5
    )


def test_tasks_of_other_machines_tell_the_slope_alone():
    """Ours are a tenth as fast; one of three is five times behind the others."""

    def clock_of(key):
        return key.startswith("ours")

    ours = {
        "ours": (1e-5 * 2.0**4, 40, 4 * np.log(2.0)),
        "ours too": (1e-5 * 2.0**6, 40, 6 * np.log(2.0)),
        "ours, few": (5e-5 * 2.0**5, 4, 5 * np.log(2.0)),
    }
    found = ceilings_of({**tasks(), **ours}, clock_of)
    assert found["ours"] == pytest.approx(ours["ours"][0])
    assert 0.3 < found["ours, few"] / ours["ours, few"][0] < 0.5
    faster = {key: (0.1 * sec, n, work) for key, (sec, n, work) in tasks().items()}
    assert ceilings_of({**faster, **ours}, clock_of)["ours, few"] == pytest.approx(
        found["ours, few"]
    )
    assert ceilings_of({**faster, **ours})["ours, few"] < 0.5 * found["ours, few"]


def test_tasks_without_operations_neither_bend_the_line_nor_are_judged_by_it():
    work = {key: (sec, n, log_work + 14.0) for key, (sec, n, log_work) in tasks().items()}
    young = {
        "few": (8e-5, 4, 14.0 + 4 * np.log(2.0)),
        "on the line": (1e-6 * 2.0**9, 4, 14.0 + 9 * np.log(2.0)),
    }
    copies = {"copy": (1e-5, 40, 0.0), "young copy": (1e-3, 4, 0.0)}
    found = ceilings_of({**work, **young, **copies})
    assert found == {**ceilings_of({**work, **young}), "copy": 1e-5, "young copy": 1e-3}
    assert found["on the line"] / young["on the line"][0] > 0.9
    assert found["few"] / young["few"][0] < 0.5


def test_what_was_measured_is_possible():
    fast = {**tasks(), "few": (1e-6, 4, 4 * np.log(2.0))}
    assert ceilings_of(fast)["few"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "given", [{}, tasks(7, 4), {k: (s, 4, 0.0) for k, (s, _, _) in tasks().items()}]
)
def test_without_other_tasks_the_best_is_the_ceiling(given):
    assert ceilings_of(given) == {key: best_sec for key, (best_sec, _, _) in given.items()}


def test_work_is_what_all_stores_compute():
    blocks = np.zeros((2, 3, FEATURE_LENGTH), dtype=np.float32)
    blocks[0, 0, 0] = np.log2(1 + 1000)
    blocks[0, 1, 2] = np.log2(1 + 500)
    rows = to_rows(list(blocks))
    assert rows.shape == (2, MAX_STORES * FEATURE_LENGTH)
    np.testing.assert_allclose(log_work_of(rows), [np.log(1501.0), 0.0], rtol=1e-5)
    assert log_work_of(np.ones((3, 5), dtype=np.float32)).tolist() == [0.0] * 3


def test_a_task_with_four_trials_does_not_look_finished():
    """One of nine alike tasks was tried four times only, by slow candidates."""
    rng = np.random.default_rng(0)

    def candidates(n, log_flops):
        blocks = np.zeros((n, 1, FEATURE_LENGTH), dtype=np.float32)
        blocks[:, 0, 0] = log_flops
        blocks[:, 0, 20] = rng.uniform(size=n)
        return to_rows(list(blocks)), 1e-9 * 2.0**log_flops * np.exp(2 * blocks[:, 0, 20] + 0.1)

    surrogate = Surrogate(SurrogateOptions(), seed=0)
    for log_flops in range(10, 20):
        rows, seconds = candidates(40, float(log_flops))
        surrogate.add(str(log_flops), rows, seconds)
    rows, seconds = candidates(80, 15.5)
    slow = np.argsort(-seconds)[:4]
    surrogate.add("few", rows[slow], seconds[slow])
    surrogate.refit_if_due()
    posterior = surrogate.posterior("few", rows)
    # Nearly e^2 times as fast as its best is possible.
    assert posterior.mean.max() > 2.0
