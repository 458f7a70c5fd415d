"""Attention in one function: scores, softmax and weighted values, some queries at a time.

In functions of their own, a product writes all scores, a softmax reads and writes them, another
product reads them again, and keys are transposed before. Here the scores of a block of queries stay
in the cache, as in the blocks of Rabe and Staats (arXiv 2112.05682), and a vector holds the scores
of several queries with one key: keys are read where they are, and sums and maxima are those of
vectors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import BufferStore, ForKind, PrimFunc, SeqStmt, relax, tirx
from tvm_adaptive._tvm.tensor_functions import float_buffer, integer
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.rewrites.fixed_functions import (
    exponential,
    fixed_function,
    float_number,
    loop_of,
    shared_by_threads,
    unravelled,
)
from tvm_adaptive.models.rewrites.strided_view import StridedReading
from tvm_adaptive.models.rewrites.whole_tiles import tile_rows

# Vectors of queries or of values in a row of a tile, and the time for each number: beside one
# vector there are as many loads as multiply-adds.
_VECTORS = {2: 1.0, 1: 1.2}
# Queries of a tile of results, with many registers and with few.
_QUERIES_OF_MANY, _QUERIES_OF_FEW = 8, 4
# With more queries or values for nothing, products of their own are as fast: 12 heads of 20 tokens,
# computed as 32, took 0.8 of their time, of 8 tokens, as 16, as long.
_MOST_COMPUTED = 1.7
# Keys whose scores and values the first cache keeps for all queries of a block.
_KEYS_IN_CACHE = 64
# Half of a small second-level cache, for the scores of a block.
_MOST_SCORE_BYTES = 1 << 18
_ITEM_BYTES = 4

Place = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """How many sums are in registers at the same time."""

    block: int  # queries whose scores are computed before any of their results
    keys: int  # beside one block of queries
    queries: int  # of results, beside one row of values
    values: int

    @classmethod
    def of(
        cls, unit: VectorUnit, n_queries: int, n_keys: int, n_values: int
    ) -> AttentionTiles | None:
        """Return tiles for a processor; None if the products are to be separate."""
        block = _width(n_queries, unit.lanes, 2 * unit.lanes)
        values = _width(n_values, unit.lanes, n_values)
        rows = [n for n in tile_rows(unit) if n <= n_keys]
        if not rows or values > n_values or _ITEM_BYTES * block * n_keys > _MOST_SCORE_BYTES:
            return None
        if any(
            _whole(n, width) > _MOST_COMPUTED * n
            for n, width in ((n_queries, block), (n_values, values))
        ):
            return None
        keys = min(rows, key=lambda width: (_whole(n_keys, width), -width))
        most = _QUERIES_OF_MANY if unit.has_many_registers else _QUERIES_OF_FEW
        return cls(block, keys, math.gcd(block, most), values)


def _width(n: int, lanes: int, most: int) -> int:
    """Return the width of tiles that take the least time for ``n`` numbers."""
    times = {m * lanes: time for m, time in _VECTORS.items() if m == 1 or m * lanes <= most}
    return min(times, key=lambda width: times[width] * _whole(n, width))


def _whole(n: int, width: int) -> int:
    return width * math.ceil(n / width)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax of scaled products of queries and keys, times values.

    Places of queries, keys and values run along the axes of the batch, tokens and numbers.
    """

    queries: StridedReading
    keys: StridedReading
    values: StridedReading
    bias: StridedReading | None  # added to the products; places run along batch, keys and queries
    extents: Sequence[int]  # of the result
    n_keys: int
    n_numbers: int  # of a query and of a key
    scale: float
    tiles: AttentionTiles

    def call(self, builder: Any, order: Sequence[int]) -> Any:
        """Return a call whose result has its axes in another order."""
        readings = (self.queries, self.keys, self.values, self.bias)
        sources = [each.source for each in readings if each is not None]
        function = _function(self, [known_extents(each) for each in sources], order)
        shape = [self.extents[axis] for axis in order]
        result = relax.TensorType(shape, "float32")
        return relax.call_tir(builder.add_func(function, "attention"), sources, result)


