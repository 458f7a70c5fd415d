from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import IRModule, relax, structural_hash, tensor
from tvm_adaptive.models.rewrites import fold

RNG = np.random.default_rng(0)
A = RNG.standard_normal((4, 6)).astype("float32")
B = RNG.standard_normal((1, 6)).astype("float32")
OP = relax.op

CASES = {
    "permute_dims": lambda a, _: OP.permute_dims(a),
    "permute_dims with axes": lambda a, _: OP.permute_dims(a, [1, 0]),
    "reshape": lambda a, _: OP.reshape(a, (2, -1, 3)),
    "expand_dims": lambda a, _: OP.expand_dims(a, [0, 2]),
    "squeeze": lambda _, b: OP.squeeze(b, [0]),
    "add": OP.add,
    "subtract": OP.subtract,
    "multiply": OP.multiply,
    "divide": OP.divide,
    "sqrt": lambda a, _: OP.sqrt(OP.multiply(a, a)),
    "negative": lambda a, _: OP.negative(a),
}


def module_of(make: Any, *constants: Any) -> IRModule:
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            values = [relax.const(tensor(each)) for each in constants]
            result = builder.emit_output(builder.emit(make(*values)))
        builder.emit_func_output(result)
    return builder.get()


def result_of(mod: IRModule) -> Any:
    """Return the constant that a module returns, all of it computed."""
    cleaned = relax.transform.DeadCodeElimination()(relax.transform.FoldConstant()(mod))
    value = cleaned["main"].body.body
    return (value.value if hasattr(value, "value") else value.data).numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_compiled_operation(name: str) -> None:
    mod = module_of(CASES[name], A, B)
    folded = fold(mod)
    assert "R." + name.split(maxsplit=1)[0] not in folded["main"].script()
    found = result_of(folded)
    expected = result_of(relax.transform.FoldConstant()(relax.transform.LegalizeOps()(mod)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("make", "constants"),
    [
        (lambda a, _: OP.exp(a), (A, B)),  # not the same to the last bit
        (OP.divide, (A.astype("int32"), np.ones_like(B, dtype="int32"))),
    ],
)
def test_what_rounds_otherwise_is_left_to_the_compiler(make: Any, constants: Any) -> None:
    mod = module_of(make, *constants)
    assert structural_hash(fold(mod)) == structural_hash(mod)


def test_what_depends_on_an_input_stays() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            weight = builder.emit(OP.permute_dims(relax.const(tensor(A))))
            result = builder.emit_output(OP.matmul(x, weight))
        builder.emit_func_output(result)
    script = fold(builder.get())["main"].script()
    assert "R.matmul" in script
    assert "R.permute_dims" not in script
