from __future__ import annotations

import math

import numpy as np
import pytest
from tvm import relax, tirx

from tvm_adaptive.models import (
    Network,
    call_counts,
    compile_network,
    prepare,
    run_network,
)
from tvm_adaptive.models.rewrites.simplification import split_clips, without_equal_broadcasts
from tvm_adaptive.tuning.target import resolve_target

SHAPE = (1, 4, 6, 6)


def clipped(low, high, dtype="float32", *, convolved=False):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            if convolved:
                weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3))
                y = builder.emit(relax.op.nn.conv2d(y, relax.const(weight, dtype), padding=1))
            y = builder.emit(relax.op.clip(y, low, high))
            y = builder.emit_output(relax.op.nn.relu(y))
        builder.emit_func_output(y)
    return builder.get()


def operators(mod):
    (block,) = mod["main"].body.blocks
    return [binding.value.op.name.removeprefix("relax.") for binding in block.bindings]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 6, ["maximum", "minimum"]),
        (-1.5, 0.5, ["maximum", "minimum"]),
        (0.25, tirx.FloatImm("float32", math.inf), ["maximum"]),
        (tirx.FloatImm("float32", -math.inf), 1, ["minimum"]),
    ],
)
def test_a_clip_becomes_what_it_bounds(low, high, expected):
    mod = clipped(low, high)
    split = split_clips(mod)
    assert operators(split) == [*expected, "nn.relu"]
    target = resolve_target("cpu")
    (x,) = inputs = [np.linspace(-3, 9, math.prod(SHAPE), dtype="float32").reshape(SHAPE)]
    network = Network("clipped", split, {}, {"x": SHAPE}, {"x": "float32"})
    compiled = compile_network(prepare(network, target, "keep"), None, target)
    bounds = (float(getattr(bound, "value", bound)) for bound in (low, high))
    np.testing.assert_array_equal(
        run_network(compiled, inputs)[0], np.maximum(np.clip(x, *bounds), 0)
    )


def test_integers_stay_as_they_are():
    mod = clipped(0, 6, "int32")
    assert operators(split_clips(mod)) == ["clip", "nn.relu"]


def test_a_clip_costs_no_transposition():
    network = Network("clipped", clipped(0, 6, convolved=True), {}, {"x": SHAPE}, {"x": "float32"})
    counts = call_counts(prepare(network, resolve_target("cpu"), "NHWC").mod)
    assert counts.total() == 3
    assert sum("transpose" in name for name in counts) == 2


def test_a_broadcast_to_the_same_shape_is_no_copy():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 1), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.broadcast_to(x, (3, 1)))
            y = builder.emit(relax.op.broadcast_to(y, (3, 4)))
            y = builder.emit_output(relax.op.broadcast_to(y, (3, 4)))
        builder.emit_func_output(y)
    mod = without_equal_broadcasts(builder.get())
    assert mod.script().count("broadcast_to") == 1
    network = Network("net", builder.get(), {}, {"x": (3, 1)}, {"x": "float32"})
    target = resolve_target("cpu")
    values = np.arange(3, dtype="float32").reshape(3, 1)
    (found,) = run_network(compile_network(prepare(network, target), None, target), [values])
    np.testing.assert_array_equal(found, np.broadcast_to(values, (3, 4)))
