"""Programs of ``torch.export`` whose extents are open get those that the user gave.

The program is exported once more with them, so that PyTorch computes what depends on shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_adaptive.errors import InvalidOptionError, as_invalid_option
from tvm_adaptive.models.frontend.open_extents import InputShape, open_message
from tvm_adaptive.models.frontend.shapes import Shapes, matched
from tvm_adaptive.models.frontend.torch_flat import leaves_of, quiet
from tvm_adaptive.models.network import shape_text

_Extents = tuple[Any, ...]  # numbers, and PyTorch's expressions
_OPEN = -1


def with_fixed_shapes(program: Any, shapes: Shapes, source: str) -> Any:
    """Return a program with fixed shapes; raise InvalidOptionError if one stays open."""
    import torch

    leaves = leaves_of(program)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    numbers = [name for name, leaf in leaves.items() if isinstance(leaf, torch.SymInt)]
    if numbers:
        raise InvalidOptionError(
            f"{source} leaves numbers open: {', '.join(numbers)}. Export it with numbers fixed."
        )
    declared = {name: tuple(map(_expression, each.shape)) for name, each in tensors.items()}
    known = {name: _shape(name, extents) for name, extents in declared.items()}
    given, values = matched(known, shapes, source, expressions=True)
    symbols = {symbol: value for (symbol, _), value in values.items()}
    for name, shape in given.items():
        for extent, value in zip(declared[name], shape, strict=True):
            if not _solve(extent, value, symbols):
                raise InvalidOptionError(
                    f"Input {name} has the shape {known[name].text}, where no whole number makes "
                    f"({extent}) {value}."
                )
    closed = {name: _closed(extents, symbols) for name, extents in declared.items()}
    for name, shape in given.items():
        if _OPEN not in closed[name] and closed[name] != shape:
            raise InvalidOptionError(
                f"Input {name} has the shape {known[name].text}, which is "
                f"{shape_text(closed[name])} with the other shapes given, not {shape_text(shape)}."
            )
    still_open = [known[name] for name, each in closed.items() if _OPEN in each]
    if still_open:
        proposal = _proposal(program, declared, symbols)
        named = {each.name: proposal[each.name] for each in still_open}
        raise InvalidOptionError(open_message(source, still_open, {**given, **named}))
    if not any(each.is_open for each in known.values()):
        return program
    examples = [
        torch.zeros(closed[name], dtype=leaf.dtype, device=leaf.device) if name in tensors else leaf
        for name, leaf in leaves.items()
    ]
    args, kwargs = torch.utils._pytree.tree_unflatten(examples, program.call_spec.in_spec)
    fixed = ", ".join(f"{name} {shape_text(each)}" for name, each in closed.items())
    with as_invalid_option(f"{source} does not take the shapes {fixed}"), quiet():
        return torch.export.export(program.module(), args, kwargs)


def _expression(extent: Any) -> Any:
    return extent if isinstance(extent, int) else extent.node.expr


def _is_number(extent: Any) -> bool:
    return isinstance(extent, int) or bool(extent.is_number)


def _shape(name: str, extents: _Extents) -> InputShape:
    """Return a declared shape; expressions of symbols stand in brackets."""

    def text(extent: Any) -> int | str:
        if _is_number(extent):
            return int(extent)
        return str(extent) if extent.is_symbol else f"({extent})"

    return InputShape(name, tuple(map(text, extents)))


def _closed(extents: _Extents, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with the symbols' values."""

    def value_of(extent: Any) -> int:
        if isinstance(extent, int):
            return extent
        value = extent.subs({each: symbols.get(str(each), each) for each in extent.free_symbols})
        return int(value) if value.is_number else _OPEN

    return tuple(map(value_of, extents))


def _solve(extent: Any, value: int, symbols: dict[str, int]) -> bool:
    """Add the value of an expression's only open symbol; return False if no whole one fits.

    Such expressions are linear: PyTorch derives extents by sums and products with integers.
    """
    if _is_number(extent):
        return True
    closed = {each: symbols[str(each)] for each in extent.free_symbols if str(each) in symbols}
    extent = extent.subs(closed)
    if len(extent.free_symbols) != 1:  # several stay open; a known value is compared elsewhere
        return True
    (symbol,) = extent.free_symbols
    start, following = (int(extent.subs({symbol: number})) for number in (0, 1))
    found, rest = divmod(value - start, following - start or 1)
    if rest or int(extent.subs({symbol: found})) != value:
        return False
    symbols[str(symbol)] = found
    return True


def _proposal(
    program: Any, declared: Mapping[str, _Extents], symbols: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a program was exported with, with one for a batch."""
    values = dict(symbols)
    for name, leaf in leaves_of(program).items():
        for place, extent in enumerate(declared.get(name, ())):
            if _is_number(extent) or str(extent) in symbols:
                continue
            hint = int(leaf.shape[place].node.hint or 1)
            if not extent.is_symbol:
                _solve(extent, hint, values)
                continue
            is_batch = place == 0 and len(declared[name]) > 1
            least = program.range_constraints[extent].lower
            values[str(extent)] = 1 if is_batch and least <= 1 else values.get(str(extent), hint)
    return {name: _closed(extents, values) for name, extents in declared.items()}
