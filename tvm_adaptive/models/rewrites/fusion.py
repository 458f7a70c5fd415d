"""Fusion of a network's functions, but for what would be computed many times over.

TVM fuses elementwise operations into what reads their results, and schedules compute an operand
anew wherever it is read. A polynomial for the exponential reads its operand 18 times, so that the
last step of an LSTM, fused into the concatenation of all steps, became an expression of 28,600
operations: 26 s until its sketches were drawn, and 204 s for its first batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, relax, relax_transform
from tvm_adaptive._tvm.inlining import InlinedSize, inlined_sizes
from tvm_adaptive.models.network import with_rewritten_main, without_dead_bindings

# Operations of an expression with everything inlined, more where they depend on conditions. An
# activation behind a convolution has up to 304, a step of an LSTM 670, Mish 3,767; traces of these
# are applied in some 10 ms. That of eight SiLUs within a concatenation takes 0.1 s, that of two
# steps of an LSTM within two concatenations a second.
_MOST_OPERATIONS = 4000
# A cut can make room for other operations in a function, which may be too many again.
_MOST_ROUNDS = 3

_Sizes = tuple[list[InlinedSize], list[InlinedSize]]


def fused(mod: IRModule) -> IRModule:
    """Return a module whose annotated functions are fused, in pieces where they are too large."""
    t, ends = relax_transform, set[str]()
    found = t.FuseOps()(mod)
    for _ in range(_MOST_ROUNDS):
        new = set(_ends_of(found)) - ends
        if not new:
            break
        ends |= new
        found = t.FuseOps()(with_rewritten_main(mod, _Ending(mod, ends)))
    found = t.FuseTIR()(found)
    return without_dead_bindings(found) if ends else found


def _ends_of(mod: IRModule) -> Iterator[str]:
    """Yield the names of values within fused functions that are better computed before."""
    known: dict[str, _Sizes] = {}
    for function in mod.functions.values():
        if isinstance(function, relax.Function) and function.attrs.get("Primitive"):
            yield from _ends_within(mod, function, known)


def _ends_within(mod: IRModule, function: Any, known: dict[str, _Sizes]) -> Iterator[str]:
    sizes: dict[int, int] = {}  # of the values that the function computes, by their handles
    for binding in _tvm.bindings_of(function):
        call = _tvm.tensor_call_of(binding)
        if call is None:  # an item of a tuple
            source = getattr(binding.value, "tuple_value", binding.var)
            sizes[_tvm.handle(binding.var)] = sizes.get(_tvm.handle(source), 0)
            continue
        name = str(call.args[0].name_hint)
        if name not in known:
            known[name] = inlined_sizes(mod[name])
        blocks, results = known[name]
        operands = list(call.args[1].fields)
        given = [sizes.get(_tvm.handle(each), 0) for each in operands]
        given += [0] * (len(results) - len(given))  # the results are parameters, too
        kept = _kept(blocks, given)
        for operand, before, after in zip(operands, given, kept, strict=False):
            if after < before:
                yield str(operand.name)
        sizes[_tvm.handle(binding.var)] = max((each.total(kept) for each in results), default=0)


def _kept(blocks: Sequence[InlinedSize], given: Sequence[int]) -> Sequence[int]:
    """Return the sizes of a function's operands, 0 for those that are better computed before.

    These are the largest, which leaves the most fused, and all that are as large, so that one
    function computes them.
    """
    while any(given) and max(each.total(given) for each in blocks) > _MOST_OPERATIONS:
        most = max(given)
        given = [0 if each == most else each for each in given]
    return given


@_tvm.mutator
class _Ending(_tvm.PyExprMutator):  # type: ignore[misc]
    """Makes values of ``main`` results of their block, behind which nothing is fused."""

    def __init__(self, mod: IRModule, names: Collection[str]) -> None:
        super().__init__(mod)
        self._names = names

    def visit_var_binding_(self, binding: Any) -> None:
        """Emit a value once more, as a result if it is one of the names."""
        name = str(binding.var.name)
        if name not in self._names:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.emit_output(self.visit_expr(binding.value), name)
        self.set_var_remap(binding.var, value)
