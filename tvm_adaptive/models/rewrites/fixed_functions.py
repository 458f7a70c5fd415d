"""Functions whose loops are given: all of them are in one block, which no schedule changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import For, ForKind, PrimFunc, SeqStmt, tirx
from tvm_adaptive._tvm.default_schedules import LEAST_STEPS
from tvm_adaptive._tvm.tensor_functions import block_in_loops, integer, tensor_function, whole

# TVM's pattern of functions that elementwise ones may follow.
_ELEMENTWISE_MAY_FOLLOW = 4
# Below, e^x is no normal number.
_LEAST_EXPONENT = -87.0
# ln 2 in two parts, the first of which has zeros in its last bits (Cody and Waite, Software Manual
# for the Elementary Functions, 1980).
_LN2_FIRST = 355 / 512
_LN2_REST = math.log(2) - _LN2_FIRST
# Terms of the series of e^x: with |x| below ln(2) / 2, the rest is below 1.2e-7.
_N_TERMS = 7
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127


def fixed_function(
    name: str, operands: Sequence[Any], result: Any, loop: Any, allocated: Sequence[Any]
) -> PrimFunc:
    """Return a function of buffers that elementwise ones may follow.

    MetaSchedule would take the rows of a block with loops as a vector.
    """
    regions = [(each, [*map(whole, map(int, each.shape))]) for each in (*operands, result)]
    block = block_in_loops(name, [], regions[:-1], regions[-1:], loop, allocated=allocated)
    function = tensor_function([*operands, result], block)
    return function.with_attr("op_pattern", _ELEMENTWISE_MAY_FOLLOW)


def shared_by_threads(variable: Any, n_steps: int, n_numbers: int, body: Sequence[Any]) -> Any:
    """Return a loop that the threads share, if there is enough to do."""
    kind = ForKind.PARALLEL if n_numbers >= LEAST_STEPS else ForKind.SERIAL
    return For(variable, integer(0), integer(n_steps), kind, SeqStmt(list(body)))


def loop_of(name: str, n: int, body: Callable[[Any], Any], kind: Any = ForKind.SERIAL) -> Any:
    """Return a loop whose body follows from its variable."""
    variable = tirx.Var(name, "int64")
    return For(variable, integer(0), integer(n), kind, body(variable))


def unravelled(place: Any, extents: Sequence[int]) -> list[Any]:
    """Return the indices of a place in row-major order."""
    indices: list[Any] = []
    for extent in reversed(extents):
        indices.insert(0, tirx.floormod(place, extent))
        place = tirx.floordiv(place, extent)
    return indices


def float_number(value: float) -> Any:
    """Return a number of float32."""
    return tirx.const(value, "float32")


def exponential(x: Any) -> Any:
    """Return e^x of an x of 0 or less: 2^k times the series of the rest.

    What would be next to the least number of float32 is 0: processors compute slowly with the
    shares of a softmax that would follow.
    """
    least = float_number(_LEAST_EXPONENT)
    is_nothing = x < least  # which leaves NaN as it is
    x = tirx.Select(is_nothing, least, x)
    k = tirx.floor(x * float_number(1 / math.log(2)) + float_number(0.5))
    rest = x - k * float_number(_LN2_FIRST) - k * float_number(_LN2_REST)
    series = float_number(1 / math.factorial(_N_TERMS - 1))
    for power in reversed(range(_N_TERMS - 1)):
        series = series * rest + float_number(1 / math.factorial(power))
    bits = (k.astype("int32") + _EXPONENT_BIAS) << _MANTISSA_BITS
    found = series * tirx.reinterpret("float32", bits)
    return tirx.Select(is_nothing, float_number(0.0), found)
