from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import te
from tvm.target import Target

from tvm_adaptive._tvm import args_info_of
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.runner import measure
from tvm_adaptive.runner.measure import MeasureOptions
from tvm_adaptive.runner.playoff import worker
from tvm_adaptive.runner.playoff.worker import Kernel, time_once
from tvm_adaptive.runner.rotating_weights import LEAST_BYTES, Arena, is_worth_rotating
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.values.trial_log import BatchFacts

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
BUFFERS = st.lists(
    st.tuples(st.sampled_from(["float32", "float64", "int8"]), SHAPES), min_size=1, max_size=4
)


@given(BUFFERS)
def test_sets_have_their_shapes_start_at_cache_lines_and_share_nothing(buffers):
    sets = Arena(n_bytes=1 << 14).rotation(buffers)
    assert len(sets) >= 1
    taken = []
    for arrays in sets:
        for (dtype, shape), array in zip(buffers, arrays, strict=True):
            assert (str(array.dtype), array.shape) == (dtype, shape)
            assert array.flags.c_contiguous
            assert array.ctypes.data % 64 == 0
            taken.append((array.ctypes.data, array.ctypes.data + array.nbytes))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))


def test_the_memory_is_used_up_and_shared_by_layouts():
    arena = Arena(n_bytes=1 << 20)
    first = arena.rotation([("float32", (64, 64))])
    assert len(first) == (1 << 20) // (64 * 64 * 4)
    other = arena.rotation([("float32", (2, 64, 32))])
    assert other[0][0].ctypes.data == first[0][0].ctypes.data
    (((large,),)) = arena.rotation([("float32", (1 << 19,))])
    assert large.nbytes == 1 << 21
    assert np.isfinite(large).all()
    assert large.std() > 0.1


def test_small_weights_and_odd_types_stay_where_they_are():
    n = LEAST_BYTES // 4
    assert is_worth_rotating([("float32", (n,))])
    assert not is_worth_rotating([("float32", (n - 1,))])
    assert not is_worth_rotating([])
    assert not is_worth_rotating([("no_such_type", (n,))])
    assert not is_worth_rotating([("bfloat16", (n, n))])


def scaled_weights(n: int) -> tvm.IRModule:
    x = te.placeholder((1,), name="x")
    weights = te.placeholder((n,), name="weights")
    y = te.compute((n,), lambda i: weights[i] * x[0], name="y")
    function = te.create_prim_func([x, weights, y]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function.with_attr("layout_free_buffers", [1])})


@pytest.mark.parametrize(("weights", "changes"), [((1,), True), ((), False)])
def test_every_run_gets_other_weights(weights, changes, tmp_path, monkeypatch):
    # Done in this process, it would bind all tests after it to one core.
    monkeypatch.setattr(worker, "give_threads_cores", lambda: None)
    n = LEAST_BYTES // 4
    mod = scaled_weights(n)
    assert weights_of(mod) == (1,)
    path = str(tmp_path / "kernel.so")
    tvm.build(mod, target=Target("llvm")).export_library(path)
    buffers = (("float32", (1,)), ("float32", (n,)), ("float32", (n,)))
    kernel = Kernel(path, "cpu", buffers, weights=weights)
    assert time_once(kernel, 0, 0.1) > 0
    loaded = worker._loaded[kernel]
    seen = set()
    for _ in range(3):
        loaded.timer(1, 1)
        seen.add(loaded.args[2].numpy().tobytes())
    assert len(seen) == (3 if changes else 1)
    start = worker._start_values(kernel, 0, False)
    assert np.array_equal(loaded.args[0].numpy(), start[0]), "only weights change"


class Calls:
    """A timer of which it is known whose weights it rotates."""

    def __init__(self):
        self.weights = []

    def __call__(self, _module, _args, weights):
        self.weights.append(tuple(weights))
        return lambda number, repeat: [1e-3] * repeat


@pytest.mark.parametrize(
    ("rule", "elsewhere", "expected"),
    [("precision", False, [(1,)]), ("paper", False, []), ("precision", True, [()])],
)
def test_candidates_are_timed_with_other_weights_by_adaptive_rules_on_this_cpu(
    rule, elsewhere, expected, tmp_path, monkeypatch
):
    calls = Calls()
    monkeypatch.setattr(measure, "give_threads_cores", lambda: None)
    monkeypatch.setattr(measure, "rotating_timer_of", calls)
    monkeypatch.setattr(measure.device_session, "is_elsewhere", lambda: elsewhere)
    mod, path = scaled_weights(8), str(tmp_path / "kernel.so")
    tvm.build(mod, target=Target("llvm")).export_library(path)
    options = MeasureOptions(rule=make_rule(rule)).for_batch(
        BatchFacts(weights=weights_of(mod)), noise=0.05
    )
    infos = [info.as_json() for info in args_info_of(mod)]
    timing = measure.measure_artifact(path, "cpu", infos, options)
    assert calls.weights == expected
    assert (timing.mean_sec == 1e-3) == bool(expected)
