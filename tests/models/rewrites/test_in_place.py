"""Attention, whose products read and write where their operands and results are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.models.networks import module_of
from tests.models.rewrites.test_pointwise import drawn, network_of
from tvm_adaptive._tvm import VirtualMachine, device, relax, tensor
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.in_place import with_products_in_place
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
N_HEADS = 2
# No vector divides the numbers of a head: attention in one function is tested elsewhere.
WIDTH = 2 * 6

Build = Callable[[Any, Any], Any]


def attended(emit: Any, heads: list[Any], *, scale: float = 1.0) -> Any:
    """Return attention of queries, keys and values, each of (1, heads, tokens, numbers)."""
    queries, keys, values = heads
    keys = emit(relax.op.permute_dims(keys, [0, 1, 3, 2]))
    if scale != 1.0:
        number = relax.const(np.float32(scale))
        queries = emit(relax.op.multiply(queries, number))
        keys = emit(relax.op.multiply(keys, number))
    scores = emit(relax.op.matmul(queries, keys))
    weights = emit(relax.op.nn.softmax(scores))
    result = emit(relax.op.matmul(weights, values))
    return emit(relax.op.permute_dims(result, [0, 2, 1, 3]))


def projected(emit: Any, x: Any, n: int, seed: int = 1) -> Any:
    n_numbers = int(x.ty.shape[1])
    # Numbers of the size of 1, as in trained networks: large scores lose many digits.
    weights = drawn((n_numbers, n), seed) / np.float32(n_numbers**0.5)
    return emit(relax.op.matmul(x, relax.const(weights)))


def sizes_of(x: Any) -> tuple[int, int, int]:
    """Return tokens, their numbers, and those of a head."""
    n, width = map(int, x.ty.shape)
    return n, width, width // N_HEADS


def by_taking(emit: Any, x: Any) -> Any:
    """As torch.nn.MultiheadAttention: three tensors, then heads."""
    n, width, n_numbers = sizes_of(x)
    y = emit(relax.op.reshape(projected(emit, x, 3 * width), (n, 1, 3, width)))
    y = emit(relax.op.permute_dims(emit(relax.op.expand_dims(y, 0)), [3, 1, 2, 0, 4]))
    y = emit(relax.op.squeeze(y, 3))
    heads = []
    for place in range(3):
        part = emit(relax.op.take(y, relax.const(place, "int64"), 0))
        part = emit(relax.op.reshape(part, (n, N_HEADS, n_numbers)))
        part = emit(relax.op.permute_dims(part, [1, 0, 2]))
        heads.append(emit(relax.op.reshape(part, (1, N_HEADS, n, n_numbers))))
    result = emit(relax.op.reshape(attended(emit, heads), (n, width)))
    return projected(emit, result, width, 2)


def by_slices(emit: Any, x: Any) -> Any:
    """As timm: heads, then three tensors, and a scale."""
    n, width, n_numbers = sizes_of(x)
    y = projected(emit, x, 3 * width)
    y = emit(relax.op.reshape(y, (1, n, 3, N_HEADS, n_numbers)))
    y = emit(relax.op.permute_dims(y, [2, 0, 3, 1, 4]))
    heads = [
        emit(relax.op.squeeze(emit(relax.op.strided_slice(y, [0], [i], [i + 1])), 0))
        for i in range(3)
    ]
    result = emit(relax.op.reshape(attended(emit, heads, scale=0.6), (n, width)))
    return projected(emit, result, width, 2)


def by_splitting(emit: Any, x: Any) -> Any:
    """As exporters to ONNX write it."""
    n, width, n_numbers = sizes_of(x)
    parts = emit(relax.op.split(projected(emit, x, 3 * width), [width, 2 * width], 1))
    heads = []
    for place in range(3):
        part = emit(relax.TupleGetItem(parts, place))
        part = emit(relax.op.reshape(part, (1, n, N_HEADS, n_numbers)))
        heads.append(emit(relax.op.permute_dims(part, [0, 2, 1, 3])))
    result = emit(relax.op.reshape(attended(emit, heads), (n, width)))
    return projected(emit, result, width, 2)


def apart(emit: Any, x: Any) -> Any:
    """As transformers: a product for each."""
    n, width, n_numbers = sizes_of(x)
    heads = []
    for place in range(3):
        part = projected(emit, x, width, 3 + place)
        part = emit(relax.op.reshape(part, (1, n, N_HEADS, n_numbers)))
        heads.append(emit(relax.op.permute_dims(part, [0, 2, 1, 3])))
    result = emit(relax.op.reshape(attended(emit, heads, scale=0.6), (n, width)))
    return projected(emit, result, width, 2)


def shared(emit: Any, x: Any) -> Any:
    """Results that something else needs as they are."""
    n, width, n_numbers = sizes_of(x)
    part = emit(relax.op.reshape(projected(emit, x, width), (1, n, N_HEADS, n_numbers)))
    part = emit(relax.op.permute_dims(part, [0, 2, 1, 3]))
    scores = emit(relax.op.matmul(part, emit(relax.op.permute_dims(part, [0, 1, 3, 2]))))
    result = emit(relax.op.matmul(scores, part))
    moved = emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    kept = emit(relax.op.reshape(emit(relax.op.nn.softmax(result)), (n, width)))
    return relax.op.add(emit(relax.op.reshape(moved, (n, width))), kept)


def with_columns_moved(emit: Any, x: Any) -> Any:
    """A result whose columns do not stay side by side."""
    n, width, n_numbers = sizes_of(x)
    part = emit(relax.op.reshape(x, (n, N_HEADS, n_numbers)))
    part = emit(relax.op.permute_dims(part, [1, 0, 2]))
    scores = emit(relax.op.matmul(part, emit(relax.op.permute_dims(part, [0, 2, 1]))))
    result = emit(relax.op.matmul(scores, part))
    moved = emit(relax.op.permute_dims(result, [0, 2, 1]))
    return relax.op.reshape(emit(relax.op.nn.relu(moved)), (width, n))


def across_rows(emit: Any, x: Any) -> Any:
    """Parts that no axis of the source begins with."""
    flat = emit(relax.op.reshape(x, (math.prod(map(int, x.ty.shape)),)))
    part = emit(relax.op.strided_slice(flat, [0], [2], [66]))
    part = emit(relax.op.reshape(part, (2, 8, 4)))
    return relax.op.matmul(part, emit(relax.op.permute_dims(part, [0, 2, 1])))


def prepared_of(build: Build, n_tokens: int, width: int = WIDTH) -> tuple[Network, Any]:
    network = network_of((n_tokens, width), build)
    return network, prepare(network, CPU)


def copies_of(prepared: Any) -> int:
    """Count calls that compute nothing."""
    names = call_counts(prepared.mod)
    return sum(n for name, n in names.items() if not any(w in name for w in ("matmul", "softmax")))


ALL = [by_taking, by_slices, by_splitting, apart]


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("n_tokens", [16, 37, 50])
def test_only_keys_are_copied(build: Build, n_tokens: int) -> None:
    assert copies_of(prepared_of(build, n_tokens)[1]) == 1


@pytest.mark.parametrize("build", [*ALL, shared, with_columns_moved, across_rows])
@pytest.mark.parametrize("n_tokens", [16, 37, 50])
def test_outputs_stay_the_same(build: Build, n_tokens: int) -> None:
    assert_same_outputs(build, n_tokens, WIDTH)


def assert_same_outputs(build: Build, n_tokens: int, width: int) -> None:
    """Compare a prepared network with TVM's own lowering of it."""
    network, prepared = prepared_of(build, n_tokens, width)
    x = drawn((n_tokens, width), 5)
    (found,) = run_network(compile_network(prepared, None, CPU), [x])
    plain = relax.get_pipeline("zero")(network.mod)
    machine = VirtualMachine(relax.build(plain, "llvm"), device("cpu", 0))
    expected = machine["main"](tensor(x)).numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_product_behind_a_thousand_operators() -> None:
    def build(emit: Any, x: Any) -> Any:
        for _ in range(1200):
            x = emit(relax.op.tanh(x))
        turned = emit(relax.op.permute_dims(x, [0, 2, 1]))
        return emit(relax.op.matmul(x, turned))

    mod = module_of({"x": (2, 16, 16)}, build)
    found = with_products_in_place(mod, vector_unit_of(CPU))
    assert found["main"].script().count("R.tanh(") == 1200


