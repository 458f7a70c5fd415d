"""Reshapes and transposes that cancel each other, and those that move behind other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.models.rewrites.test_pointwise import drawn, network_of
from tvm_adaptive._tvm import IRModule, VirtualMachine, bindings_of, device, relax, tensor
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.views import without_repeated_moves
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
Build = Callable[[Any, Any], Any]


def module(build: Build, shape: tuple[int, ...]) -> IRModule:
    return network_of(shape, build).mod


def names_of(mod: IRModule) -> list[str]:
    calls = [binding.value for binding in bindings_of(mod["main"])]
    return [str(call.op.name) for call in calls if isinstance(call, relax.Call)]


def reshaped(*shapes: tuple[int, ...]) -> Build:
    def build(emit: Any, x: Any) -> Any:
        for shape in shapes:
            x = emit(relax.op.reshape(x, shape))
        return relax.op.exp(x)

    return build


def transposed(*orders: list[int]) -> Build:
    def build(emit: Any, x: Any) -> Any:
        for axes in orders:
            x = emit(relax.op.permute_dims(x, axes))
        return relax.op.exp(x)

    return build


def same(emit: Any, x: Any) -> Any:
    y = emit(relax.op.permute_dims(x, None))
    return relax.op.permute_dims(y, None)


def blocks(emit: Any, x: Any) -> Any:
    """Blocks with channels last, whose residual connections have channels first (ConvNeXt)."""
    residual = emit(relax.op.permute_dims(emit(relax.op.exp(x)), [0, 3, 1, 2]))
    for seed in (1, 2):
        y = emit(relax.op.permute_dims(residual, [0, 2, 3, 1]))
        y = emit(relax.op.reshape(y, (12, 8)))
        y = emit(relax.op.matmul(y, relax.const(drawn((8, 8), seed))))
        y = emit(relax.op.nn.gelu(emit(relax.op.reshape(y, (1, 3, 4, 8)))))
        y = emit(relax.op.permute_dims(y, [0, 3, 1, 2]))
        y = emit(relax.op.multiply(y, relax.const(drawn((8, 1, 1), seed))))
        y = emit(relax.op.multiply(y, relax.const(np.float32(0.5))))
        residual = emit(relax.op.add(residual, y))
    return relax.op.permute_dims(residual, [0, 2, 3, 1])


def gated(emit: Any, x: Any) -> Any:
    """An operand that would have to be transposed as well."""
    y = emit(relax.op.permute_dims(x, [0, 3, 1, 2]))
    gate = emit(relax.op.mean(y, [2, 3], keepdims=True))
    return relax.op.multiply(y, gate)


def broadcast(emit: Any, x: Any) -> Any:
    """A product whose result is an operand for many rows (a gate of tokens)."""
    y = emit(relax.op.matmul(emit(relax.op.mean(x, [1])), relax.const(drawn((8, 8), 1))))
    return relax.op.multiply(x, emit(relax.op.reshape(y, (1, 1, 8))))


def concatenated(first: int, second: int) -> Build:
    """Concatenate what has been concatenated, which is read once more (DenseNet)."""

    def build(emit: Any, x: Any) -> Any:
        y = emit(relax.op.concat(relax.Tuple([x, emit(relax.op.exp(x))]), first))
        return relax.op.concat(relax.Tuple([emit(relax.op.tanh(y)), y, y]), second)

    return build


@pytest.mark.parametrize(
    ("build", "shape", "names"),
    [
        (reshaped((6, 4), (4, 6), (24,)), (2, 12), ["reshape", "exp"]),
        (reshaped((6, 4), (2, 12)), (2, 12), ["exp"]),
        (transposed([1, 0, 2], [0, 2, 1]), (2, 3, 4), ["permute_dims", "exp"]),
        (transposed([1, 2, 0], [2, 0, 1]), (2, 3, 4), ["exp"]),
        (transposed([0, 1, 2]), (2, 3, 4), ["exp"]),
        (transposed([0, -2, -1]), (2, 3, 4), ["exp"]),
        (transposed([-1, 0, 1]), (2, 3, 4), ["permute_dims", "exp"]),
        (transposed([0, -1, 1, 2]), (1, 3, 4, 8), ["exp", "permute_dims"]),
        (same, (2, 3, 4), []),
        (gated, (1, 3, 4, 8), ["permute_dims", "mean", "multiply"]),
        (concatenated(1, -1), (2, 3), ["exp", "concat", "tanh", "concat"]),
    ],
)
def test_what_moves_data_twice_moves_it_once_or_not_at_all(
    build: Build, shape: tuple[int, ...], names: list[str]
) -> None:
    found = names_of(without_repeated_moves(module(build, shape), channels_last=True))
    assert found == [f"relax.{name}" for name in names]


@pytest.mark.parametrize(("second", "n_parts"), [(-1, 5), (1, 5), (0, 3)])
def test_parts_of_parts_along_the_same_axis_are_parts(second: int, n_parts: int) -> None:
    mod = without_repeated_moves(module(concatenated(1, second), (2, 3)), channels_last=True)
    last = [binding.value for binding in bindings_of(mod["main"])][-1]
    assert len(last.args[0].fields) == n_parts


@pytest.mark.parametrize("channels_last", [True, False])
def test_blocks_with_channels_last_have_no_transposes_left(*, channels_last: bool) -> None:
    found = names_of(
        without_repeated_moves(module(blocks, (1, 3, 4, 8)), channels_last=channels_last)
    )
    assert ("relax.permute_dims" in found) == (not channels_last)
    # From a matrix and back to one: what is between them is no matrix.
    assert found.count("relax.reshape") == 4


@pytest.mark.parametrize("layout", ["NHWC", "keep"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (reshaped((6, 4), (4, 6)), (2, 12)),
        (transposed([1, 2, 0], [0, 2, 1]), (2, 3, 4)),
        (transposed([-1, 0, 1]), (2, 3, 4)),
        (transposed([-1, 0, 1], [1, 0, -1]), (2, 3, 4)),
        (transposed([0, -1, 1, 2]), (1, 3, 4, 8)),
        (blocks, (1, 3, 4, 8)),
        (gated, (1, 3, 4, 8)),
        (broadcast, (1, 5, 8)),
        (concatenated(1, -1), (2, 3)),
        (concatenated(0, 1), (2, 3)),
    ],
)
def test_outputs_stay_the_same(build: Build, shape: tuple[int, ...], layout: str) -> None:
    network, x = network_of(shape, build), drawn(shape, 5)
    (found,) = run_network(compile_network(prepare(network, CPU, layout), None, CPU), [x])
    plain = relax.get_pipeline("zero")(network.mod)
    machine = VirtualMachine(relax.build(plain, "llvm"), device("cpu", 0))
    assert np.allclose(found, machine["main"](tensor(x)).numpy(), rtol=1e-4, atol=1e-5)
