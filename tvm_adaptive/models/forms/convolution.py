"""Recognise tensor functions that begin with a convolution of 3 x 3 elements."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import BufferStore, PrimFunc, SeqStmt, handle, tirx
from tvm_adaptive._tvm.expressions import is_load, parts_of
from tvm_adaptive._tvm.tensor_functions import buffer_shape, realizes

_SPATIAL, _REDUCTION = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
KERNEL_SIZE = 3
_ROUNDINGS = frozenset(f"tirx.{name}" for name in ("round", "nearbyint", "ceil", "trunc", "fmod"))
# With it, exponential functions are computed, too, which reinterpret its result.
_FLOOR, _REINTERPRETED = "tirx.floor", "tirx.reinterpret"


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A tensor function whose first work is a convolution, channels last, of stride 1."""

    function: PrimFunc
    data: Any  # buffer of shape (n, height, width, channels), not padded
    kernel: Any  # buffer of shape (3, 3, channels, n_filters)
    result: Any  # buffer of shape (n, height of the result, width of the result, n_filters)
    padding: tuple[int, int]  # rows above and columns to the left of the data
    rest: tuple[Any, ...]  # the statements after the convolution
    allocated: tuple[Any, ...]  # the buffers that they need, without the result

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, height, width, channels, then height and width of the result, and filters."""
        return (*buffer_shape(self.data), *buffer_shape(self.result)[1:])

    @property
    def uses_data_again(self) -> bool:
        """Whether something else than the convolution reads its data or its weights."""
        return bool({handle(self.data), handle(self.kernel)} & self.buffers_of_rest())

    @property
    def rounds(self) -> bool:
        """Whether the statements after it round, or may, so that a last digit decides."""
        bodies = (realize.block.body for statement in self.rest for realize in realizes(statement))
        return any(
            not isinstance(each, BufferStore)
            or not _is_float(each.value)
            or _rounds(each.value)
            or (_calls(each.value, _FLOOR) and not _calls(each.value, _REINTERPRETED))
            for each in bodies
        )

    def buffers_of_rest(self) -> set[int]:
        """Return the handles of the buffers that the statements after it read or write."""
        regions = (
            region
            for statement in self.rest
            for realize in realizes(statement)
            for region in (*realize.block.reads, *realize.block.writes)
        )
        return {handle(_tvm.buffer_of(region)) for region in regions}


def convolution_of(function: PrimFunc) -> Convolution | None:
    """Return the convolution at the beginning of a function; None if there is no such one."""
    root = function.body.block
    nests = list(root.body.seq) if isinstance(root.body, SeqStmt) else [root.body]
    blocks = [_only_block(nest) for nest in nests[:2]]
    padding, place = (0, 0), 0
    padded = None
    if len(blocks) > 1 and blocks[1] is not None and blocks[1].init is not None:
        padded = _padding_of(blocks[0])
        if padded is None:
            return None
        padding, place = padded[1], 1
    block = blocks[place]
    operands = None if block is None else _operands_of(block)
    if operands is None:
        return None
    data, kernel, result = operands
    if padded is not None:
        if handle(data) != handle(padded[2]):
            return None
        data = padded[0]
    parameters = set(map(handle, function.params))
    known = {handle(result)} | ({handle(operands[0])} if place else set())
    is_result_inside = handle(result) not in parameters
    if not {handle(data), handle(kernel)} <= parameters or is_result_inside != bool(
        nests[place + 1 :]
    ):
        return None
    return Convolution(
        function,
        data,
        kernel,
        result,
        padding,
        tuple(nests[place + 1 :]),
        tuple(each for each in root.alloc_buffers if handle(each) not in known),
    )


def _rounds(expression: Any) -> bool:
    """Say whether a last digit may decide what an expression is, as in a whole number or a truth.

    Of comparisons, those that choose between two values, as a leaky ReLU does, mostly choose
    between equal ones there.
    """
    name = _name_of(expression)
    if name == _REINTERPRETED:  # of the bits of a power of two
        return False
    if isinstance(expression, tirx.Cast):
        is_float, was_float = _is_float(expression), _is_float(expression.value)
        # Whole numbers that are not of data are places.
        if (was_float and not is_float) or (is_float and not was_float and _reads(expression)):
            return True
    if isinstance(expression, tirx.EQ | tirx.NE) and _reads(expression):
        return True
    return name in _ROUNDINGS or any(map(_rounds, parts_of(expression)))


def _name_of(expression: Any) -> str:
    """Return the name of the function that an expression calls; empty of others."""
    return str(getattr(getattr(expression, "op", None), "name", ""))


def _is_float(expression: Any) -> bool:
    return str(expression.ty.dtype).startswith(("float", "bfloat"))


def _reads(expression: Any) -> bool:
    """Say whether an expression depends on a buffer."""
    return is_load(expression) or any(map(_reads, parts_of(expression)))


def _calls(expression: Any, name: str) -> bool:
    """Say whether a function of this name is called with what depends on a buffer."""
    if _name_of(expression) == name and _reads(expression):
        return True
    return any(_calls(each, name) for each in parts_of(expression))


def _only_block(nest: Any) -> Any | None:
    """Return the block within loops that has one store; None if that is not what there is."""
    found = list(realizes(nest))
    if len(found) != 1 or not isinstance(found[0].block.body, BufferStore):
        return None
    return found[0].block


def _written(block: Any) -> Any:
    return _tvm.buffer_of(block.writes[0])


def _padding_of(block: Any) -> tuple[Any, tuple[int, int], Any] | None:
    """Return the buffer that a block pads with zeros, rows and columns before it, and result."""
    if block is None:
        return None
    value = block.body.value
    arguments = list(getattr(value, "args", ()))
    if len(arguments) == 3 and getattr(arguments[2], "value", None) == 0.0:
        value = arguments[1]
    if not is_load(value) or len(block.iter_vars) != 4 or len(value.indices) != 4:
        return None
    shifts = [
        _shift_of(index, each.var)
        for index, each in zip(value.indices, block.iter_vars, strict=True)
    ]
    if None in shifts or shifts[0] or shifts[3]:
        return None
    before = (int(shifts[1] or 0), int(shifts[2] or 0))
    return _tvm.buffer_of(value), before, _written(block)


def _shift_of(index: Any, variable: Any) -> int | None:
    """Return s of the index ``variable - s``; None for another index."""
    if index.same_as(variable):
        return 0
    if isinstance(index, tirx.Sub) and index.a.same_as(variable) and hasattr(index.b, "value"):
        return int(index.b.value)
    return None


def _operands_of(block: Any) -> tuple[Any, Any, Any] | None:
    """Return data, kernel and result of a block that convolves; None for another block."""
    kinds = [int(each.iter_type) for each in block.iter_vars]
    if kinds != [_SPATIAL] * 4 + [_REDUCTION] * 3 or block.init is None:
        return None
    value = block.body.value
    product = value.b if isinstance(value, tirx.Add) else None
    if not isinstance(product, tirx.Mul):
        return None
    data, kernel = product.a, product.b
    if not (is_load(data) and is_load(kernel) and _is_dense(block, data, kernel)):
        return None
    buffers = (_tvm.buffer_of(data), _tvm.buffer_of(kernel), _written(block))
    is_float = all(str(buffer.ty.dtype) == "float32" for buffer in buffers)
    return buffers if is_float else None


def _is_dense(block: Any, data: Any, kernel: Any) -> bool:
    """Say whether a block reads as a convolution of 3 x 3, channels last, of stride 1 does."""
    n, y, x, k, ry, rx, rc = (each.var for each in block.iter_vars)
    sizes = [int(each.dom.extent) for each in block.iter_vars[4:6]]
    return (
        sizes == [KERNEL_SIZE] * 2
        and are(kernel.indices, (ry, rx, rc, k))
        and are(block.body.indices, (n, y, x, k))
        and len(data.indices) == 4
        and are((data.indices[0], data.indices[3]), (n, rc))
        and _is_sum(data.indices[1], y, ry)
        and _is_sum(data.indices[2], x, rx)
    )


def are(indices: Any, variables: Any) -> bool:
    """Say whether indices are just these variables, in this order."""
    return len(indices) == len(variables) and all(
        index.same_as(variable) for index, variable in zip(indices, variables, strict=True)
    )


def _is_sum(index: Any, a: Any, b: Any) -> bool:
    return isinstance(index, tirx.Add) and index.a.same_as(a) and index.b.same_as(b)