def test_a_result_with_other_uses_is_computed_once() -> None:
    names = call_counts(prepared_of(shared, 16)[1].mod)
    assert sum(n for name, n in names.items() if "matmul" in name) == 3


@pytest.mark.parametrize(
    ("n_rows", "width", "n_copies"), [(128, 1536, 1), (64, 768, 1), (16, 1536, 0), (80, 576, 0)]
)
def test_rows_that_evict_each_other_are_copied(n_rows: int, width: int, n_copies: int) -> None:
    def build(emit: Any, x: Any) -> Any:
        weights = emit(relax.op.strided_slice(x, [1], [0], [n_rows]))
        values = emit(relax.op.strided_slice(x, [1], [width - 64], [width]))
        weights = emit(relax.op.reshape(weights, (1, n_rows, n_rows)))
        return relax.op.matmul(weights, emit(relax.op.reshape(values, (1, n_rows, 64))))

    network = network_of((n_rows, width), build)
    prepared = prepare(network, CPU)
    assert copies_of(prepared) == n_copies
    x = drawn((n_rows, width), 5)
    (found,) = run_network(compile_network(prepared, None, CPU), [x])
    expected = x[:, :n_rows] @ x[:, width - 64 :]
    assert np.abs(found[0] - expected).max() <= 1e-5 * np.abs(expected).max()
