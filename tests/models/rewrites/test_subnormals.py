"""Weights next to zero, which processors compute slowly with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.rewrites.test_pointwise import drawn, network_of
from tvm_adaptive._tvm import (
    Constant,
    VirtualMachine,
    bindings_of,
    data_of_constant,
    device,
    handle,
    relax,
    tensor,
)
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.subnormals import without_subnormals
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
TINY = float(np.finfo(np.float32).tiny)


def constants_of(mod: Any) -> list[Any]:
    found: list[Any] = []

    def note(expression: Any) -> None:
        if isinstance(expression, Constant):
            found.append(data_of_constant(expression).numpy())

    for binding in bindings_of(mod["main"]):
        relax.analysis.post_order_visit(binding.value, note)
    return found


def kept(values: Any, operator: Any = relax.op.matmul) -> Any:
    """Return what becomes of a constant that an input is multiplied with."""

    def build(_emit: Any, x: Any) -> Any:
        like = str(values.dtype)
        return operator(relax.op.astype(x, like), relax.const(values, like))

    (found,) = constants_of(without_subnormals(network_of((1, 4), build).mod))
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, TINY / 2, -TINY / 4, 2.0], [1.0, 0.0, 0.0, 2.0]),
        ([1.0, 1e-32, -1e-29, 2.0], [1.0, 0.0, -1e-29, 2.0]),
        # Next to other small numbers, small ones count.
        ([1e-20, 1e-37, TINY, 0.0], [1e-20, 1e-37, TINY, 0.0]),
        ([TINY / 2, 0.0, -0.0, TINY / 2], [0.0, 0.0, -0.0, 0.0]),
        # A mask says nothing of the other numbers.
        ([-np.inf, 1e-20, 1.0, -3.4e38], [-np.inf, 1e-20, 1.0, -3.4e38]),
        ([np.nan, TINY / 2, 1e-20, 1.0], [np.nan, 0.0, 1e-20, 1.0]),
    ],
)
def test_what_changes_no_sum_is_zero(values: list[float], expected: list[float]) -> None:
    found = kept(np.array(values, np.float32))
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_other_types_stay(dtype: str) -> None:
    values = np.array([1, 0, 2, 3], dtype)
    if dtype != "int32":
        values[1] = np.finfo(dtype).tiny / 2
    np.testing.assert_array_equal(kept(values), values)


def test_an_empty_constant_is_a_constant() -> None:
    assert kept(np.zeros((4, 0), np.float32)).size == 0


def test_what_is_no_weight_stays() -> None:
    """As in log(x + 1e-45), whose x is 0 where something is masked."""
    values = np.array([TINY / 2], np.float32)
    np.testing.assert_array_equal(kept(values, relax.op.add), values)


@pytest.mark.parametrize("operator", [relax.op.multiply, relax.op.add])
def test_factors_are_no_terms_of_a_sum(operator: Any) -> None:
    """As of normalisations: what is small beside the largest is not lost."""
    found = kept(np.array([1.0, 1e-35, TINY / 2, 2.0], np.float32), operator)
    np.testing.assert_array_equal(found, np.array([1.0, 1e-35, 0.0, 2.0], np.float32))


def test_a_prepared_network_computes_the_same_without_them() -> None:
    kernel = drawn((24, 8, 3, 3))
    kernel[::3] *= np.float32(1e-39)
    kernel[1::3] *= np.float32(1e-35)

    def build(emit: Any, x: Any) -> Any:
        y = emit(relax.op.nn.conv2d(x, relax.const(kernel), padding=1))
        return relax.op.add(y, relax.const(drawn((1, 24, 1, 1), 2)))

    network, x = network_of((1, 8, 6, 6), build), drawn((1, 8, 6, 6), 9)
    prepared = prepare(network, CPU)
    for values in constants_of(prepared.mod):
        assert not np.any((values != 0) & (np.abs(values) < 1e-30))
    (found,) = run_network(compile_network(prepared, None, CPU), [x])
    plain = relax.build(relax.get_pipeline("zero")(network.mod), "llvm")
    expected = VirtualMachine(plain, device("cpu", 0))["main"](tensor(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_that_all_steps_share_stay_one() -> None:
    """Of a recurrent layer: rounded, widened to whole vectors, and in the layout of schedules."""
    n = 12 * vector_unit_of(CPU).lanes - 1
    values = drawn((n, n))
    values[0, 0] = TINY / 2
    shared = relax.const(values)

    def build(emit: Any, x: Any) -> Any:
        for _ in range(5):
            x = emit(relax.op.tanh(emit(relax.op.matmul(x, shared))))
        return x

    prepared = prepare(network_of((1, n), build), CPU)
    handles: list[int] = []

    def note(expression: Any) -> None:
        if isinstance(expression, Constant) and expression.ty.ndim == 2:
            assert int(expression.ty.shape[1]) == n + 1
            handles.append(handle(expression))

    for binding in bindings_of(prepared.mod["main"]):
        relax.analysis.post_order_visit(binding.value, note)
    assert (len(handles), len(set(handles))) == (5, 1)
