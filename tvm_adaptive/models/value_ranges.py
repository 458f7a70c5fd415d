"""Ranges of values in a network: which integers its inputs can be, how large its outputs are.

Integers are followed as ranges from the inputs through the operators of ``main``: to the
tables that they index, to the numbers that they are compared with, to what they mask.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tvm_adaptive._tvm import Constant, bindings_of, data_of_constant, handle, relax
from tvm_adaptive.values import ranges as arithmetic
from tvm_adaptive.values.ranges import ANY, ONE, ZERO, ZERO_OR_ONE, Range

_Ranges: TypeAlias = Sequence[Range]  # of one tensor, or of the fields of a tuple
_Values: TypeAlias = dict[int, _Ranges]

# A score below it is masked; published models add -10,000 or less.
_MASKED = -1e3
# A last place is a length minus one; places may begin behind that of the padding.
_FIRST_VALUES = (0.0, 1.0, 2.0)
# More distinct numbers than a test for padding and one for an end: the steps of a loop.
_LEAST_STEPS = 3
# Indices up to it fit into what is no table; all numbers below are exact.
_MOST = 2.0**31
# Larger constants are weights, in which ranges say nothing.
_MOST_CONSTANTS = 1 << 22
_MASK_NAME = re.compile(r".*masks?_?\d*", re.IGNORECASE)
_LENGTH_NAME = re.compile(r".*(len|lens|lengths?)_?\d*", re.IGNORECASE)


def input_ranges(main: relax.Function, dtypes: Mapping[str, str]) -> dict[str, Range]:
    """Return what each input of integers or truth values may be.

    Indices stay within their tables, lengths within what they are compared with. Masks let
    everything pass. Without a hint, values are 0 or 1; of a byte (a pixel), all.
    """
    wanted = {name: np.dtype(kind) for name, kind in dtypes.items() if "float" not in kind}
    if not wanted:
        return {}
    flow = _Flow(main)
    keys = {str(each.name): handle(each) for each in main.params}
    found = dict.fromkeys(wanted, ZERO_OR_ONE)
    for name, kind in wanted.items():
        values = flow.values({keys[each]: [known] for each, known in found.items()})
        found[name] = _range_of_input(name, kind, _Use(flow, keys[name], values))
    return found


def masks_in(main: relax.Function, ranges: Mapping[str, Range]) -> frozenset[str]:
    """Return the inputs whose range lets everything pass, and that may be 0 or 1 anywhere."""
    flow = _Flow(main)
    keys = {str(each.name): handle(each) for each in main.params}
    values = flow.values({keys[name]: [known] for name, known in ranges.items()})
    return frozenset(
        name
        for name, known in ranges.items()
        if known in (ZERO, ONE)
        and not _LENGTH_NAME.fullmatch(name)
        # An index into a table of one row is none.
        and _Use(flow, keys[name], values).fits(ZERO_OR_ONE)
    )


def output_scales(main: relax.Function) -> list[float]:
    """Return the largest magnitude that each output can have; 0 where it is not known."""
    flow = _Flow(main)
    values = flow.values({})
    ranges = [each for key in flow.outputs for each in flow.ranges(key, values)]
    return [max(-each.low, each.high) if each.is_known else 0.0 for each in ranges]


def _range_of_input(name: str, kind: np.dtype[Any], use: _Use) -> Range:
    is_mask = _MASK_NAME.fullmatch(name) is not None
    is_number = kind != np.bool_
    if is_number and not is_mask and (limits := use.limits(min(_MOST, np.iinfo(kind).max))):
        return limits
    if mask := use.open_mask():
        return mask
    if is_mask or _LENGTH_NAME.fullmatch(name):
        return ONE
    if is_number and kind.itemsize == 1:
        whole = Range(float(np.iinfo(kind).min), float(np.iinfo(kind).max))
        positive = Range(0.0, whole.high)  # an index
        return positive if use.fits(positive) and not use.fits(whole) else whole
    return ZERO_OR_ONE


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation; its arguments and its result are known by the addresses of TVM's objects."""

    name: str  # of the operator; "same", "tuple" or "field" without one
    expr: Any
    arguments: tuple[int, ...]
    result: int


