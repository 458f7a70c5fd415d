"""What becomes of the blocks of a tensor function where they are inlined into their readers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm_adaptive._tvm import For, PrimFunc, buffer_of, handle
from tvm_adaptive._tvm.expressions import is_load, parts_of
from tvm_adaptive._tvm.tensor_functions import realizes

try:
    from tvm.sym import Analyzer
except ImportError:  # TVM 0.26
    from tvm.arith import Analyzer

_CHOICE = "if_then_else"  # of a namespace that versions of TVM name otherwise


@dataclasses.dataclass(frozen=True)
class InlinedSize:
    """Operations of an expression: its own, and how often it reads each parameter.

    What is read under conditions counts twice more for each: TVM simplifies it under all of them.
    """

    own: int
    n_reads: Mapping[int, int]  # by the parameter's number

    def total(self, sizes: Sequence[int]) -> int:
        """Return the operations if the parameters are expressions of these sizes."""
        return self.own + sum(n * sizes[each] for each, n in self.n_reads.items())


# Sums are kept: what reads their results reads memory.
_KEPT = InlinedSize(0, {})


def partly_read(function: PrimFunc) -> frozenset[int]:
    """Return the parameters of which some block reads a part only.

    What is computed from a parameter element by element counts as the parameter: schedules compute
    it where it is read.
    """
    origins = {handle(each): frozenset({n}) for n, each in enumerate(function.params)}
    found: frozenset[int] = frozenset()
    for block, store in _stores(function):
        analyzer = Analyzer()
        for each in block.iter_vars:
            analyzer.bind(each.var, each.dom)
        read: frozenset[int] = frozenset()
        for load, _ in _expressions(store.value):
            if is_load(load):
                buffer = buffer_of(load)
                origin = origins.get(handle(buffer), frozenset())
                read |= origin
                if origin and not _covers(analyzer, load.indices, buffer.shape):
                    found |= origin
        origins[handle(buffer_of(store))] = frozenset() if block.init is not None else read
    return found


def _covers(analyzer: Any, indices: Sequence[Any], shape: Sequence[Any]) -> bool:
    bounds = [analyzer.const_int_bound(each) for each in indices]
    return all(
        bound.max_value - bound.min_value + 1 >= int(getattr(extent, "value", 0))
        for bound, extent in zip(bounds, shape, strict=True)
    )


def inlined_sizes(function: PrimFunc) -> tuple[list[InlinedSize], list[InlinedSize]]:
    """Return the sizes of all blocks of a function, and of what its results are for readers."""
    known = {handle(each): InlinedSize(0, {n: 1}) for n, each in enumerate(function.params)}
    found = []
    for block, store in _stores(function):
        own, reads = 0, Counter[int]()
        for each, n_conditions in _expressions(store.value):
            own += 1
            if is_load(each):
                size, weight = known.get(handle(buffer_of(each)), _KEPT), 1 + 2 * n_conditions
                own += weight * size.own
                reads.update({place: weight * n for place, n in size.n_reads.items()})
        size = InlinedSize(own, dict(reads))
        found.append(size)
        known[handle(buffer_of(store))] = _KEPT if block.init is not None else size
    return found, [known[handle(each)] for each in function.params]


def _stores(function: PrimFunc) -> Iterator[tuple[Any, Any]]:
    """Yield the blocks of a function that compute one element each, and what they store."""
    root = getattr(function.body, "block", None)
    for realize in realizes(function.body if root is None or root.iter_vars else root.body):
        store = realize.block.body
        while isinstance(store, For):
            store = store.body
        if hasattr(store, "value") and hasattr(store, "indices"):
            yield realize.block, store


def _expressions(value: Any, n_conditions: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield an expression and what it is made of, each with the conditions that it is under.

    The places that are read are left out.
    """
    yield value, n_conditions
    if is_load(value):
        return
    n_conditions += str(getattr(getattr(value, "op", None), "name", "")).endswith(_CHOICE)
    for part in parts_of(value):
        yield from _expressions(part, n_conditions)
