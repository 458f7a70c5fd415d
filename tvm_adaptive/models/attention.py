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

from tvm_adaptive._tvm import BufferStore, For, ForKind, PrimFunc, SeqStmt, relax, tirx
from tvm_adaptive._tvm.tensor_functions import float_buffer, integer
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.models.fixed_functions import (
    exponential,
    fixed_function,
    float_number,
    shared_by_threads,
    unravelled,
)
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.strided_view import Reading
from tvm_adaptive.models.whole_tiles import tile_rows

# Vectors of queries, of which sums of several keys are in registers at the same time.
_QUERY_VECTORS = 2
# Sums of weighted values: queries beside each other, and vectors of values.
_QUERIES_OF_MANY, _QUERIES_OF_FEW, _VALUE_VECTORS = 8, 4, 2
_MANY_REGISTERS = 32
# With a larger share of queries for nothing, products of their own are faster.
_MOST_QUERIES = 1.4
# Keys whose scores and values the first cache keeps for all queries of a block.
_KEYS_IN_CACHE = 64
# Half of a small second-level cache, for the scores of a block.
_MOST_SCORE_BYTES = 1 << 18
_ITEM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """How many sums are in registers at the same time."""

    block: int  # queries whose scores are computed before any of their results
    keys: int  # beside one block of queries
    queries: int  # of results, beside one row of values
    values: int

    @classmethod
    def of(
        cls, unit: VectorUnit, extents: Sequence[int], inner: tuple[int, int]
    ) -> AttentionTiles | None:
        """Return tiles for a processor; None if the products are to be separate."""
        (*_, n_queries, n_values), (n_keys, _) = extents, inner
        block = _QUERY_VECTORS * unit.lanes
        n_computed = block * math.ceil(n_queries / block)
        rows = [n for n in tile_rows(unit) if n <= n_keys]
        is_small = _ITEM_BYTES * block * n_keys <= _MOST_SCORE_BYTES
        is_worth = n_computed <= _MOST_QUERIES * n_queries and n_values % unit.lanes == 0
        if not (rows and is_small and is_worth):
            return None
        keys = min(rows, key=lambda n: (n * math.ceil(n_keys / n), -n))
        has_many = unit.n_registers >= _MANY_REGISTERS
        queries = _QUERIES_OF_MANY if has_many else _QUERIES_OF_FEW
        return cls(block, keys, queries, math.gcd(n_values, _VALUE_VECTORS * unit.lanes))


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax of scaled products of queries and keys, times values.

    Places of queries, keys and values run along the axes of the batch, tokens and numbers.
    """

    queries: Reading
    keys: Reading
    values: Reading
    bias: Reading | None  # added to the products; places run along batch, keys and queries
    extents: Sequence[int]  # of the result
    inner: tuple[int, int]  # keys, and numbers of a query and of a key
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

    def write(places: Sequence[Any], value: Any) -> Any:
        return BufferStore(result, value, [places[axis] for axis in order])

    n_numbers = math.prod(batch) * n_queries * attention.inner[0]
    loop = shared_by_threads(chunk, math.prod(batch) * n_blocks, n_numbers, block.body(write))
    return fixed_function("attention", operands, result, loop, block.buffers)


class _Block:
    """What is computed for one block of queries, and the buffers that it needs."""

    def __init__(
        self, attention: Attention, operands: Sequence[Any], outer: Sequence[Any], first: Any
    ) -> None:
        self._attention, self._outer, self._first = attention, list(outer), first
        self._queries, self._keys, self._values, *self._bias = operands
        self._n_queries, self._n_values = attention.extents[-2:]
        tiles = attention.tiles
        self._packed = float_buffer("packed", [attention.inner[1], tiles.block])
        self._scores = float_buffer("scores", [attention.inner[0], tiles.block])
        self._sums = float_buffer("sums", [tiles.block, self._n_values])
        self._largest, self._total = (
            float_buffer(name, [tiles.block]) for name in ("largest", "total")
        )
        self.buffers = [self._packed, self._scores, self._sums, self._largest, self._total]

    def body(self, write: Callable[[Sequence[Any], Any], Any]) -> list[Any]:
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

            return _loop("query", attention.tiles.block, pack)

        return _loop("number", attention.inner[1], number)

    def _score(self) -> Any:
        """Return statements that multiply each key with all queries of the block."""
        attention, n = self._attention, self._attention.tiles.keys

        def tile(step: Any) -> Any:
            # The last tile overlaps the one before it.
            key = tirx.min(step * n, integer(attention.inner[0] - n))

            def begin(row: Any, lane: Any) -> Any:
                return BufferStore(self._scores, self._biased(key + row, lane), [key + row, lane])

            def number(k: Any) -> Any:
                def add(row: Any, lane: Any) -> Any:
                    at = attention.keys.indices([*self._outer, key + row, k])
                    more = self._keys[at] * self._packed[k, lane]
                    place = [key + row, lane]
                    return BufferStore(self._scores, self._scores[tuple(place)] + more, place)

                return self._rows(n, add)

            return SeqStmt([self._rows(n, begin), _loop("number", attention.inner[1], number)])

        return _loop("step", math.ceil(attention.inner[0] / n), tile)

    def _biased(self, key: Any, lane: Any) -> Any:
        """Return what is added to the score of a query with a key."""
        bias = self._attention.bias
        if bias is None:
            return float_number(0.0)
        (buffer,) = self._bias
        return buffer[bias.indices([*self._outer, key, self._first + lane])]

    def _rows(self, n: int, store: Callable[[Any, Any], Any]) -> Any:
        """Return statements for some rows of scores, in vectors of queries."""
        return _loop("row", n, lambda row: self._vector(lambda c: store(row, c)), ForKind.UNROLLED)

    def _vector(self, store: Callable[[Any], Any]) -> Any:
        """Return a statement for all queries of the block."""
        return _loop("lane", self._attention.tiles.block, store, ForKind.VECTORIZED)

    def _softmax(self) -> list[Any]:
        """Return statements that turn scores into powers of e, and add those of each query."""
        scores, largest, total = self._scores, self._largest, self._total
        nothing, zero, one = (float_number(each) for each in (-math.inf, 0.0, 1.0))

        def shift(c: Any) -> Any:
            # Of a query without keys: its powers are no numbers otherwise.
            return tirx.Select(largest[c] == nothing, zero, largest[c])

        def find(key: Any) -> Any:
            return self._vector(
                lambda c: BufferStore(largest, tirx.max(largest[c], scores[key, c]), [c])
            )

        def power(key: Any) -> Any:
            found = self._vector(
                lambda c: BufferStore(scores, exponential(scores[key, c] - shift(c)), [key, c])
            )
            add = self._vector(lambda c: BufferStore(total, total[c] + scores[key, c], [c]))
            return SeqStmt([found, add])

        n = self._attention.inner[0]
        return [
            self._vector(lambda c: BufferStore(largest, nothing, [c])),
            _loop("key", n, find),
            self._vector(lambda c: BufferStore(total, zero, [c])),
            _loop("key", n, power),
            # Results are 0 where all scores are -inf, as those of our softmax.
            self._vector(
                lambda c: BufferStore(
                    total, tirx.Select(largest[c] == nothing, zero, one / total[c]), [c]
                )
            ),
        ]

    def _weigh(self) -> list[Any]:
        """Return statements that add the values, each times its power."""
        attention, tiles = self._attention, self._attention.tiles
        n_keys, n_columns = attention.inner[0], self._n_values // tiles.values

        def columns(column: Any, store: Callable[[Any], Any]) -> Any:
            start = column * tiles.values
            return _loop("lane", tiles.values, lambda c: store(start + c), ForKind.VECTORIZED)

        def begin(query: Any) -> Any:
            def store(c: Any) -> Any:
                return BufferStore(self._sums, float_number(0.0), [query, c])

            return _loop("column", n_columns, lambda column: columns(column, store))

        def add(key: Any, query: Any, c: Any) -> Any:
            at = attention.values.indices([*self._outer, key, c])
            more = self._scores[key, query] * self._values[at]
            return BufferStore(self._sums, self._sums[query, c] + more, [query, c])

        def block(start: Any, n: int) -> Any:
            def tile(first: Any, column: Any) -> Any:
                def rows(key: Any) -> Any:
                    def row(i: Any) -> Any:
                        return columns(column, lambda c: add(start + key, first + i, c))

                    return _loop("row", tiles.queries, row, ForKind.UNROLLED)

                return _loop("key", n, rows)

            def tiles_of(i: Any) -> Any:
                return _loop("column", n_columns, lambda column: tile(i * tiles.queries, column))

            return _loop("tile", tiles.block // tiles.queries, tiles_of)

        n_whole, n_rest = divmod(n_keys, _KEYS_IN_CACHE)
        found = [_loop("query", tiles.block, begin)]
        if n_whole:
            found.append(
                _loop("part", n_whole, lambda i: block(i * _KEYS_IN_CACHE, _KEYS_IN_CACHE))
            )
        if n_rest:
            found.append(block(integer(n_whole * _KEYS_IN_CACHE), n_rest))
        return found

    def _write(self, write: Callable[[Sequence[Any], Any], Any]) -> Any:
        """Return statements that divide sums by those of the powers, and write the result."""
        tiles = self._attention.tiles
        n_columns = self._n_values // tiles.values

        def query(i: Any) -> Any:
            def column(j: Any) -> Any:
                def store(c: Any) -> Any:
                    place = j * tiles.values + c
                    value = self._sums[i, place] * self._total[i]
                    return write([*self._outer, self._first + i, place], value)

                return _loop("lane", tiles.values, store, ForKind.VECTORIZED)

            return _loop("column", n_columns, column)

        n = tirx.min(integer(tiles.block), integer(self._n_queries) - self._first)
        return _loop("query", n, query)


def _loop(name: str, n: Any, body: Callable[[Any], Any], kind: Any = ForKind.SERIAL) -> Any:
    """Return a loop whose body follows from its variable."""
    variable = tirx.Var(name, "int64")
    extent = integer(n) if isinstance(n, int) else n
    return For(variable, integer(0), extent, kind, body(variable))
