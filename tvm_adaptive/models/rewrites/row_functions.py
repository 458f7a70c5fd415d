"""Softmax and normalisations, one row after the other, in vectors.

As TVM lowers them, each step is a function of the whole tensor, sums add one number after the
other, and the exponential is computed twice: no schedule makes up for that. A softmax of 591 rows
of 197 took 0.79 ms (two cores of a Zen 3, its first schedule), 0.13 ms in this form.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    BufferStore,
    ForKind,
    PrimFunc,
    SeqStmt,
    relax,
    tirx,
)
from tvm_adaptive._tvm.tensor_functions import float_buffer, integer
from tvm_adaptive.models.network import are_float32, known_extents
from tvm_adaptive.models.rewrites.fixed_functions import (
    exponential,
    fixed_function,
    float_number,
    loop_of,
    shared_by_threads,
    unravelled,
)

# Two sums at a time: one would wait for each addition.
_REGISTERS = 2
# Shorter rows have no vectors.
_LEAST_COLUMNS = 4

Columns = Callable[[Any], Any]


def row_legalizations(n_lanes: int) -> dict[str, Callable[[Any, Any], Any]]:
    """Return legalizations for ``LegalizeOps``, for vectors of so many numbers."""
    return {
        "relax.nn.softmax": functools.partial(_softmax, n_lanes),
        "relax.nn.group_norm": functools.partial(_group_norm, n_lanes),
        "relax.nn.layer_norm": functools.partial(_layer_norm, n_lanes),
    }


def _softmax(n_lanes: int, builder: Any, call: Any) -> Any | None:
    """Lower a softmax of rows; None for another one. Where all is -inf, the result is 0."""
    (x,) = call.args
    extents = known_extents(x)
    if not are_rows(extents, [int(call.attrs.axis)], x):
        return None
    rows = _Rows(extents, n_lanes)
    data, result = (float_buffer(name, extents) for name in ("data", "softmax"))
    at = rows.at
    nothing = float_number(-math.inf)
    largest, find = rows.reduced("largest", nothing, tirx.max, lambda c: _load(data, at(c)))
    total, add = rows.reduced(
        "total", float_number(0.0), operator.add, lambda c: _load(result, at(c))
    )

    def power(c: Any, _: Any) -> Any:
        return BufferStore(result, exponential(_load(data, at(c)) - largest), at(c))

    def share(c: Any, is_repeated: Any | None) -> Any:
        value = _load(result, at(c))
        found = tirx.Select(largest == nothing, float_number(0.0), value / total)
        return BufferStore(result, _unless(is_repeated, value, found), at(c))

    body = [*find, rows.each(power), *add, rows.each(share)]
    return _called(builder, call, rows.function("softmax", [data], result, body))


def _layer_norm(n_lanes: int, builder: Any, call: Any) -> Any | None:
    """Lower a normalisation of rows (Ba, Kiros and Hinton, 2016); None for another one."""
    x, gamma, beta = call.args
    extents, attrs = known_extents(x), call.attrs
    axes = [int(axis) for axis in attrs.axes]
    if not (are_rows(extents, axes, x, gamma, beta) and attrs.center and attrs.scale):
        return None
    rows = _Rows(extents, n_lanes)
    return _called(
        builder, call, _normalization(rows, extents[-1], float(attrs.epsilon), lambda c: c)
    )


def _group_norm(n_lanes: int, builder: Any, call: Any) -> Any | None:
    """Lower a normalisation of each channel (Wu and He, 2018); None for larger groups."""
    x, gamma, beta = call.args
    extents, attrs = known_extents(x), call.attrs
    axes = sorted(int(axis) % len(extents) for axis in attrs.axes) if extents else []
    if not (axes and are_float32(x, gamma, beta) and attrs.center and attrs.scale):
        return None
    channels = int(attrs.channel_axis) % len(extents)
    if int(attrs.num_groups) != extents[channels]:
        return None
    width = math.gcd(extents[-1], _REGISTERS * n_lanes)
    epsilon = float(attrs.epsilon)
    is_last = channels == len(extents) - 1
    if is_last and axes == list(range(1, len(extents) - 1)) and width >= n_lanes:
        function = _channel_normalization(extents, width, epsilon)
    elif are_rows(extents, axes, x) and channels == len(extents) - 2:
        rows = _Rows(extents, n_lanes)
        channel = rows.at(integer(0))[channels]
        function = _normalization(rows, extents[channels], epsilon, lambda _: channel)
    else:
        return None
    return _called(builder, call, function)


def _channel_normalization(extents: Sequence[int], width: int, epsilon: float) -> PrimFunc:
    """Return a function that normalises the channels of images, which are the last axis."""
    blocks = _ChannelBlocks(extents, width)
    data, result = (float_buffer(name, extents) for name in ("data", "normalized"))
    scale, shift = (float_buffer(name, [extents[-1]]) for name in ("scale", "shift"))
    means, squares, of_row = (
        float_buffer(name, [width]) for name in ("means", "squares", "of_row")
    )
    n = float_number(math.prod(extents[1:-1]))

    def squared(lane: Any, at: list[Any]) -> Any:
        distance = _load(data, at) - means[lane]
        return distance * distance

    def normalized(lane: Any, channel: Any, at: list[Any]) -> Any:
        value = (_load(data, at) - means[lane]) * squares[lane] * scale[channel] + shift[channel]
        return BufferStore(result, value, at)

    def inverse(squares: Any) -> Any:
        return float_number(1.0) / tirx.sqrt(squares / n + float_number(epsilon))

    body = [
        *map(blocks.cleared, (means, squares)),
        blocks.summed(means, of_row, lambda _, at: _load(data, at)),
        blocks.vector(lambda lane, _: BufferStore(means, means[lane] / n, [lane])),
        blocks.summed(squares, of_row, squared),
        blocks.vector(lambda lane, _: BufferStore(squares, inverse(squares[lane]), [lane])),
        blocks.everywhere(normalized),
    ]
    loop = shared_by_threads(blocks.index, blocks.n_blocks, math.prod(extents), body)
    operands = [data, scale, shift]
    return fixed_function("normalization", operands, result, loop, [means, squares, of_row])


class _ChannelBlocks:
    """Vectors of an image's channels, and the statements of one of them over all places."""

    def __init__(self, extents: Sequence[int], width: int) -> None:
        n_images, *self._spatial, n_channels = extents
        self._width, self._n_of_image = width, n_channels // width
        self.index, self.n_blocks = tirx.Var("block", "int64"), n_images * self._n_of_image

    def vector(self, store: Callable[[Any, Any], Any]) -> Any:
        """Return a loop over channels, which have a place in the block and one in the image."""
        channel = tirx.floormod(self.index, self._n_of_image) * self._width
        return loop_of("lane", self._width, lambda c: store(c, channel + c), ForKind.VECTORIZED)

    def cleared(self, buffer: Any) -> Any:
        """Return what sets a block's numbers to zero."""
        return self.vector(lambda lane, _: BufferStore(buffer, float_number(0.0), [lane]))

    def everywhere(
        self, store: Callable[[Any, Any, list[Any]], Any], row: Sequence[Any] = ()
    ) -> Any:
        """Return a loop over all places, or those of a row."""
        places = self._spatial[len(row) :]

        def at(place: Any) -> Any:
            image = tirx.floordiv(self.index, self._n_of_image)
            position = [image, *row, *unravelled(place, places)]
            return self.vector(lambda lane, channel: store(lane, channel, [*position, channel]))

        return loop_of("place", math.prod(places), at)

    def summed(self, into: Any, of_row: Any, value: Callable[[Any, list[Any]], Any]) -> Any:
        """Add rows, each by itself: a million equal numbers lose a hundredth, one by one."""

        def add(to: Any, lane: Any, _: Any, at: list[Any]) -> Any:
            return BufferStore(to, to[lane] + value(lane, at), [lane])

        def add_row(row: Any) -> Any:
            added = self.everywhere(functools.partial(add, of_row), [row])
            end = self.vector(lambda lane, _: BufferStore(into, into[lane] + of_row[lane], [lane]))
            return SeqStmt([self.cleared(of_row), added, end])

        if len(self._spatial) == 1:
            return self.everywhere(functools.partial(add, into))
        return loop_of("row", self._spatial[0], add_row)


