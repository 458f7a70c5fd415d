"""Pointwise convolutions of concatenated channels, computed part by part.

A concatenation copies all that was computed for it. A convolution of single places is the sum of
those of the parts, each with its share of the weights: only sums are written and read once more,
which are few where a convolution has few filters, as behind the modules of SqueezeNet. Pooling
between the two takes place in each part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, bindings_of, handle, relax
from tvm_adaptive.models.network import (
    are_float32,
    known_extents,
    layouts_of,
    operator_of,
    uses_of,
    with_rewritten_main,
    without_dead_bindings,
)
from tvm_adaptive.models.rewrites.moves import CONCATENATION, axis_of_concatenation

_CONVOLUTION = "relax.nn.conv2d"
_POOLS = frozenset({"relax.nn.max_pool2d", "relax.nn.avg_pool2d"})
# Sums that are written and read once more, as a share of what the copy writes and reads.
_MOST_MOVED = 0.5
# Sums of fewer terms cost more to load and store than to compute.
_LEAST_CHANNELS = 16


def with_parts_of_concatenations(mod: IRModule) -> IRModule:
    """Return a network, with channels last, without concatenations that only convolutions read."""
    rewriter = _Rewriter(mod, dict(_readings(mod)))
    return without_dead_bindings(with_rewritten_main(mod, rewriter))


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How a convolution reads a concatenation."""

    parts: Sequence[Any]
    pool: Any | None  # the binding of the pooling between the two


def _readings(mod: IRModule) -> Iterator[tuple[int, _Reading]]:
    """Yield the convolutions that are computed in parts, by the handles of their variables."""
    uses, readers = uses_of(mod), _readers(mod)

    def convolutions(of: Any, pool: Any | None = None) -> list[tuple[Any, Any | None]] | None:
        """Return what reads a value, directly or pooled; None if it is not convolutions alone."""
        found: list[tuple[Any, Any | None]] = []
        for each in readers[handle(of.var)]:
            if _is_pool(each.value) and pool is None:
                behind = convolutions(each, each)
                if behind is None:
                    return None
                found += behind
            elif _is_pointwise(each.value):
                found.append((each, pool))
            else:
                return None
        return found if uses[handle(of.var)] == len(readers[handle(of.var)]) else None

    for binding in bindings_of(mod["main"]):
        parts = _parts_of(binding.value)
        those = convolutions(binding) if parts else None
        if those and _is_worth_it(binding, parts, [each for each, _ in those]):
            for each, pool in those:
                yield handle(each.var), _Reading(parts, pool)


def _readers(mod: IRModule) -> Mapping[int, list[Any]]:
    """Return the bindings of calls that have a variable as their first argument, by its handle."""
    found: dict[int, list[Any]] = defaultdict(list)
    for binding in bindings_of(mod["main"]):
        arguments = getattr(binding.value, "args", ())
        if arguments and isinstance(arguments[0], relax.Var):
            found[handle(arguments[0])].append(binding)
    return found


def _parts_of(value: Any) -> Sequence[Any]:
    """Return the parts of a concatenation of images' channels; none of anything else."""
    is_it = operator_of(value) == CONCATENATION and len(known_extents(value)) == 4
    if not is_it or axis_of_concatenation(value) != 3:
        return ()
    parts = tuple(getattr(value.args[0], "fields", ()))
    extents = [known_extents(each) for each in parts]
    return parts if all(each and each[-1] >= _LEAST_CHANNELS for each in extents) else ()


def _is_pool(call: Any) -> bool:
    return operator_of(call) in _POOLS and str(call.attrs.layout) == "NHWC"


def _is_pointwise(call: Any) -> bool:
    if operator_of(call) != _CONVOLUTION or layouts_of(call) != ["NHWC", "HWIO", "NHWC"]:
        return False
    data, kernel = call.args
    is_constant = isinstance(kernel, Constant) and are_float32(data, kernel)
    is_single = known_extents(kernel)[:2] == [1, 1] and int(call.attrs.groups) == 1
    return is_constant and is_single and bool(known_extents(call))


def _is_worth_it(binding: Any, parts: Sequence[Any], convolutions: Sequence[Any]) -> bool:
    n_sums = sum(math.prod(known_extents(each.value)) for each in convolutions)
    n_copied = math.prod(known_extents(binding.value))
    return (len(parts) - 1) * n_sums <= _MOST_MOVED * n_copied


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Rewrites ``main``, binding by binding."""

    def __init__(self, mod: IRModule, readings: Mapping[int, _Reading]) -> None:
        super().__init__(mod)
        self._readings = readings
        self._reading: _Reading | None = None  # of the binding that is visited
        self._pooled: dict[int, Sequence[Any]] = {}  # by the handles of the poolings' variables

    def visit_var_binding_(self, binding: Any) -> None:
        """Visit a binding, and know how its convolution reads."""
        self._reading = self._readings.get(handle(binding.var))
        super().visit_var_binding_(binding)

    def visit_call_(self, call: Any) -> Any:
        """Rewrite a convolution."""
        reading, self._reading = self._reading, None
        if reading is None:
            return super().visit_call_(call)
        parts = self._parts(reading)
        ends = itertools.accumulate(known_extents(each)[-1] for each in parts)
        numbers = _tvm.data_of_constant(call.args[1]).numpy()
        result, begin = None, 0
        for part, end in zip(parts, ends, strict=True):
            weight = relax.const(_tvm.tensor(numbers[:, :, begin:end].copy()))
            own = relax.Call(call.op, [part, weight], call.attrs, call.ty_args)
            addend = self.builder_.emit(own)
            result = addend if result is None else self.builder_.emit(relax.op.add(result, addend))
            begin = end
        return result

    def _parts(self, reading: _Reading) -> Sequence[Any]:
        """Return the parts as a convolution reads them; several share those that are pooled."""
        parts, pool = [self.visit_expr(each) for each in reading.parts], reading.pool
        if pool is None:
            return parts
        key, call = handle(pool.var), pool.value
        if key not in self._pooled:
            self._pooled[key] = [
                self.builder_.emit(relax.Call(call.op, [each], call.attrs, call.ty_args))
                for each in parts
            ]
        return self._pooled[key]
