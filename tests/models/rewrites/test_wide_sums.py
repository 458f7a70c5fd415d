"""Sums of half precision: as exact as those of frameworks, whichever way a network came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import IRModule, bindings_of, handle, relax
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.models.network import operator_of
from tvm_adaptive.models.rewrites.wide_sums import with_wide_sums
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.agreement import numpy_dtype

op = relax.op


def module_of(function: Any, shape: tuple[int, ...], dtype: str = "float16") -> IRModule:
    variable = relax.Var("x", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [variable]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(function(variable)))
        builder.emit_func_output(result)
    return builder.get()


def result_of(function: Any, x: np.ndarray) -> Any:
    mod = module_of(function, x.shape, str(x.dtype))
    network = network_of_imported("net", mod, {"x": x.shape})
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


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_running_sums(dtype: str | None) -> None:
    found = result_of(lambda x: op.cumsum(x, 0, dtype=dtype), np.ones(4096, "float16"))
    assert found.dtype == (dtype or "float16")
    # More are not whole numbers of half precision, one by one.
    np.testing.assert_array_equal(found[:2048], np.arange(1, 2049))
    assert found[-1] == 4096


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_products(dtype: str | None) -> None:
    x, weight = np.ones((1, 4096), "float16"), np.ones((4096, 1), "float16")
    found = result_of(lambda x: op.matmul(x, relax.const(weight), out_dtype=dtype), x)
    assert found.dtype == (dtype or "float16")
    assert found == 4096


def test_einsum() -> None:
    x, weight = np.ones((1, 4096), "float16"), np.ones((4096, 1), "float16")
    found = result_of(lambda x: op.einsum((x, relax.const(weight)), "ij,jk->ik"), x)
    assert (found.dtype, found) == ("float16", 4096)


def test_convolutions() -> None:
    weight = relax.const(np.ones((8, 512, 3, 3), "float16"))
    found = result_of(lambda x: op.nn.conv2d(x, weight), np.ones((1, 512, 5, 5), "float16"))
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, 4608.0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layer_norm", "float16"),
        ("layer_norm", "bfloat16"),
        ("group_norm", "float16"),  # Relax refuses it of bfloat16
        ("instance_norm", "float16"),
        ("instance_norm", "bfloat16"),
    ],
)
def test_normalisations(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (8 * rng.standard_normal((2, 8, 6, 5))).astype(numpy_dtype(dtype))
    ones, zeros = (relax.op.full((n,), relax.const(v, dtype), dtype) for n, v in ((8, 1), (8, 0)))
    functions = {
        "layer_norm": lambda x: op.nn.layer_norm(op.permute_dims(x, [0, 2, 3, 1]), ones, zeros, -1),
        "group_norm": lambda x: op.nn.group_norm(x, ones, zeros, 4, 1, [2, 3]),
        "instance_norm": lambda x: op.nn.instance_norm(x, ones, zeros, 1, [2, 3]),
    }
    found = result_of(functions[name], x)
    assert found.dtype == x.dtype
    exact = x.astype("float64")
    if name == "layer_norm":
        exact, axes = exact.transpose(0, 2, 3, 1), (3,)
    elif name == "group_norm":
        exact, axes = exact.reshape(2, 4, 2, 6, 5), (2, 3, 4)
    else:
        axes = (2, 3)
    exact = (exact - exact.mean(axes, keepdims=True)) / exact.std(axes, keepdims=True)
    np.testing.assert_allclose(
        found.astype("float64"), exact.reshape(found.shape), rtol=0.01, atol=0.01
    )


def calls_of(mod: IRModule, operator: str) -> list[Any]:
    values = [binding.value for binding in bindings_of(mod["main"])]
    return [value for value in values if operator_of(value) == operator]


def test_a_weight_of_several_steps_is_converted_once() -> None:
    weight = relax.const(np.eye(4, dtype="float16"))
    mod = module_of(lambda x: op.matmul(op.matmul(x, weight), weight), (4, 4))
    found = with_wide_sums(mod, keeps_operands=False)
    first, second = (call.args[1] for call in calls_of(found, "relax.matmul"))
    assert str(first.ty.dtype) == "float32"
    assert handle(first) == handle(second)


def test_units_of_gpus_get_halves() -> None:
    kernel = relax.const(np.ones((8, 4, 3, 3), "float16"))
    mod = module_of(lambda x: op.nn.conv2d(x, kernel, padding=1, groups=1), (1, 4, 6, 6))
    mod = with_wide_sums(mod, keeps_operands=True)
    (call,) = calls_of(mod, "relax.nn.conv2d")
    assert [str(each.ty.dtype) for each in (*call.args, call)] == ["float16", "float16", "float32"]
    assert [int(n) for n in call.attrs.padding] == [1, 1, 1, 1]
    (result,) = calls_of(mod, "relax.astype")
    assert str(result.ty.dtype) == "float16"


def test_what_has_no_halves_stays() -> None:
    mod = module_of(op.sum, (2, 3), "float32")
    assert with_wide_sums(mod, keeps_operands=False) is mod
