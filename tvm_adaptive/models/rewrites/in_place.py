"""Products of matrices that read their operands, and write their results, where these are.

Attention takes queries, keys and values out of one tensor, head by head, and puts the heads of its
results side by side again. A product can read rows of its first operand anywhere, those of its
second one as long as columns are side by side, and its result may have its axes in any order but
for the columns. The keys remain, which have to be transposed, and values whose rows evict each
other from the cache: one or two copies instead of seven.

Attention that nothing else looks into is one function, see ``attention``, which copies none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, handle, relax
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.models.network import (
    are_float32,
    known_extents,
    operator_of,
    uses_of,
    with_rewritten_main,
    without_dead_bindings,
)
from tvm_adaptive.models.rewrites.attention import Attention, AttentionTiles
from tvm_adaptive.models.rewrites.moves import MOVES, RESHAPES, TRANSPOSE, moved, part_of
from tvm_adaptive.models.rewrites.strided_view import StridedAxis, StridedReading, StridedView
from tvm_adaptive.models.rewrites.whole_tiles import product_tiles, tiled_product

_PRODUCT, _SOFTMAX = "relax.matmul", "relax.nn.softmax"
_ITEM_BYTES = 4
# Of the first cache of nearly all cores. Rows as far apart as a way is long share their sets: heads
# of 64 numbers in rows of 1,536 took 1.6 x as long in place, a copy of them a twentieth of that.
_WAY_BYTES, _N_WAYS = 4096, 8


def with_products_in_place(
    mod: IRModule, unit: VectorUnit, *, computes_softmax: bool = True
) -> IRModule:
    """Return a module without most of the copies around batched products.

    A number that an operand is multiplied by multiplies the result instead, where the product may
    have it done at once. With ``computes_softmax``, attention is one function.
    """
    rewriter = _Rewriter(mod, unit, computes_softmax=computes_softmax)
    return without_dead_bindings(with_rewritten_main(mod, rewriter))


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand as numbers of the tensor that they were computed in."""

    source: Any
    view: StridedView
    factor: float = 1.0

    @classmethod
    def of(cls, value: Any) -> _Operand:
        """Return a value as it is."""
        return cls(value, StridedView.of(known_extents(value)))

    @property
    def has_rows(self) -> bool:
        """Say whether the numbers of its last axis are side by side in the source."""
        return self.view.axes() is not None and self.view.strides[-1] == 1