class _Flow:
    """The operations of a function, in their order."""

    def __init__(self, main: relax.Function) -> None:
        self.steps: list[_Step] = []
        self._leaves: dict[int, Any] = {}  # constants and numbers
        self._known: dict[int, _Ranges] = {}  # of those that were asked for
        for binding in bindings_of(main):
            source = self._key(binding.value)
            self.steps.append(_Step("same", binding, (source,), handle(binding.var)))
        result = main.body.body
        parts = result.fields if isinstance(result, relax.Tuple) else [result]
        self.outputs = [self._key(each) for each in parts]

    def values(self, given: _Values) -> _Values:
        """Return what is known of all results, for ranges of the inputs."""
        return self.changed({}, given, self.steps)

    def changed(self, values: _Values, given: _Values, steps: Sequence[_Step]) -> _Values:
        """Return what is known for other ranges of inputs that only some steps depend on."""
        changed = {**values, **given}
        for step in steps:
            found = _result(step, lambda key: self.ranges(key, changed))
            if any(each != ANY for each in found):
                changed[step.result] = found
            else:
                changed.pop(step.result, None)
        return changed

    def ranges(self, key: int, values: _Values) -> _Ranges:
        """Return what is known of an argument or a result."""
        if key in self._leaves and key not in self._known:
            self._known[key] = [_range_of_leaf(self._leaves[key])]
        return values.get(key) or self._known.get(key) or [ANY]

    def _key(self, expr: Any) -> int:
        """Return the address of an expression; adds the steps that compute it."""
        key = handle(expr)
        name = ""
        parts: Sequence[Any] = ()
        if isinstance(expr, relax.Call):
            name = str(getattr(expr.op, "name", "")).removeprefix("relax.")
            parts = expr.args
        elif isinstance(expr, relax.Tuple):
            name, parts = "tuple", expr.fields
        elif isinstance(expr, relax.TupleGetItem):
            name, parts = "field", (expr.tuple_value,)
        if parts:
            self.steps.append(_Step(name, expr, tuple(map(self._key, parts)), key))
        elif not isinstance(expr, relax.Var):
            self._leaves[key] = expr
        return key


class _Use:
    """What an input of integers is used for."""

    def __init__(self, flow: _Flow, key: int, values: _Values) -> None:
        self._flow, self._key, self._values = flow, key, values
        self._reached = {key}  # what depends on the input, as far as ranges tell
        self._steps = []
        for step in flow.steps:
            if not self._reached.isdisjoint(step.arguments):
                self._steps.append(step)
                if step.result in values:
                    self._reached.add(step.result)

    def limits(self, most: float) -> Range | None:
        """Return the values within tables and comparisons; None if those up to ``most`` are."""
        widest = None
        for low in _FIRST_VALUES:
            if not self.fits(Range(low, low)):
                continue
            if self.fits(Range(low, most)):
                return None
            high, beyond = low, most
            while beyond - high > 1:
                middle = (high + beyond) // 2
                if self.fits(Range(low, middle)):
                    high = middle
                else:
                    beyond = middle
            if widest is None or high - low > widest.high - widest.low:
                widest = Range(low, high)
        return widest

    def open_mask(self) -> Range | None:
        """Return zeros or ones if the opposite masks everything; None if none or both do."""
        closes = [self._closes(value) for value in (0.0, 1.0)]
        if closes[0] == closes[1]:
            return None
        return ONE if closes[0] else ZERO

    def _closes(self, value: float) -> bool:
        """Say whether data vanish or scores are very low if all elements have a value."""
        values = self._with(Range(value, value))
        for step in self._steps:
            (result, *_) = self._flow.ranges(step.result, values)
            if result.high <= _MASKED:
                return True
            if step.name in ("multiply", "where") and result == ZERO:
                arguments = [self._flow.ranges(key, values)[0] for key in step.arguments]
                if not all(each.is_known for each in arguments):
                    return True
        return False

    def _with(self, given: Range) -> _Values:
        return self._flow.changed(self._values, {self._key: [given]}, self._steps)

    def fits(self, given: Range) -> bool:
        """Say whether all tables and comparisons have room for the values."""
        values = self._with(given)
        compared: list[tuple[Range, Range]] = []
        for step in self._steps:
            for key, extent in _indices(step):
                index = self._flow.ranges(key, values)[0]
                is_ours = key in self._reached and index.is_known
                if is_ours and not (index.low >= 0 and index.high < extent):
                    return False
            if step.name in arithmetic.COMPARISONS:
                compared += self._compared(step, values)
        if len({room for _, room in compared if room.low == room.high}) < _LEAST_STEPS:
            compared = [each for each in compared if each[1].low < each[1].high]
        low = min((room.low for _, room in compared), default=0.0)
        high = max((room.high for _, room in compared), default=0.0)
        return all(low <= number.low and number.high <= high for number, _ in compared)

    def _compared(self, step: _Step, values: _Values) -> Iterator[tuple[Range, Range]]:
        """Yield what is compared with other numbers, and the places between those."""
        number, other = (self._flow.ranges(key, values)[0] for key in step.arguments)
        is_first, is_second = (key in self._reached for key in step.arguments)
        if is_second:
            number, other = other, number
        if is_first != is_second and number.is_known and other.is_known:
            # ``other < number`` lets nothing pass below the first, all above the last one.
            more = is_first == (step.name in ("greater", "less_equal"))
            yield number, Range(other.low + more, other.high + more)


