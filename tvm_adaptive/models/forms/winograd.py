"""A convolution as three tensor functions: Winograd's minimal filtering in two dimensions.

Input transform, one matrix product for each element of a tile, output transform with what
follows the convolution. The functions have no schedule: they are tuned like all others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import Bind, BufferStore, PrimFunc, SeqStmt, handle, te, tirx
from tvm_adaptive._tvm.tensor_functions import (
    as_private,
    block_in_loops,
    buffer_shape,
    float_buffer,
    integer,
    one,
    spatial_iterator,
    tensor_function,
    whole,
)
from tvm_adaptive.models.forms.epilogue import epilogue_of
from tvm_adaptive.models.forms.minimal_filtering import combinations
from tvm_adaptive.models.forms.tiles import Tiles

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "scaled": lambda x, factor: x * tirx.const(factor, "float32"),
    "plus": operator.add,
    "minus": operator.sub,
}


def input_function(tiles: Tiles) -> PrimFunc:
    """Return B^T d B of each tile: from the data to (products, tiles, channels)."""
    convolution, n = tiles.convolution, tiles.filtering.n_inputs
    _, height, width, n_channels, *_ = convolution.shape
    data = float_buffer("data", buffer_shape(convolution.data))
    result = float_buffer("tiles", (tiles.n_products, tiles.n_tiles, n_channels))
    tile, channel = spatial_iterator("tile", tiles.n_tiles), spatial_iterator("channel", n_channels)
    image, first_row, first_column = tiles.origin(tile.var)

    def value(row: int, column: int) -> Any:
        (up, left), (rows, columns) = convolution.padding, tiles.grid
        y, x = first_row + (row - up), first_column + (column - left)
        conditions = [
            *_conditions(y, row - up, (rows - 1) * tiles.size, height),
            *_conditions(x, column - left, (columns - 1) * tiles.size, width),
        ]
        loaded = data[image, y, x, channel.var]
        if not conditions:
            return loaded
        # No selection between two values: that would load what is outside of the data.
        return tirx.if_then_else(tirx.all(*conditions), loaded, tirx.const(0.0, "float32"))

    names = _Names()
    values = [[names.bind(value(row, column)) for column in range(n)] for row in range(n)]
    stores = [
        BufferStore(result, element, [integer(place), tile.var, channel.var])
        for place, element in enumerate(_transformed(tiles.filtering.data, values, names))
    ]
    reads = [(data, [*map(whole, buffer_shape(data)[:3]), one(channel.var)])]
    writes = [(result, [whole(tiles.n_products), one(tile.var), one(channel.var)])]
    body = SeqStmt([*names.statements, *stores])
    block = block_in_loops("winograd_input", (tile, channel), reads, writes, body)
    return tensor_function([data, result], block)


def product_function(tiles: Tiles, *, packed: bool) -> PrimFunc:
    """Return the matrix products: (products, tiles, channels) by (products, channels, filters)."""
    _, _, _, n_channels, *_, n_filters = tiles.convolution.shape
    data = te.placeholder((tiles.n_products, tiles.n_tiles, n_channels), name="tiles")
    kernel = te.placeholder((tiles.n_products, n_channels, n_filters), name="kernel")
    c = te.reduce_axis((0, n_channels), name="c")
    shape = (tiles.n_products, tiles.n_tiles, n_filters)
    result = te.compute(
        shape,
        lambda b, i, k: te.sum(data[b, i, c] * kernel[b, c, k], axis=c),
        name="winograd_product",
    )
    function = te.create_prim_func([data, kernel, result], index_dtype_override="int64")
    return as_private(function, layout_free=[1] if packed else [])


def output_function(tiles: Tiles) -> PrimFunc:
    """Return A^T m A of each tile, and what follows the convolution.

    Its parameters are the products and then those of the convolution's function, without
    data and weights.
    """
    convolution, size = tiles.convolution, tiles.size
    _, _, _, _, height, width, n_filters = convolution.shape
    products = float_buffer("products", (tiles.n_products, tiles.n_tiles, n_filters))
    tile, filter_ = spatial_iterator("tile", tiles.n_tiles), spatial_iterator("filter", n_filters)
    image, first_row, first_column = tiles.origin(tile.var)
    n = tiles.filtering.n_inputs
    names = _Names()
    values = [
        [
            names.bind(products[integer(row * n + column), tile.var, filter_.var])
            for column in range(n)
        ]
        for row in range(n)
    ]
    found = [names.bind(each) for each in _transformed(tiles.filtering.results, values, names)]
    epilogue = epilogue_of(convolution)
    result = convolution.result if epilogue is None else epilogue.result
    stores = []
    for (row, column), value in zip(itertools.product(range(size), repeat=2), found, strict=True):
        index = (image, first_row + row, first_column + column, filter_.var)
        conditions = [
            *_conditions(index[1], row, (tiles.grid[0] - 1) * size, height),
            *_conditions(index[2], column, (tiles.grid[1] - 1) * size, width),
        ]
        final = value if epilogue is None else epilogue.applied(value, index)
        store = BufferStore(result, final, list(index))
        if conditions:
            store = tirx.IfThenElse(tirx.all(*conditions), store, None)
        stores.append(store)
    block = block_in_loops(
        "winograd_output",
        (tile, filter_),
        [
            (products, [whole(tiles.n_products), one(tile.var), one(filter_.var)]),
            *_reads_of(epilogue),
        ],
        [(result, [*map(whole, buffer_shape(result)[:3]), one(filter_.var)])],
        SeqStmt([*names.statements, *stores]),
    )
    own = {handle(convolution.data), handle(convolution.kernel)}
    others = [each for each in convolution.function.params if handle(each) not in own]
    if epilogue is not None or not convolution.rest:
        return tensor_function([products, *others], block)
    return tensor_function(
        [products, *others],
        SeqStmt([block, *convolution.rest]),
        [convolution.result, *convolution.allocated],
    )


def _reads_of(epilogue: Any) -> list[tuple[Any, list[Any]]]:
    """Return the regions that an epilogue may read, as a whole."""
    buffers = [] if epilogue is None else epilogue.operands
    return [(buffer, [*map(whole, buffer_shape(buffer))]) for buffer in buffers]


class _Names:
    """Names for values that are used more than once.

    Without them each of the 36 results repeats the expressions of its inputs, and LLVM takes
    seconds to find that out.
    """

    def __init__(self) -> None:
        self.statements: list[Any] = []

    def bind(self, value: Any) -> Any:
        """Return a variable with a value of float32."""
        variable = tirx.Var(f"value{len(self.statements)}", "float32")
        self.statements.append(Bind(variable, value))
        return variable


def _transformed(
    matrix: Sequence[Sequence[Any]], values: Sequence[Sequence[Any]], names: _Names
) -> list[Any]:
    """Return ``matrix values matrix^T``, row by row."""
    columns = [
        combinations(matrix, [row[place] for row in values], **_OPERATIONS)
        for place in range(len(values[0]))
    ]
    rows = zip(*[[*map(names.bind, column)] for column in columns], strict=True)
    return [each for row in rows for each in combinations(matrix, row, **_OPERATIONS)]


def _conditions(index: Any, first: int, last: int, extent: int) -> list[Any]:
    """Return when an index is within an extent, from its offsets in the first and last tile."""
    found = [index >= integer(0)] if first < 0 else []
    return [*found, index < integer(extent)] if first + last >= extent else found
