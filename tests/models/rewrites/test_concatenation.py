"""Concatenations whose vectors lie within one part each."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tvm_adaptive._tvm import IRModule, block_names
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.concatenation import with_runs
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")


def concatenated(shapes, axis, *layers, dtype="float32"):
    """Return a network of a concatenation, and layers that take a value and return one."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            y = builder.emit(relax.op.concat(inputs, axis))
            for layer in layers:
                y = builder.emit(layer(y))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    names = [f"x{i}" for i in range(len(shapes))]
    dtypes = dict.fromkeys(names, dtype)
    return Network("net", builder.get(), {}, dict(zip(names, shapes, strict=True)), dtypes)


def images(*channels):
    return [(1, 5, 6, n) for n in channels]


def drawn(shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def loops_of(prepared):
    """Return the extents of the loops of a network's only function, outermost first."""
    (name,) = call_counts(prepared.mod)
    found, statement = [], prepared.mod[name].body.block.body
    while hasattr(statement, "loop_var"):
        found.append(int(statement.extent))
        statement = statement.body
    return found


@pytest.mark.parametrize(
    ("shapes", "axis", "loops"),
    [
        (images(64, 32, 32), 3, [1, 5, 6, 4, 32]),
        (images(64, 32, 32), -1, [1, 5, 6, 4, 32]),
        (images(256, 128), 3, [1, 5, 6, 6, 64]),  # no longer than a vector may be
        (images(48, 72), 3, [1, 5, 6, 5, 24]),
        (images(32, 32), 3, [2, 1, 5, 6, 32]),  # two runs would be one vector
        (images(64, 3), 3, [1, 5, 6, 67]),
        (images(7, 6, 4), 3, [1, 5, 6, 17]),
        ([(1, 32, 6, 5), (1, 32, 6, 5)], 1, [1, 64, 6, 5]),  # no vector has two parts
        ([(24,), (8,), (64,)], 0, [12, 8]),
        ([(1, 1, 32), (1, 196, 32)], 1, [1, 197, 32]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_numbers_in_a_row_have_a_loop_of_their_own(shapes, axis, loops, dtype):
    network = concatenated(shapes, axis, dtype=dtype)
    prepared = prepare(network, CPU)
    assert loops_of(prepared) == loops
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-9, 9, shape).astype(dtype) for shape in shapes]
    (found,) = run_network(compile_network(prepared, None, CPU), inputs)
    np.testing.assert_array_equal(found, np.concatenate(inputs, axis))


def test_what_follows_and_what_precedes_is_in_the_same_loops():
    scale = np.linspace(-1, 1, 128, dtype="float32")
    network = concatenated(
        images(64, 32, 32),
        3,
        lambda y: relax.op.multiply(y, relax.const(scale)),
        lambda y: relax.op.add(y, relax.const(scale)),
        relax.op.nn.relu,
    )
    prepared = prepare(network, CPU)
    assert loops_of(prepared) == [1, 5, 6, 4, 32]
    (name,) = call_counts(prepared.mod)
    assert len(block_names(IRModule({"main": prepared.mod[name]}))) == 1
    inputs = [
        np.random.default_rng(0).standard_normal(each).astype("f4") for each in images(64, 32, 32)
    ]
    (found,) = run_network(compile_network(prepared, None, CPU), inputs)
    expected = np.maximum(np.concatenate(inputs, 3) * scale + scale, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_nested_concatenations_are_one():
    more = np.full((1, 5, 6, 16), 3, "float32")
    network = concatenated(
        images(32, 64), 3, lambda y: relax.op.concat([relax.op.nn.relu(y), relax.const(more)], 3)
    )
    prepared = prepare(network, CPU)
    inputs = [
        np.random.default_rng(0).standard_normal(each).astype("f4") for each in images(32, 64)
    ]
    (found,) = run_network(compile_network(prepared, None, CPU), inputs)
    expected = np.concatenate([np.maximum(np.concatenate(inputs, 3), 0), more], 3)
    np.testing.assert_array_equal(found, expected)


def test_what_is_reshaped_afterwards_is_as_it_was():
    network = concatenated(images(32, 64), 3, lambda y: relax.op.permute_dims(y, (0, 3, 1, 2)))
    inputs = [
        np.random.default_rng(0).standard_normal(each).astype("f4") for each in images(32, 64)
    ]
    (found,) = run_network(compile_network(prepare(network, CPU), None, CPU), inputs)
    np.testing.assert_array_equal(found, np.concatenate(inputs, 3).transpose(0, 3, 1, 2))


def test_other_functions_stay_the_same_objects():
    prepared = prepare(concatenated(images(64, 32, 32), 3), CPU)
    again = with_runs(prepared.mod)
    for variable, function in prepared.mod.functions.items():
        assert again[variable].same_as(function)
