"""Fused functions whose expressions do not multiply."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tvm_adaptive._tvm.inlining import inlined_sizes
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.prepare import extract
from tvm_adaptive.models.rewrites.fusion import _MOST_OPERATIONS
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
SHAPE = (1, 64)
# A constant that is copied to fewer numbers than it has.
_LOSES_NUMBERS = re.compile(r"param_0_global\[[^\]]*%")


def network(layers: Any, n_inputs: int = 1) -> Network:
    """Return a network of what ``layers`` makes of its inputs, with the builder."""
    builder, names = relax.BlockBuilder(), [f"x{n}" for n in range(n_inputs)]
    inputs = [relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in names]
    with builder.function("main", inputs):
        with builder.dataflow():
            y = builder.emit_output(layers(builder, *inputs))
        builder.emit_func_output(y)
    shapes, dtypes = dict.fromkeys(names, SHAPE), dict.fromkeys(names, "float32")
    return Network("net", builder.get(), {}, shapes, dtypes)


def chain(n: int) -> Network:
    """Return a network of hyperbolic tangents, whose polynomials read their operand many times."""

    def layers(builder: Any, x: Any) -> Any:
        for _ in range(n):
            x = builder.emit(relax.op.tanh(x))
        return x

    return network(layers)


def largest(prepared: Any) -> int:
    functions = [prepared.mod[name] for name in call_counts(prepared.mod)]
    sizes = [each for function in functions for each in inlined_sizes(function)[0]]
    return max(each.total([0] * 99) for each in sizes)


@pytest.mark.parametrize(("n", "n_calls"), [(1, 1), (2, 1), (3, 2), (7, 4)])
def test_a_chain_of_polynomials_ends_before_its_expression_is_too_large(
    n: int, n_calls: int
) -> None:
    prepared = prepare(chain(n), CPU)
    assert largest(prepared) <= _MOST_OPERATIONS
    assert sum(call_counts(prepared.mod).values()) == n_calls
    x = np.linspace(-3.0, 3.0, 64, dtype="float32").reshape(SHAPE)
    (found,) = run_network(compile_network(prepared, None, CPU), [x])
    for _ in range(n):
        x = np.tanh(x)
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)


def steps(builder: Any, *inputs: Any) -> Any:
    """Return the results of a recurrent layer's steps, one behind the other."""
    found = [
        builder.emit(relax.op.multiply(relax.op.sigmoid(x), relax.op.tanh(y)))
        for x, y in itertools.pairwise(inputs)
    ]
    return builder.emit(relax.op.concat(found, 0))


def test_steps_are_computed_before_a_concatenation_of_many() -> None:
    prepared = prepare(network(steps, 17), CPU)
    counts = call_counts(prepared.mod)
    assert sorted(counts.values()) == [1, 16]
    assert largest(prepared) < _MOST_OPERATIONS
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(SHAPE).astype("float32") for _ in range(17)]
    (found,) = run_network(compile_network(prepared, None, CPU), inputs)
    expected = [np.tanh(y) / (1 + np.exp(-x)) for x, y in itertools.pairwise(inputs)]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_few_operations_stay_within_a_concatenation() -> None:
    def layers(builder: Any, *inputs: Any) -> Any:
        parts = [builder.emit(relax.op.nn.silu(x)) for x in inputs]
        return builder.emit(relax.op.concat(parts, 0))

    assert sum(call_counts(prepare(network(layers, 2), CPU).mod).values()) == 1


BIAS = np.arange(64, dtype="float32").reshape(SHAPE)


def biased(x: Any) -> Any:
    return relax.op.add(x, relax.const(BIAS))


@pytest.mark.parametrize(
    ("layers", "reference", "is_free"),
    [
        (biased, lambda y: y, True),
        (lambda x: relax.op.nn.silu(biased(x)), lambda y: y / (1 + np.exp(-y)), True),
        (lambda x: relax.op.reshape(biased(x), (4, 16)), lambda y: y.reshape(4, 16), True),
        (lambda x: relax.op.split(biased(x), 4, 1)[2], lambda y: y[:, 32:48], False),
        (
            lambda x: relax.op.strided_slice(biased(x), [1], [5], [50], [3]),
            lambda y: y[:, 5:50:3],
            False,
        ),
        (
            lambda x: relax.op.add(*map(relax.op.split(biased(x), 2, 1).__getitem__, (0, 1))),
            lambda y: y[:, :32] + y[:, 32:],
            False,
        ),
    ],
)
def test_constants_that_are_read_in_part_keep_their_layout(
    layers: Any, reference: Any, is_free: bool
) -> None:
    prepared = prepare(network(lambda builder, x: builder.emit(layers(x))), CPU, prepack=True)
    tasks = extract(prepared, CPU)
    assert any(weights_of(task.dispatched[0]) for task in tasks) == is_free
    # TVM's rule for layouts makes a constant out of the part that one block reads.
    for task in tasks:
        context = ms.TuneContext(
            mod=task.dispatched[0],
            target=CPU,
            space_generator="post-order-apply",
            search_strategy="evolutionary",
        )
        schedule = Schedule(task.dispatched[0])
        context.generate_design_space()[0].trace.apply_to_schedule(schedule, remove_postproc=True)
        for rule in context.space_generator.postprocs:
            assert rule.apply(schedule)
        assert not _LOSES_NUMBERS.search(schedule.mod.script())
    x = np.linspace(-3.0, 3.0, 64, dtype="float32").reshape(SHAPE)
    (found,) = run_network(compile_network(prepared, None, CPU), [x])
    np.testing.assert_allclose(found, reference(x + BIAS), rtol=1e-4, atol=1e-5)