def _indices(step: _Step) -> Iterator[tuple[int, int]]:
    """Yield the arguments of an operation that are indices, and the extents that they index."""
    name = step.name
    attributes: Any = getattr(step.expr, "attrs", None)
    if name == "one_hot":
        yield step.arguments[0], int(attributes.depth)
    elif name in _TABLES and (table := _shape_of(step.expr.args[0])):
        places = step.expr.args[1]
        if name in ("index_tensor", "index_put"):
            fields = places.fields if isinstance(places, relax.Tuple) else ()
            yield from zip(map(handle, fields), table, strict=False)
        elif name in ("gather_nd", "scatter_nd"):
            # Of several coordinates, each belongs to another extent.
            if (_shape_of(places) or [0])[-1] == 1:
                yield step.arguments[1], table[int(getattr(attributes, "batch_dims", 0))]
        else:
            axis = attributes.axis
            yield step.arguments[1], math.prod(table) if axis is None else table[int(axis)]


def _shape_of(expr: Any) -> list[int] | None:
    try:
        return [int(extent) for extent in expr.ty.shape]
    except (AttributeError, TypeError):  # of unknown rank, or with an open extent
        return None


def _range_of_leaf(expr: Any) -> Range:
    if isinstance(expr, Constant):
        value = data_of_constant(expr)
        if not 0 < math.prod(int(extent) for extent in value.shape) <= _MOST_CONSTANTS:
            return ANY
        array = value.numpy()
        return arithmetic.range_of(float(array.min()), float(array.max()))
    try:
        number = float(expr.value)
    except (AttributeError, TypeError):  # a shape, a text
        return ANY
    return arithmetic.range_of(number, number)


def _result(step: _Step, ranges: Callable[[int], _Ranges]) -> _Ranges:
    """Return what a step computes, from the ranges of its arguments."""
    arguments = [ranges(key) for key in step.arguments] if step.name in _FOLLOWED else []
    if step.name == "same":
        return arguments[0]
    if step.name == "field":
        place = int(step.expr.index)
        return arguments[0][place : place + 1] or [ANY]
    if step.name == "split":
        return [arguments[0][0]] * len(step.expr.ty.fields)
    firsts = [each[0] for each in arguments]
    return firsts if step.name == "tuple" else [_result_of_call(step, firsts, arguments)]


def _result_of_call(step: _Step, arguments: list[Range], tuples: list[_Ranges]) -> Range:
    is_truth = str(getattr(getattr(step.expr, "ty", None), "dtype", "")) == "bool"
    if not arguments or (step.name in arithmetic.OF_TRUTHS and not is_truth):
        return ANY
    if step.name in ("concat", "stack"):
        return arithmetic.hull(*tuples[0])
    if step.name in ("sum", "cumsum"):
        return arithmetic.multiply(arguments[0], Range(1.0, _n_added(step.expr)))
    if step.name == "astype":
        return arithmetic.not_equal(arguments[0], ZERO) if is_truth else arguments[0]
    return arithmetic.OPERATORS[step.name](*arguments)


_FOLLOWED = {
    *arithmetic.OPERATORS,
    *("same", "tuple", "field", "split", "concat", "stack", "sum", "cumsum", "astype"),
}


def _n_added(call: Any) -> float:
    """Return the most elements that an element of a sum is the sum of."""
    shape, axis = _shape_of(call.args[0]), call.attrs.axis
    if shape is None:
        return math.inf
    axes = range(len(shape)) if axis is None else axis if hasattr(axis, "__len__") else [axis]
    return float(math.prod(shape[int(each)] for each in axes))


_TABLES = (
    *("take", "gather_elements", "gather_nd", "index_tensor"),
    *("scatter_elements", "scatter_nd", "index_put"),
)