# What is added to scores, and the axes that scores have there beside those of queries and keys.
_Added = tuple[Any, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Products of queries and keys, times a number, and what is added to them."""

    queries: _Operand
    keys: _Operand
    scale: float
    added: tuple[_Added, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Product:
    """A batched product."""

    left: StridedReading
    right: StridedReading
    extents: Sequence[int]  # of the result
    depth: int
    tiles: tuple[int, int]  # rows and columns that are computed

    def call(self, builder: Any, order: Sequence[int]) -> Any:
        """Return a call whose result has its axes in another order."""

        def compute(a: Any, b: Any) -> Any:
            operands = (a, self.left.indices), (b, self.right.indices)
            return tiled_product(*operands, self.extents, self.depth, tiles=self.tiles, order=order)

        operands = self.left.source, self.right.source
        return builder.call_te(compute, *operands, primfunc_name_hint="matmul")


@dataclasses.dataclass(frozen=True)
class _Moved:
    """The result of a product, reshaped and transposed."""

    product: _Product | Attention
    view: StridedView

    @property
    def order(self) -> list[int] | None:
        """The order of the product's axes that makes a reshape of the moves; None without one."""
        plain = StridedView.of(self.product.extents)
        own, left = (
            [each for each in zip(view.extents, view.strides, strict=True) if each[0] != 1]
            for view in (plain, self.view)
        )
        if sorted(own) != sorted(left) or own[-1:] != left[-1:]:
            return None
        axes = list(zip(plain.extents, plain.strides, strict=True))
        single = [axis for axis, (n, _) in enumerate(axes) if n == 1]
        return [*single, *(axes.index(each) for each in left)]


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Rewrites ``main``, binding by binding."""

    def __init__(self, mod: IRModule, unit: VectorUnit, *, computes_softmax: bool) -> None:
        super().__init__(mod)
        self._unit, self._computes_softmax = unit, computes_softmax
        self._uses = uses_of(mod)
        # Of the binding that is visited, one of each at most.
        self._visited: list[_Moved] = []
        self._multiplied: list[tuple[_Operand, _Operand]] = []
        # Products that have one use, and what was made of their places, by the handles of their
        # new variables.
        self._products: dict[int, _Moved] = {}
        # Operands of products, by the handles of their new variables, and the new variables that
        # have one use.
        self._operands: dict[int, tuple[_Operand, _Operand]] = {}
        self._used_once: set[int] = set()
        # Sources in shapes that they are read in, which operands share.
        self._reshaped: dict[tuple[int, tuple[int, ...]], Any] = {}
        # Sums of masks in the axes of a product, by these and the masks, which layers share.
        self._biases: dict[tuple[int, ...], StridedReading] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        """Visit a binding, and note the product that its new variable is."""
        self._visited, self._multiplied = [], []
        super().visit_var_binding_(binding)
        if self._uses[handle(binding.var)] != 1:
            return
        variable = handle(self.visit_expr(binding.var))
        self._used_once.add(variable)
        for product in self._visited:
            self._products[variable] = product
        for operands in self._multiplied:
            self._operands[variable] = operands

    def visit_call_(self, call: Any) -> Any:
        """Rewrite a batched product, or the transpose of one."""
        call = super().visit_call_(call)
        name = operator_of(call)
        if name == _PRODUCT:
            return self._product(call)
        is_move = name in RESHAPES or name == TRANSPOSE
        found = self._products.get(handle(call.args[0])) if is_move else None
        if found is None:
            return call
        view = moved(call, found.view)
        if view is None:
            return call
        result = dataclasses.replace(found, view=view)
        order = result.order if name == TRANSPOSE else None
        if order is None:
            self._visited = [result]
            return call
        in_order = self.builder_.emit(found.product.call(self.builder_, order))
        extents = known_extents(call)
        is_same = known_extents(in_order) == extents
        return in_order if is_same else relax.op.reshape(in_order, tuple(extents))

    def _product(self, call: Any) -> Any:
        """Return a product that reads in place what it can."""
        a, b = call.args
        extents, of_a, of_b = (known_extents(each) for each in (call, a, b))
        is_batched = len(of_a) > 2 and of_a[:-2] == of_b[:-2] and bool(extents)
        is_batched &= max(of_a, default=1) > 1 and max(of_b, default=1) > 1  # no single numbers
        if not is_batched or isinstance(b, Constant) or not are_float32(a, b, call):
            return call
        left, right = self._operand(a), self._operand(b)
        attention = self._attention(a, right, extents)
        if attention is not None:
            self._visited = [_Moved(attention, StridedView.of(extents))]
            return attention.call(self.builder_, range(len(extents)))
        self._multiplied = [(left, right)]
        tiles = product_tiles(self._unit, *extents[-2:])
        if left.has_rows:
            reading, factor = self._in_place(left), left.factor
        else:
            reading, factor = StridedReading.of(a, of_a), 1.0
        if right.source is b:
            other = StridedReading.of(b, of_b)
        else:
            # More columns are a copy anyway, of the right tensor alone.
            is_kept = tiles[1] == extents[-1] and right.has_rows and _keeps_rows(right.view)
            other = (
                self._in_place(right) if is_kept else StridedReading.of(self._copied(right), of_b)
            )
            factor *= right.factor
        product = _Product(reading, other, extents, of_a[-1], tiles)
        if factor == 1.0:
            self._visited = [_Moved(product, StridedView.of(extents))]
        if reading.source is a and other.source is b:
            return call
        result = product.call(self.builder_, range(len(extents)))
        if factor == 1.0:
            return result
        number = relax.const(np.full([1] * len(extents), factor, "float32"))
        return relax.op.multiply(self.builder_.emit(result), number)

    def _attention(self, a: Any, values: _Operand, extents: Sequence[int]) -> Attention | None:
        """Return attention whose weights are the first operand; None if they are none."""
        softmax = self._single_use(self._unshaped(a))
        if not self._computes_softmax or operator_of(softmax) != _SOFTMAX:
            return None
        (x,) = softmax.args
        scores = self._scores(x)
        if scores is None or int(softmax.attrs.axis) not in {-1, len(known_extents(x)) - 1}:
            return None
        keys = scores.keys
        *batch, n_numbers, n_keys = keys.view.extents
        if batch != [*extents[:-2]] or values.factor != 1.0:
            return None
        by_key = keys.view.transposed(_with_last_swapped(len(extents)))
        rows = dataclasses.replace(keys, view=by_key)
        operands = scores.queries, rows, values
        tiles = AttentionTiles.of(self._unit, extents[-2], n_keys, extents[-1])
        if tiles is None or not all(each.has_rows for each in operands):
            return None
        q, k, v = (self._in_place(each) for each in operands)
        bias = self._bias(scores.added, batch, tiles) if scores.added else None
        return Attention(
            queries=q,
            keys=k,
            values=v,
            bias=bias,
            extents=extents,
            n_keys=n_keys,
            n_numbers=n_numbers,
            scale=scores.scale,
            tiles=tiles,
        )

    def _scores(self, value: Any) -> _Scores | None:
        """Return scaled products with one use as what they follow from; None of anything else."""
        value = self._unshaped(value)
        if handle(value) in self._operands:
            left, right = self._operands[handle(value)]
            return _Scores(left, right, left.factor * right.factor)
        found = self._single_use(value)
        number = _factor_of(found)
        if number is not None:
            below = self._scores(found.args[0])
            if below is None or below.added:
                return None
            return dataclasses.replace(below, scale=below.scale * number)
        if operator_of(found) != "relax.add":
            return None
        extents = known_extents(found)
        for x, mask in (found.args, reversed([*found.args])):
            if known_extents(x) == extents and known_extents(mask) and are_float32(mask):
                below = self._scores(x)
                if below is not None:
                    added = (*below.added, (mask, tuple(extents[:-2])))
                    return dataclasses.replace(below, added=added)
        return None

    def _bias(
        self, added: Sequence[_Added], batch: Sequence[int], tiles: AttentionTiles
    ) -> StridedReading:
        """Return what is added to scores, in columns of as many queries as are computed."""
        key = (*batch, *(handle(each) for each, _ in added))
        if key in self._biases:
            return self._biases[key]
        emit = self.builder_.emit
        rows = [self._rows_of(*each, batch) for each in added]
        mask = functools.reduce(lambda x, y: emit(relax.op.add(x, y)), rows)
        *outer, n_queries, n_keys = known_extents(mask)
        if n_queries == 1:
            columns = self._seen_as(mask, [*outer, n_keys, 1])
        else:
            columns = emit(relax.op.permute_dims(mask, _with_last_swapped(len(outer) + 2)))
            n_more = -n_queries % tiles.block
            pad = [0] * (2 * len(outer) + 3) + [n_more]
            columns = emit(relax.op.nn.pad(columns, pad)) if n_more else columns
        runs = enumerate(known_extents(columns))
        self._biases[key] = StridedReading(
            columns, [StridedAxis(n, 0, i if n > 1 else None) for i, n in runs]
        )
        return self._biases[key]

    def _rows_of(self, mask: Any, of_scores: Sequence[int], batch: Sequence[int]) -> Any:
        """Return a mask of scores with other axes of the batch, with those of a product."""
        extents = known_extents(mask)
        *outer, n_queries, n_keys = [1] * (len(of_scores) + 2 - len(extents)) + extents
        if outer == [1] * len(outer):
            return self._seen_as(mask, [*[1] * len(batch), n_queries, n_keys])
        if outer != [*of_scores]:
            whole = relax.op.broadcast_to(mask, [*of_scores, n_queries, n_keys])
            mask = self.builder_.emit(whole)
        return self._seen_as(mask, [*batch, n_queries, n_keys])

    def _unshaped(self, value: Any) -> Any:
        """Return a value with one use before its other axes than the last two were reshaped."""
        while True:
            found = self._single_use(value)
            if operator_of(found) not in RESHAPES:
                return value
            source = found.args[0]
            if known_extents(source)[-2:] != known_extents(found)[-2:]:
                return value
            value = source

    def _single_use(self, value: Any) -> Any:
        """Return what a variable with one use is bound to; None of anything else."""
        is_single = isinstance(value, relax.Var) and handle(value) in self._used_once
        return self.lookup_binding(value) if is_single else None

    def _operand(self, value: Any) -> _Operand:
        """Return a value as numbers of the tensor that they were computed in."""
        found = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        source, move = None, None
        if isinstance(found, relax.TupleGetItem):
            parts = self.lookup_binding(found.tuple_value)
            if operator_of(parts) == "relax.split":  # functions have several results, too
                source, move = parts.args[0], functools.partial(part_of, parts, int(found.index))
        elif isinstance(found, relax.Call) and found.args and known_extents(found):
            number = _factor_of(found)
            if number is not None:
                before = self._operand(found.args[0])
                return dataclasses.replace(before, factor=before.factor * number)
            if operator_of(found) in MOVES:
                source, move = found.args[0], functools.partial(moved, found)
        if move is None or not known_extents(source):
            return _Operand.of(value)
        before = self._operand(source)
        # What moves cannot be seen through is read from a copy.
        for start in (before, _Operand.of(source)):
            view = move(start.view)
            if view is not None and view.axes() is not None:
                return dataclasses.replace(start, view=view)
        return _Operand.of(value)

    def _in_place(self, operand: _Operand) -> StridedReading:
        """Return how an operand with rows is read."""
        axes = operand.view.axes()
        assert axes is not None
        return StridedReading(self._seen_as(operand.source, [each.extent for each in axes]), axes)

    def _seen_as(self, source: Any, extents: Sequence[int]) -> Any:
        """Return a tensor in another shape."""
        if known_extents(source) == list(extents):
            return source
        key = handle(source), tuple(extents)
        if key not in self._reshaped:
            self._reshaped[key] = self.builder_.emit(relax.op.reshape(source, key[1]))
        return self._reshaped[key]

    def _copied(self, operand: _Operand) -> Any:
        """Return an operand as a tensor of its own."""
        emit, extents = self.builder_.emit, operand.view.extents
        axes = operand.view.axes()
        assert axes is not None  # as of all operands
        x = emit(relax.op.reshape(operand.source, tuple(each.extent for each in axes)))
        taken = [1 if each.of_view is None else extents[each.of_view] for each in axes]
        for place, (each, n) in enumerate(zip(axes, taken, strict=True)):
            if n < each.extent:
                x = emit(relax.op.strided_slice(x, [place], [each.begin], [each.begin + n]))
        of_view = [len(extents) if each.of_view is None else each.of_view for each in axes]
        order = sorted(range(len(axes)), key=of_view.__getitem__)
        x = emit(relax.op.permute_dims(x, order))
        return emit(relax.op.reshape(x, extents))


def _with_last_swapped(rank: int) -> list[int]:
    """Return the order of axes that transposes matrices."""
    return [*range(rank - 2), rank - 1, rank - 2]


def _keeps_rows(view: StridedView) -> bool:
    """Say whether the first cache can keep the rows of a matrix that are read again and again."""
    n_rows, n_columns = view.extents[-2:]
    step = math.gcd(_WAY_BYTES, _ITEM_BYTES * view.strides[-2])
    return n_rows <= _N_WAYS * (_WAY_BYTES // step) or step <= _ITEM_BYTES * n_columns


def _factor_of(call: Any) -> float | None:
    """Return the number that a tensor is multiplied by; None if it is not."""
    name = operator_of(call)
    if name not in {"relax.multiply", "relax.divide"} or not isinstance(call.args[1], Constant):
        return None
    values = _tvm.data_of_constant(call.args[1]).numpy()
    if values.size != 1 or known_extents(call) != known_extents(call.args[0]):
        return None
    number = float(values.item())
    if name == "relax.divide":
        number = 1.0 / number if number else math.inf
    return number if math.isfinite(number) else None