def _function(
    attention: Attention, shapes: Sequence[Sequence[int]], order: Sequence[int]
) -> PrimFunc:
    """Return the function of an attention whose result has its axes in an order."""
    names = ("queries", "keys", "values", "bias")
    operands = [float_buffer(*each) for each in zip(names, shapes, strict=False)]
    result = float_buffer("attention", [attention.extents[axis] for axis in order])
    *batch, n_queries, _ = attention.extents
    n_blocks = math.ceil(n_queries / attention.tiles.block)
    chunk = tirx.Var("chunk", "int64")
    outer = unravelled(tirx.floordiv(chunk, n_blocks), batch)
    first = tirx.floormod(chunk, n_blocks) * attention.tiles.block
    block = _Block(attention, operands, outer, first)

    def write(place: Place, value: Any) -> Any:
        return BufferStore(result, value, [place[axis] for axis in order])

    n_scores = math.prod(batch) * n_queries * attention.n_keys
    loop = shared_by_threads(chunk, math.prod(batch) * n_blocks, n_scores, block.body(write))
    return fixed_function("attention", operands, result, loop, block.buffers)


class _Block:
    """What is computed for one block of queries, and the buffers that it needs."""

    def __init__(
        self, attention: Attention, operands: Sequence[Any], outer: Place, first: Any
    ) -> None:
        self._attention, self._outer, self._first = attention, list(outer), first
        self._queries, self._keys, self._values, *self._bias = operands
        self._n_queries, self._n_values = attention.extents[-2:]
        self._tiles = tiles = attention.tiles
        self._n_columns = math.ceil(self._n_values / tiles.values)
        self._packed = float_buffer("packed", [attention.n_numbers, tiles.block])
        self._scores = float_buffer("scores", [attention.n_keys, tiles.block])
        self._sums = float_buffer("sums", [tiles.block, self._n_columns * tiles.values])
        self._largest, self._total = (
            float_buffer(name, [tiles.block]) for name in ("largest", "total")
        )
        self.buffers = [self._packed, self._scores, self._sums, self._largest, self._total]

    def body(self, write: Callable[[Place, Any], Any]) -> list[Any]:
        """Return the statements; ``write`` returns one that stores a number of the result."""
        return [self._pack(), self._score(), *self._softmax(), *self._weigh(), self._write(write)]

    def _pack(self) -> Any:
        """Return statements that turn rows of queries into columns, the last query again."""
        attention = self._attention

        def number(k: Any) -> Any:
            def pack(query: Any) -> Any:
                row = tirx.min(self._first + query, integer(self._n_queries - 1))
                at = attention.queries.indices([*self._outer, row, k])
                value = self._queries[at] * float_number(attention.scale)
                return BufferStore(self._packed, value, [k, query])

            return loop_of("query", self._tiles.block, pack)

        return loop_of("number", attention.n_numbers, number)

    def _score(self) -> Any:
        """Return statements that multiply each key with all queries of the block."""
        attention, n = self._attention, self._tiles.keys
        bias = attention.bias

        def tile(step: Any) -> Any:
            # The last tile overlaps the one before it.
            first = tirx.min(step * n, integer(attention.n_keys - n))

            def begin(key: Any, query: Any) -> Any:
                return BufferStore(self._scores, float_number(0.0), [key, query])

            def end(key: Any, query: Any) -> Any:
                # Last: next to a mask of -10,000, each product would be rounded to a thousandth.
                assert bias is not None
                at = bias.indices([*self._outer, key, self._first + query])
                return _add(self._scores, [key, query], self._bias[0][at])

            def number(k: Any) -> Any:
                def add(key: Any, query: Any) -> Any:
                    at = attention.keys.indices([*self._outer, key, k])
                    return _add(self._scores, [key, query], self._keys[at] * self._packed[k, query])

                return rows(add)

            def rows(store: Callable[[Any, Any], Any]) -> Any:
                def row(i: Any) -> Any:
                    return self._of_queries(lambda query: store(first + i, query))

                return loop_of("row", n, row, ForKind.UNROLLED)

            steps = [rows(begin), loop_of("number", attention.n_numbers, number)]
            return SeqStmt(steps if bias is None else [*steps, rows(end)])

        return loop_of("step", math.ceil(attention.n_keys / n), tile)

    def _of_queries(self, store: Callable[[Any], Any]) -> Any:
        """Return a statement for vectors of all queries of the block."""
        return loop_of("lane", self._tiles.block, store, ForKind.VECTORIZED)

    def _softmax(self) -> list[Any]:
        """Return statements that turn scores into powers of e, and add those of each query."""
        scores, largest, total = self._scores, self._largest, self._total
        nothing, zero, one = (float_number(each) for each in (-math.inf, 0.0, 1.0))

        def find(key: Any) -> Any:
            return self._of_queries(
                lambda c: BufferStore(largest, tirx.max(largest[c], scores[key, c]), [c])
            )

        def power(key: Any) -> Any:
            def store(c: Any) -> Any:
                # Of a query without keys: its powers are no numbers otherwise.
                shift = tirx.Select(largest[c] == nothing, zero, largest[c])
                return BufferStore(scores, exponential(scores[key, c] - shift), [key, c])

            add = self._of_queries(lambda c: _add(total, [c], scores[key, c]))
            return SeqStmt([self._of_queries(store), add])

        def invert(c: Any) -> Any:
            # Results are 0 where all scores are -inf, as those of our softmax.
            found = tirx.Select(largest[c] == nothing, zero, one / total[c])
            return BufferStore(total, found, [c])

        n = self._attention.n_keys
        return [
            self._of_queries(lambda c: BufferStore(largest, nothing, [c])),
            loop_of("key", n, find),
            self._of_queries(lambda c: BufferStore(total, zero, [c])),
            loop_of("key", n, power),
            self._of_queries(invert),
        ]

    def _weigh(self) -> list[Any]:
        """Return statements that add the values, each times its power."""
        tiles, n_keys = self._tiles, self._attention.n_keys

        def begin(query: Any, column: Any) -> Any:
            return self._of_values(
                column, lambda c, _: BufferStore(self._sums, float_number(0.0), [query, c])
            )

        def add(key: Any, query: Any, column: Any) -> Any:
            def store(c: Any, number: Any) -> Any:
                at = self._attention.values.indices([*self._outer, key, number])
                return _add(self._sums, [query, c], self._scores[key, query] * self._values[at])

            return self._of_values(column, store)

        def part(start: Any, n: int) -> Any:
            """Add values of keys that the first cache keeps."""

            def tile(first: Any, column: Any) -> Any:
                def key(k: Any) -> Any:
                    def row(i: Any) -> Any:
                        return add(start + k, first + i, column)

                    return loop_of("row", tiles.queries, row, ForKind.UNROLLED)

                return loop_of("key", n, key)

            def queries(step: Any) -> Any:
                return self._columns(lambda column: tile(step * tiles.queries, column))

            return loop_of("step", tiles.block // tiles.queries, queries)

        n_whole, n_rest = divmod(n_keys, _KEYS_IN_CACHE)
        found = [
            loop_of("query", tiles.block, lambda q: self._columns(lambda column: begin(q, column)))
        ]
        if n_whole:
            found.append(
                loop_of("part", n_whole, lambda i: part(i * _KEYS_IN_CACHE, _KEYS_IN_CACHE))
            )
        if n_rest:
            found.append(part(integer(n_whole * _KEYS_IN_CACHE), n_rest))
        return found

    def _columns(self, body: Callable[[Any], Any]) -> Any:
        return loop_of("column", self._n_columns, body)

    def _of_values(self, column: Any, store: Callable[[Any, Any], Any]) -> Any:
        """Return a statement for vectors of a column of values.

        ``store`` gets places in a row of sums and in one of values: the last column of values
        overlaps the one before where columns do not divide them.
        """
        width = self._tiles.values
        first = column * width
        if self._n_values % width:
            first = tirx.min(first, integer(self._n_values - width))

        def lane(c: Any) -> Any:
            return store(column * width + c, first + c)

        return loop_of("lane", width, lane, ForKind.VECTORIZED)

    def _write(self, write: Callable[[Place, Any], Any]) -> Any:
        """Return statements that divide sums by those of the powers, and write the result."""

        def query(i: Any) -> Any:
            def store(c: Any, number: Any) -> Any:
                value = self._sums[i, c] * self._total[i]
                return write([*self._outer, self._first + i, number], value)

            row = self._columns(lambda column: self._of_values(column, store))
            if self._n_queries % self._tiles.block:
                row = tirx.IfThenElse(self._first + i < self._n_queries, row, None)
            return row

        return loop_of("query", self._tiles.block, query)


def _add(buffer: Any, place: Place, value: Any) -> Any:
    """Return a statement that adds to a number of a buffer."""
    return BufferStore(buffer, buffer[tuple(place)] + value, list(place))
