"""The layouts of weights, computed by numpy as the compiled functions compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te
from tvm.script import tirx as T

from tests.models.rewrites.test_folding import counting
from tvm_adaptive._tvm import (
    PrimFunc,
    bindings_of,
    build_tir,
    data_of_constant,
    relax,
    tensor,
)
from tvm_adaptive.models.compile import schedule_network
from tvm_adaptive.models.packing import OtherCodeError, moved_arrays, pack

A = np.random.default_rng(0).standard_normal((4, 6, 5)).astype("float32")
MOVES: dict[str, Any] = {
    "a copy": ((4, 6, 5), lambda a: lambda i, j, k: a[i, j, k]),
    "a transposition": ((5, 4, 6), lambda a: lambda i, j, k: a[j, k, i]),
    "tiles": ((2, 3, 5, 2, 2), lambda a: lambda p, q, k, i, j: a[p * 2 + i, q * 2 + j, k]),
    "one loop": ((120,), lambda a: lambda n: a[n // 30, n // 5 % 6, n % 5]),
    "a part": ((3, 6), lambda a: lambda i, j: a[3 - i, j, 2]),
}


def function_of(shape: tuple[int, ...], compute: Any) -> PrimFunc:
    a = te.placeholder(A.shape, name="a")
    return te.create_prim_func([a, te.compute(shape, compute(a), name="b")])


@pytest.mark.parametrize("name", MOVES)
def test_elements_go_where_the_compiled_function_puts_them(name: str) -> None:
    shape, compute = MOVES[name]
    function = function_of(shape, compute)
    expected = tensor(np.zeros(shape, "float32"))
    build_tir(function, target="llvm")["main"](tensor(A), expected)
    (found,) = moved_arrays(function, [A])
    np.testing.assert_array_equal(found, expected.numpy())


@T.prim_func(s_tir=True)
def padded(a: T.Buffer((4, 6, 5), "float32"), b: T.Buffer((4, 2, 4, 5), "float32")) -> None:
    for i, j, k in T.grid(4, 6, 5):
        with T.sblock("b"):
            v_i, v_j, v_k = T.axis.remap("SSS", [i, j, k])
            b[v_i, v_j // 4, v_j % 4, v_k] = a[v_i, v_j, v_k]


def test_a_layout_that_pads_is_filled_with_zeros() -> None:
    (found,) = moved_arrays(padded, [A])
    assert found.shape == (4, 2, 4, 5)
    np.testing.assert_array_equal(found.reshape(4, 8, 5)[:, :6], A)
    assert not found.reshape(4, 8, 5)[:, 6:].any()


OTHERS: dict[str, Any] = {
    "arithmetic": lambda a: lambda i, j, k: a[i, j, k] * 2.0,
    "a choice": lambda a: lambda i, j, k: te.if_then_else(i < 2, a[i, j, k], a[i, j, 0]),
    "a sum": lambda a: lambda i, j, k: te.sum(a[i, j, R], axis=R),
}
R = te.reduce_axis((0, 5), name="r")


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_more_than_move_is_refused(name: str) -> None:
    with pytest.raises(OtherCodeError):
        moved_arrays(function_of(A.shape, OTHERS[name]), [A])


def test_results_that_no_argument_fills_stay_with_tvm() -> None:
    function = function_of(A.shape, MOVES["a copy"][1])
    with pytest.raises(OtherCodeError):
        moved_arrays(function, [A[:2]])


def test_a_network_is_packed_without_compiling(case: Any) -> None:
    """The weights are those that FoldConstant computes, where that writes something."""
    mod, _ = schedule_network(case.prepared["prepack"], case.databases["prepack"], case.target)
    with counting() as passes:
        packed = pack(mod)
    assert passes["FoldConstant"] == 0
    t = relax.transform
    expected = t.SplitLayoutRewritePreproc()(mod)
    for each in (t.FoldConstant(), t.CanonicalizeBindings(), t.DeadCodeElimination()):
        expected = each(expected)
    found, wanted = (constants_of(each) for each in (packed, expected))
    assert len(found) == len(wanted) > 20
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert {str(v.name_hint) for v in packed.functions} == {
        str(v.name_hint) for v in expected.functions
    }


def constants_of(mod: Any) -> list[Any]:
    found = []
    for binding in bindings_of(mod["main"]):
        for argument in getattr(binding.value, "args", ())[1:2]:
            if isinstance(argument, relax.Tuple):
                known = [each for each in argument.fields if not isinstance(each, relax.Var)]
                found += [data_of_constant(each).numpy() for each in known]
    return found
