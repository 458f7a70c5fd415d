"""Sums of half precision: as exact as those of frameworks, whichever way a network came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import relax
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.tuning.target import resolve_target

op = relax.op


def result_of(function: Any, x: np.ndarray) -> Any:
    variable = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", [variable]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(function(variable)))
        builder.emit_func_output(result)
    network = network_of_imported("net", builder.get(), {"x": x.shape})
    target = resolve_target("cpu")
    (found,) = run_network(compile_network(prepare(network, target), None, target), [x])
    return found


def image(value: float, extent: int) -> np.ndarray:
    return np.full((1, 4, extent, extent), value, "float16")


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (lambda x: op.mean(x, [2, 3]), image(1.0, 64), 1.0),
        (lambda x: op.mean(x, [2, 3]), image(1.0, 256), 1.0),
        (lambda x: op.mean(x, [2, 3]), image(2.0, 224), 2.0),
        (lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)), image(1.0, 64), 1.0),
        (lambda x: op.variance(x, [2, 3]), image(1.0, 64), 0.0),
        (lambda x: op.sum(op.nn.softmax(op.reshape(x, [-1]))), image(0.0, 64), 1.0),
    ],
)
def test_reductions(function: Any, x: np.ndarray, expected: float) -> None:
    found = result_of(function, x)
    assert found.dtype == "float16"
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_products(dtype: str | None) -> None:
    x, weight = np.ones((1, 4096), "float16"), np.ones((4096, 1), "float16")
    found = result_of(lambda x: op.matmul(x, relax.const(weight), out_dtype=dtype), x)
    assert found.dtype == (dtype or "float16")
    assert found == 4096


def test_convolutions() -> None:
    weight = relax.const(np.ones((8, 512, 3, 3), "float16"))
    found = result_of(lambda x: op.nn.conv2d(x, weight), np.ones((1, 512, 5, 5), "float16"))
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, 4608.0)