def _normalization(rows: _Rows, n_scales: int, epsilon: float, scale_of: Columns) -> PrimFunc:
    """Return a function that subtracts a row's mean and divides by its standard deviation.

    ``scale_of`` returns the index of a column's scale and shift, of which there are ``n_scales``.
    """
    data, result = (float_buffer(name, rows.extents) for name in ("data", "normalized"))
    scale, shift = (float_buffer(name, [n_scales]) for name in ("scale", "shift"))
    at, n = rows.at, float_number(rows.n_columns)
    total, add = rows.reduced(
        "total", float_number(0.0), operator.add, lambda c: _load(data, at(c))
    )

    def centred(c: Any) -> Any:
        return _load(data, at(c)) - total / n

    def square(c: Any) -> Any:
        return centred(c) * centred(c)

    squares, add_squares = rows.reduced("squares", float_number(0.0), operator.add, square)
    factor = float_number(1.0) / tirx.sqrt(squares / n + float_number(epsilon))

    def normalized(c: Any) -> Any:
        return centred(c) * factor * scale[scale_of(c)] + shift[scale_of(c)]

    body = [
        *add,
        *add_squares,
        rows.each(lambda c, _: BufferStore(result, normalized(c), at(c))),
    ]
    return rows.function("normalization", [data, scale, shift], result, body)


