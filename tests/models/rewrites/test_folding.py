from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.ir.instrument import pass_instrument

from tests.models import networks
from tvm_adaptive._tvm import IRModule, PassContext, data_of_constant, relax, tensor
from tvm_adaptive.models.rewrites.folding import fold

RNG = np.random.default_rng(0)
A = RNG.standard_normal((4, 6)).astype("float32")
B = RNG.standard_normal((1, 6)).astype("float32")
INDICES = np.array([[2, 0], [1, 3]])
OP = relax.op

CASES = {
    "permute_dims": lambda a, _: OP.permute_dims(a),
    "permute_dims with axes": lambda a, _: OP.permute_dims(a, [1, 0]),
    "reshape": lambda a, _: OP.reshape(a, (2, -1, 3)),
    "expand_dims": lambda a, _: OP.expand_dims(a, [0, 2]),
    "squeeze": lambda _, b: OP.squeeze(b, [0]),
    "strided_slice": lambda a, _: OP.strided_slice(a, [1], [1], [4]),
    "strided_slice from the end": lambda a, _: OP.strided_slice(a, [-1], [-4], [2**31 - 1], [2]),
    "take": lambda a, _: OP.take(a, relax.const(tensor(INDICES)), axis=1),
    "take of one": lambda a, _: OP.take(a, relax.const(tensor(INDICES[0, 0])), axis=-2),
    "concat": lambda a, b: OP.concat([a, OP.add(a, b)], axis=0),
    "add": OP.add,
    "subtract": OP.subtract,
    "multiply": OP.multiply,
    "divide": OP.divide,
    "sqrt": lambda a, _: OP.sqrt(OP.multiply(a, a)),
    "negative": lambda a, _: OP.negative(a),
    "add of a number": lambda a, _: OP.add(a, tirx.FloatImm("float32", 1e-5)),
}


def module_of(make: Any, *constants: Any) -> IRModule:
    values = [relax.const(tensor(each)) for each in constants]
    return networks.module_of({}, lambda emit: emit(make(*values)))


def result_of(mod: IRModule) -> Any:
    """Return the constant that a module returns, all of it computed."""
    cleaned = relax.transform.DeadCodeElimination()(relax.transform.FoldConstant()(mod))
    value = cleaned["main"].body.body
    return (value.value if hasattr(value, "value") else value.data).numpy()


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the passes that run inside."""
    found: Counter[str] = Counter()

    @pass_instrument
    class Count:
        def run_before_pass(self, _mod: Any, info: Any) -> None:
            found[str(info.name)] += 1

    with PassContext(instruments=[Count()]):
        yield found


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_compiled_operation(name: str) -> None:
    mod = module_of(CASES[name], A, B)
    with counting() as passes:
        folded = fold(mod)
    assert passes["FoldConstant"] == 0
    assert "R." + name.split(maxsplit=1)[0] not in folded["main"].script()
    found = result_of(folded)
    expected = result_of(relax.transform.FoldConstant()(relax.transform.LegalizeOps()(mod)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


COMPILED = {
    "exp": (OP.exp, (A,)),  # not the same to the last bit
    "divide": (OP.divide, (A.astype("int32"), np.ones_like(B, dtype="int32"))),
    "strided_slice": (lambda a: OP.strided_slice(a, [1], [4], [0], [-1]), (A,)),
    "take": (lambda a: OP.take(a, relax.const(tensor(INDICES + 5)), 1, mode="clip"), (A,)),
    "zeros": (lambda a: OP.add(a, OP.exp(OP.zeros((4, 6), "float32"))), (A,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_numpy_computes_otherwise_is_compiled(name: str) -> None:
    make, constants = COMPILED[name]
    mod = module_of(make, *constants)
    with counting() as passes:
        folded = fold(mod)
    assert passes["FoldConstant"] == 1
    assert "R." + name not in folded["main"].script()
    expected = result_of(relax.transform.FoldConstant()(relax.transform.LegalizeOps()(mod)))
    np.testing.assert_array_equal(result_of(folded), expected)


def test_fields_of_a_constant_tuple_are_constants() -> None:
    def build(emit: Any) -> Any:
        parts = emit(OP.split(relax.const(tensor(A)), 2, axis=1))
        return OP.add(*(emit(relax.TupleGetItem(parts, place)) for place in (0, 1)))

    folded = fold(networks.module_of({}, build))
    np.testing.assert_array_equal(result_of(folded), A[:, :3] + A[:, 3:])


def test_what_is_large_and_cheap_is_computed_at_every_inference() -> None:
    # As in TVM: the zeros would be part of the library.
    folded = fold(module_of(lambda a: OP.add(OP.zeros((512, 6), "float32"), OP.exp(a)), B))
    script = folded["main"].script()
    assert "R.zeros" in script
    assert "R.exp" not in script


def test_operations_on_inputs_are_not_lowered_to_find_those_on_constants() -> None:
    def build(emit: Any, x: Any) -> Any:
        return OP.add(x, emit(OP.add(relax.const(tensor(A)), relax.const(tensor(B)))))

    mod = networks.module_of({"x": (4, 6)}, build)
    with counting() as passes:
        folded = fold(mod)
    assert passes["FoldConstant"] == 0
    (binding,) = folded["main"].body.blocks[0].bindings
    np.testing.assert_array_equal(data_of_constant(binding.value.args[1]).numpy(), A + B)


def test_what_depends_on_an_input_stays() -> None:
    def build(emit: Any, x: Any) -> Any:
        return OP.matmul(x, emit(OP.permute_dims(relax.const(tensor(A)))))

    script = fold(networks.module_of({"x": (4, 6)}, build))["main"].script()
    assert "R.matmul" in script
    assert "R.permute_dims" not in script
