"""Attention in one function, beside numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.models import networks
from tests.models.networks import drawn
from tests.models.rewrites.test_in_place import (
    ALL,
    N_HEADS,
    Build,
    assert_same_outputs,
    prepared_of,
)
from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.vector_unit import VectorUnit, vector_unit_of
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.attention import AttentionTiles
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
LANES = vector_unit_of(CPU).lanes
N_NUMBERS = 2 * LANES

Array = npt.NDArray[Any]


def network_of(
    batch: tuple[int, ...],
    n_queries: int,
    n_keys: int,
    *,
    n_values: int = N_NUMBERS,
    mask: tuple[int, ...] | None = None,
    scale: float | None = None,
) -> Network:
    """Return a network of attention, to whose scores an input is added if it has a shape."""
    shapes = {
        "q": (*batch, n_queries, N_NUMBERS),
        "k": (*batch, n_keys, N_NUMBERS),
        "v": (*batch, n_keys, n_values),
        **({} if mask is None else {"mask": mask}),
    }

    def build(emit: Any, q: Any, k: Any, v: Any, *added: Any) -> Any:
        rank = len(batch) + 2
        order = [*range(rank - 2), rank - 1, rank - 2]
        x = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, order))))
        if scale is not None:
            x = emit(relax.op.multiply(x, relax.const(np.float32(scale))))
        x = emit(relax.op.add(x, added[0])) if added else x
        x = emit(relax.op.matmul(emit(relax.op.nn.softmax(x)), v))
        return relax.op.multiply(x, relax.const(np.float32(2.0)))

    return networks.network_of(shapes, build)


def attended(q: Array, k: Array, v: Array, mask: Array | float, scale: float) -> Array:
    """Return attention in double precision; 0 for queries without keys."""
    scores = scale * (q.astype("float64") @ np.swapaxes(k, -1, -2)) + mask
    largest = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(largest), 0.0, largest))
    total = powers.sum(-1, keepdims=True)
    return (powers / np.where(total == 0.0, 1.0, total)) @ v


def names_of(network: Network) -> set[str]:
    return set(call_counts(prepare(network, CPU).mod))


def error_of(network: Network, inputs: list[Array], mask: Array | float, scale: float) -> float:
    """Return the largest error of a network, as a share of the largest output."""
    (found,) = run_network(compile_network(prepare(network, CPU), None, CPU), inputs)
    expected = 2.0 * attended(*inputs[:3], mask, scale)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def inputs_of(network: Network) -> list[Array]:
    return [drawn(shape, seed) for seed, shape in enumerate(network.input_shapes.values())]


SIZES = [
    ((3,), 197, 197),
    ((1, 2), 2 * LANES, 13),
    ((2, 3), 4 * LANES - 3, 64),
    ((1, 1), 6 * LANES + 1, 131),
]


@pytest.mark.parametrize(("batch", "n_queries", "n_keys"), SIZES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_function(
    batch: tuple[int, ...], n_queries: int, n_keys: int, scale: float | None
) -> None:
    network = network_of(batch, n_queries, n_keys, scale=scale)
    assert {name for name in names_of(network) if "attention" not in name} <= {"multiply"}
    number = 1.0 if scale is None else scale
    assert error_of(network, inputs_of(network), 0.0, number) < 1e-5


@pytest.mark.parametrize("n_values", [LANES, 3 * LANES, 5 * LANES - 6, 5 * LANES + LANES // 2])
def test_values_that_no_vector_divides(n_values: int) -> None:
    network = network_of((2,), 4 * LANES, 70, n_values=n_values)
    assert not any("softmax" in name for name in names_of(network))
    assert error_of(network, inputs_of(network), 0.0, 1.0) < 1e-5


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("n_tokens", [2 * LANES, 5 * LANES - 1])
def test_heads_are_read_where_they_are(build: Build, n_tokens: int) -> None:
    width = N_HEADS * N_NUMBERS
    names = call_counts(prepared_of(build, n_tokens, width)[1].mod)
    assert all("matmul" in name or "attention" in name for name in names)
    assert_same_outputs(build, n_tokens, width)


@pytest.mark.parametrize(
    "shape", [(2, 3, 50, 70), (2, 1, 1, 70), (1, 1, 50, 70), (50, 70), (70,), (2, 3, 50, 1)]
)
def test_what_is_added_to_scores(shape: tuple[int, ...]) -> None:
    network = network_of((2, 3), 50, 70, mask=shape, scale=0.5)
    names = names_of(network)
    assert not any("softmax" in name or "matmul" in name for name in names)
    *inputs, mask = inputs_of(network)
    assert error_of(network, [*inputs, 5.0 * mask], 5.0 * mask, 0.5) < 1e-5


@pytest.mark.parametrize("n_queries", [3, 12])
def test_tiles_of_few_queries_are_whole(n_queries: int) -> None:
    """As of a processor with 32 registers of four numbers."""
    tiles = AttentionTiles.of(VectorUnit(4, 32), n_queries, 12, 64)
    assert tiles is not None
    assert tiles.block % tiles.queries == 0


def test_a_mask_takes_no_digits_from_scores() -> None:
    network = network_of((2,), 3 * LANES, 70, mask=(3 * LANES, 70), scale=0.5)
    *inputs, mask = inputs_of(network)
    # Of a query without keys, all are masked: what is left decides.
    mask = np.full_like(mask, -1e4)
    q, k, v = inputs
    scores = (0.5 * q @ np.swapaxes(k, -1, -2) + mask).astype(np.float32)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    expected = 2.0 * (powers / powers.sum(-1, keepdims=True)) @ v
    (found,) = run_network(compile_network(prepare(network, CPU), None, CPU), [*inputs, mask])
    assert np.abs(found - expected).max() / np.abs(expected).max() < 3e-4


def test_windows_with_biases_and_masks() -> None:
    """As in Swin transformers: a bias for each head, and a mask for each window."""
    n_images, n_windows, n_heads, n = 2, 3, 2, 7 * 7
    batch = n_images * n_windows
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys("qkv", (batch, n_heads, n, N_NUMBERS)),
        "bias": (1, n_heads, n, n),
        "mask": (n_windows, n, n),
    }

    def build(emit: Any, *inputs: Any) -> Any:
        q, k, v, bias, mask = inputs
        x = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
        x = emit(relax.op.divide(x, relax.const(np.float32(4.0))))
        x = emit(relax.op.add(x, bias))
        x = emit(relax.op.reshape(x, (n_images, n_windows, n_heads, n, n)))
        x = emit(relax.op.add(x, emit(relax.op.reshape(mask, (1, n_windows, 1, n, n)))))
        x = emit(relax.op.reshape(x, (batch, n_heads, n, n)))
        x = emit(relax.op.matmul(emit(relax.op.nn.softmax(x)), v))
        return relax.op.multiply(x, relax.const(np.float32(2.0)))

    network = networks.network_of(shapes, build)
    assert not any("softmax" in name or "matmul" in name for name in names_of(network))
    given = inputs_of(network)
    added = given[3] + np.tile(given[4], (n_images, 1, 1))[:, None]
    assert error_of(network, given, added, 0.25) < 1e-5


def test_keys_that_a_mask_hides_have_no_weight() -> None:
    network = network_of((2,), 50, 70, mask=(50, 70))
    inputs = inputs_of(network)
    hidden = np.triu(np.ones((50, 70), dtype=bool), k=3)
    hidden[7] = True  # a query without keys
    inputs[-1] = np.where(hidden, -np.inf, 0.0).astype("float32")
    (found,) = run_network(compile_network(prepare(network, CPU), None, CPU), inputs)
    assert np.all(found[:, 7] == 0.0)
    assert error_of(network, inputs, inputs[-1].astype("float64"), 1.0) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"n_queries": 1}, id="a single query"),
        pytest.param({"n_keys": 2}, id="few keys"),
        pytest.param({"n_values": LANES - 1}, id="values that fill no vector"),
        pytest.param({"n_keys": 20_000}, id="scores that no cache holds"),
    ],
)
def test_products_of_their_own(change: dict[str, int]) -> None:
    given = {"n_queries": 4 * LANES, "n_keys": 40, "n_values": N_NUMBERS, **change}
    n_values = given.pop("n_values")
    names = names_of(network_of((2,), **given, n_values=n_values))
    assert any("softmax" in name for name in names)


def test_weights_that_something_else_needs_stay() -> None:
    shapes = {"q": (2, 4 * LANES, N_NUMBERS), "k": (2, N_NUMBERS, 40), "v": (2, 40, N_NUMBERS)}

    def build(emit: Any, q: Any, k: Any, v: Any) -> Any:
        weights = emit(relax.op.nn.softmax(emit(relax.op.matmul(q, k))))
        return relax.Tuple([emit(relax.op.matmul(weights, v)), weights])

    network = networks.network_of(shapes, build)
    assert any("softmax" in name for name in names_of(network))