def _called(builder: Any, call: Any, function: PrimFunc) -> Any:
    """Add a function to a module, and return a call of it."""
    name = str(call.op.name).rpartition(".")[2]
    return relax.call_tir(builder.add_func(function, name), list(call.args), call.ty)


class _Rows:
    """The rows of a tensor, the statements of one of them, and the buffers that they need."""

    def __init__(self, extents: Sequence[int], n_lanes: int) -> None:
        *self._outer, self.n_columns = extents
        self.extents = extents
        self._row = tirx.Var("row", "int64")
        self._allocated: list[Any] = []
        self._width = min(_REGISTERS * n_lanes, 1 << (self.n_columns.bit_length() - 1))

    def at(self, column: Any) -> list[Any]:
        """Return the indices of a number in this row."""
        return [*unravelled(self._row, self._outer), column]

    def each(self, store: Callable[[Any, Any | None], Any]) -> Any:
        """Return a loop over vectors.

        ``store`` gets a column, and whether that number was in a vector before, None if none was:
        the last vector overlaps the one before it where vectors do not divide the row.
        """
        width, n = self._width, self.n_columns

        def vector(step: Any) -> Any:
            return self._vector(lambda lane: store(step * width + lane, None))

        found = [loop_of("step", n // width, vector)]
        if n % width:
            n_more = width - n % width
            found.append(self._vector(lambda lane: store(lane + (n - width), lane < n_more)))
        return SeqStmt(found) if len(found) > 1 else found[0]

    def _vector(self, body: Columns) -> Any:
        return loop_of("lane", self._width, body, ForKind.VECTORIZED)

    def reduced(
        self, name: str, start: Any, combine: Callable[[Any, Any], Any], value: Columns
    ) -> tuple[Any, list[Any]]:
        """Return what a row's values are combined to, and the statements that compute it."""
        width = self._width
        parts, result = float_buffer(f"{name}_parts", [width]), float_buffer(name, [1])
        self._allocated += [parts, result]
        begin = self._vector(lambda lane: BufferStore(parts, start, [lane]))

        def store(column: Any, is_repeated: Any | None) -> Any:
            place = tirx.floormod(column, width)
            if is_repeated is not None:
                place = column - (self.n_columns - width)
            found = combine(parts[place], _unless(is_repeated, start, value(column)))
            return BufferStore(parts, found, [place])

        combined = functools.reduce(combine, [parts[integer(i)] for i in range(width)])
        end = BufferStore(result, combined, [integer(0)])
        return result[integer(0)], [begin, self.each(store), end]

    def function(
        self, name: str, operands: Sequence[Any], result: Any, body: Sequence[Any]
    ) -> PrimFunc:
        """Return a function of the tensor, which is the first operand, and of vectors."""
        loop = shared_by_threads(self._row, math.prod(self._outer), math.prod(self.extents), body)
        return fixed_function(name, operands, result, loop, self._allocated)


def are_rows(extents: Sequence[int], axes: Sequence[int], *values: Any) -> bool:
    """Say whether axes are those of rows that this module computes, if all values are float32."""
    if not extents or not are_float32(*values):
        return False
    is_last = [axis % len(extents) for axis in axes] == [len(extents) - 1]
    return is_last and len(extents) > 1 and extents[-1] >= _LEAST_COLUMNS


def _load(buffer: Any, indices: Sequence[Any]) -> Any:
    return buffer[tuple(indices)]


def _unless(condition: Any | None, otherwise: Any, value: Any) -> Any:
    return value if condition is None else tirx.Select(condition, otherwise, value)
