"""Pointwise convolutions of concatenations, computed part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.rewrites.test_pointwise import convolved, drawn, network_of
from tvm_adaptive._tvm import relax
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
SHAPE = (1, 16, 10, 12)
Build = Callable[[Any, Any], Any]


def joined(emit: Any, x: Any, n_channels: tuple[int, ...] = (16, 48)) -> Any:
    """Concatenate the results of convolutions."""
    parts = [
        emit(relax.op.nn.relu(emit(convolved(x, n, size=3, seed=seed))))
        for seed, n in enumerate(n_channels)
    ]
    return emit(relax.op.concat(relax.Tuple(parts), 1))


def fire(emit: Any, x: Any) -> Any:
    """Two modules of SqueezeNet, with what follows its convolutions."""
    for seed in (5, 6):
        y = emit(convolved(joined(emit, x), 16, seed=seed))
        bias = relax.const(drawn((1, 16, 1, 1), seed))
        x = emit(relax.op.nn.relu(emit(relax.op.add(y, bias))))
    return relax.op.tanh(x)


def pooled(operator: Callable[..., Any]) -> Build:
    def build(emit: Any, x: Any) -> Any:
        """Two convolutions of one pooling."""
        y = emit(operator(joined(emit, x, (16, 16, 64)), (3, 3), (2, 2), padding=(1, 1)))
        return relax.op.multiply(emit(convolved(y, 8)), emit(convolved(y, 8, seed=2)))

    return build


def strided(emit: Any, x: Any) -> Any:
    return convolved(joined(emit, x), 16, strides=2)


def twice(emit: Any, x: Any) -> Any:
    """One value as two parts, and what is computed from it as another."""
    y = emit(convolved(x, 24, size=3))
    y = emit(relax.op.concat(relax.Tuple([y, emit(relax.op.tanh(y)), y]), 1))
    return convolved(y, 8)


def copies_of(build: Build, shape: tuple[int, ...] = SHAPE) -> int:
    """Check what a network computes; return how many of its functions concatenate."""
    network, x = network_of(shape, build), [drawn(shape, 9)]
    prepared = prepare(network, CPU)
    assert prepared.layout == "NHWC"
    plain = compile_network(prepare(network, CPU, layout="keep"), None, CPU)
    found = run_network(compile_network(prepared, None, CPU), x)
    for ours, expected in zip(found, run_network(plain, x), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-3)
    return sum(n for name, n in call_counts(prepared.mod).items() if "concat" in name)


@pytest.mark.parametrize(
    "build",
    [fire, strided, twice, pooled(relax.op.nn.max_pool2d), pooled(relax.op.nn.avg_pool2d)],
)
@pytest.mark.parametrize("n_images", [1, 2])
def test_nothing_is_copied_and_the_results_are_the_same(build, n_images):
    assert copies_of(build, (n_images, *SHAPE[1:])) == 0


def of(n_filters: int, n_channels: tuple[int, ...] = (16, 48), **how: Any) -> Build:
    return lambda emit, x: convolved(joined(emit, x, n_channels), n_filters, **how)


def read_elsewhere(emit: Any, x: Any) -> Any:
    y = joined(emit, x)
    scale = emit(relax.op.mean(y, [1, 2, 3], keepdims=True))
    return relax.op.multiply(scale, emit(convolved(y, 8)))


@pytest.mark.parametrize(
    "build",
    [
        of(40),  # the sums are as much as what would be copied
        of(16, (8, 56)),  # a sum of eight terms
        of(16, size=3),
        of(16, groups=2),
        read_elsewhere,
    ],
)
def test_other_concatenations_stay(build):
    assert copies_of(build) == 1


def test_squeezenet_of_the_tests_of_onnx_has_one_concatenation_left():
    backend = pytest.importorskip("onnx.backend.test.data")
    path = Path(next(iter(backend.__path__)), "light", "light_squeezenet.onnx")
    names = call_counts(prepare(load(path), CPU).mod)
    # That before the last convolution, which has 1,000 filters.
    assert sum(n for name, n in names.items() if "concat" in name) == 1
