"""Products and convolutions of a few more rows or columns, which tiles of registers divide.

A schedule splits loops without remainder. It would compute the 197 rows of a vision transformer
one by one, and the 1,000 classes of an image classifier by half a vector register at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import relax, te, topi
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.models.network import are_float32, known_extents, layouts_of

# Rows that a tile of registers has in a fast product, whatever the vectors. More do not fit into a
# set of the first cache where rows are a page apart.
_TILE_ROWS = range(6, 13)
# The same with 16 registers: two vectors in a row. Of sums with one vector in a row, LLVM puts each
# into the register of the number that was multiplied, and moves it or spills others: a product in
# tiles of 8 x 1 vectors took 1.3 to 1.9 x as long as in 4 x 2 to 6 x 2, of 12 x 1 1.6 to 2.0 x.
_TILE_ROWS_OF_FEW = range(4, 7)
# Fewer rows fit into one tile.
_LEAST_ROWS = 32
# Vectors of a fast tile in a row, beside one.
_TILE_VECTORS = (2, 3, 4)
# With a larger share of rows for nothing, tiles gain too little.
_MOST_ROWS = 1.1
# 24 columns instead of 20 take 0.8 of the time, 48 instead of 44 0.6, 16 instead of 12 1.3.
_MOST_COLUMNS = 1.2
# With 16 registers, an even number of vectors: 1,008 columns instead of 1,000 take 0.86 of the
# time, 48 instead of 40 1.06 to 1.2.
_MOST_EVEN_COLUMNS = 1.05

# None for a call that it does not lower.
Legalization = Callable[[Any, Any], Any | None]
# From places along the axes of an operand of a product to its indices.
Indices = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Widened:
    """Constants with columns of zeros after their own; one for all calls that share one."""

    def __init__(self) -> None:
        # By the handle of a constant, which is kept, and the number of columns.
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(self, weight: Any, n_wide: int) -> Any:
        """Return a constant of so many columns."""
        key = _tvm.handle(weight), n_wide
        if key not in self._known:
            values = _tvm.data_of_constant(weight).numpy()
            more = [(0, 0)] * (values.ndim - 1) + [(0, n_wide - values.shape[-1])]
            self._known[key] = weight, relax.const(_tvm.tensor(np.pad(values, more)))
        return self._known[key][1]


def whole_tile_legalizations(unit: VectorUnit) -> dict[str, Legalization]:
    """Return legalizations for ``relax.transform.LegalizeOps``, for processors."""
    widened = _Widened()
    return {
        "relax.matmul": functools.partial(_product, unit, widened),
        "relax.nn.conv1d": functools.partial(_convolution_1d, unit),
        "relax.nn.conv2d": functools.partial(_convolution, unit, widened),
    }


def _product(unit: VectorUnit, widened: _Widened, builder: Any, call: Any) -> Any | None:
    """Lower a product of matrices, with more rows and columns where tiles need them."""
    a, b = call.args
    extents = [*map(known_extents, (a, b))]
    batch, others = extents[0][:-2], extents[1][:-2]
    is_plain = min(map(len, extents)) > 1 and (not others or others == batch)
    if not (is_plain and are_float32(a, b, call)):
        return None
    n_rows, n_columns = extents[0][-2], extents[1][-1]
    is_constant = isinstance(b, _tvm.Constant)
    tiles = product_tiles(unit, n_rows, n_columns, is_constant=is_constant)
    if tiles == (n_rows, n_columns):
        return None
    compute = functools.partial(_tiled_product, tiles, n_columns)
    b = widened(b, tiles[1]) if is_constant else b
    return builder.call_te(compute, a, b, primfunc_name_hint="matmul")


def product_tiles(
    unit: VectorUnit, n_rows: int, n_columns: int, *, is_constant: bool = False
) -> tuple[int, int]:
    """Return how many rows and columns of a product to compute.

    Constants get more columns for nothing. Of another matrix that is a copy, which takes as long as
    the product of a few rows.
    """
    is_widened = is_constant or n_rows >= _LEAST_ROWS
    n_wide = _whole_columns(n_columns, unit) if is_widened else n_columns
    return whole_rows(n_rows, unit), n_wide


def _convolution(unit: VectorUnit, widened: _Widened, builder: Any, call: Any) -> Any | None:
    """Lower a convolution, with more channels where vectors need them."""
    data, kernel = call.args
    attrs = call.attrs
    layouts = layouts_of(call)
    is_plain = layouts == ["NHWC", "HWIO", "NHWC"] and int(attrs.groups) == 1
    if not (is_plain and are_float32(data, kernel, call) and isinstance(kernel, _tvm.Constant)):
        return None
    n_filters = int(kernel.ty.shape[-1])
    n_wide = _whole_columns(n_filters, unit)
    if n_wide == n_filters:
        return None
    strides, padding, dilation = (
        [int(n) for n in each] for each in (attrs.strides, attrs.padding, attrs.dilation)
    )

    def compute(x: Any, weight: Any) -> Any:
        result = topi.nn.conv(x, weight, strides, padding, dilation, 1, *layouts[:2])
        return _cut(result, [*result.shape[:-1], n_filters], "columns")

    wide = widened(kernel, n_wide)
    return builder.call_te(compute, data, wide, primfunc_name_hint="conv2d")


def _convolution_1d(unit: VectorUnit, builder: Any, call: Any) -> Any | None:
    """Lower a convolution along one axis, with more places where tiles need them."""
    data, kernel = call.args
    attrs = call.attrs
    layouts = layouts_of(call)
    is_plain = layouts == ["NWC", "WIO", "NWC"] and int(attrs.groups) == 1
    extents = known_extents(call) if is_plain else []
    n = extents[1] if extents else 0
    n_rows = whole_rows(n, unit)
    if n_rows == n or not are_float32(data, kernel, call):
        return None
    (stride,), (dilation,) = ([int(n) for n in each] for each in (attrs.strides, attrs.dilation))
    before, after = (int(n) for n in attrs.padding)

    def compute(x: Any, weight: Any) -> Any:
        batch, _, n_channels = x.shape
        size, _, n_filters = weight.shape
        if before or after:
            x = topi.nn.pad(x, [0, before, 0], [0, after, 0], name="pad_temp")
        r = te.reduce_axis((0, size), name="ry")
        c = te.reduce_axis((0, n_channels), name="rc")

        def element(image: Any, row: Any, filter_: Any) -> Any:
            place = te.min(row, n - 1) * stride + r * dilation
            return te.sum(x[image, place, c] * weight[r, c, filter_], axis=[r, c])

        wide = te.compute((batch, n_rows, n_filters), element, name="conv1d_nwc")
        return _cut(wide, (batch, n, n_filters), "rows")

    return builder.call_te(compute, data, kernel, primfunc_name_hint="conv1d")


def tile_rows(unit: VectorUnit) -> range:
    """Return how many rows a tile of registers has in a fast product."""
    return _TILE_ROWS if unit.has_many_registers else _TILE_ROWS_OF_FEW


def whole_rows(n: int, unit: VectorUnit) -> int:
    """Return how many rows to compute instead of ``n``: as many if tiles divide them."""
    if n < _LEAST_ROWS:
        return n
    more = range(n, int(_MOST_ROWS * n) + 1)
    return next((m for m in more if any(m % rows == 0 for rows in tile_rows(unit))), n)


def _whole_columns(n: int, unit: VectorUnit) -> int:
    """Return how many columns to compute instead of ``n``: as many if vectors divide them."""
    more = range(n + -n % unit.lanes, int(_MOST_COLUMNS * n) + 1, unit.lanes)
    if n in more:
        n_even = n + n % (2 * unit.lanes)
        is_even = not unit.has_many_registers and n_even <= _MOST_EVEN_COLUMNS * n
        return n_even if is_even else n
    if not more:
        return n
    in_tiles = (m for m in more if any(m // unit.lanes % each == 0 for each in _TILE_VECTORS))
    return next(in_tiles, more[0])


def _tiled_product(tiles: tuple[int, int], n_columns: int, a: Any, b: Any) -> Any:
    """Return a product of which more rows and columns are computed than it has."""
    extents = [*(int(each) for each in a.shape[:-1]), n_columns]
    first = len(extents) - len(b.shape)  # of the axes of b: it has no others if all share a matrix
    operands = (a, tuple), (b, lambda places: tuple(places[first:]))
    return tiled_product(*operands, extents, int(a.shape[-1]), tiles=tiles)


def tiled_product(
    left: tuple[Any, Indices],
    right: tuple[Any, Indices],
    extents: Sequence[int],
    depth: int,
    *,
    tiles: tuple[int, int],
    order: Sequence[int] | None = None,
) -> Any:
    """Return a product of matrices, of which ``tiles`` rows and columns are computed.

    Each operand comes with what turns places of batch, row and column into its indices. With
    ``order``, the result has its axes in that order.
    """
    (a, of_a), (b, of_b) = left, right
    if tiles[1] > int(b.shape[-1]):
        b = _with_more_columns(b, tiles[1])
    n_rows, axes = extents[-2], range(len(extents)) if order is None else order
    wide = [*extents[:-2], *tiles]
    k = te.reduce_axis((0, depth), name="k")

    def element(*ordered: Any) -> Any:
        places = dict(zip(axes, ordered, strict=True))
        *outer, row, column = (places[axis] for axis in range(len(extents)))
        # The last row again, which needs no copy with zeros.
        row = te.min(row, n_rows - 1) if tiles[0] > n_rows else row
        return te.sum(a[of_a([*outer, row, k])] * b[of_b([*outer, k, column])], axis=k)

    product = te.compute([wide[axis] for axis in axes], element, name="matmul")
    is_whole = wide == list(extents)
    return product if is_whole else _cut(product, [extents[axis] for axis in axes], "rows")


def _with_more_columns(b: Any, n_wide: int) -> Any:
    """Return a copy with columns of zeros: the last one again would be loaded number by number."""
    *outer, n = (int(each) for each in b.shape)
    pad = [0] * len(outer)
    return topi.nn.pad(b, [*pad, 0], [*pad, n_wide - n], name="columns_pad")


def _cut(wide: Any, shape: Sequence[Any], name: str) -> Any:
    """Return the part of a result that there is in truth."""
    return te.compute(tuple(shape), lambda *places: wide[places], name=name)
