"""Fix the inputs of an imported module to the shapes that the user gave."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tvm_adaptive._tvm import IRModule, relax_transform
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import network
from tvm_adaptive.models.frontend import open_extents
from tvm_adaptive.models.frontend.open_extents import InputShape
from tvm_adaptive.models.network import Network, Original, shape_text

Shapes: TypeAlias = Mapping[str, Sequence[int]]


def check_shapes(shapes: Any) -> None:
    """Raise InvalidOptionError unless shapes are whole numbers by the names of inputs."""
    form = "input_shapes must map names of inputs to whole numbers, as in {'x': (1, 3, 224, 224)}"
    if not isinstance(shapes, Mapping):
        raise InvalidOptionError(f"{form}, but is {shapes!r}.")
    for name, extents in shapes.items():
        if not (isinstance(name, str) and _is_shape(extents)):
            raise InvalidOptionError(f"{form}, but has {name!r}: {extents!r}.")


def _is_shape(extents: Any) -> bool:
    try:
        return not isinstance(extents, str) and all(operator.index(n) == n for n in extents)
    except TypeError:  # no sequence, or no whole numbers
        return False


def by_name(shapes: Shapes, names: Sequence[str], source: str) -> dict[str, tuple[int, ...]]:
    """Check that shapes belong to inputs; the name ``""`` means the only input."""
    check_shapes(shapes)
    found: dict[str, tuple[int, ...]] = {}
    for given, extents in shapes.items():
        name = names[0] if not given and len(names) == 1 else given
        if name not in names:
            wrong = f"There is no input {name}" if name else "A shape needs the name of its input"
            raise InvalidOptionError(
                f"{wrong}: the inputs of {source} are {', '.join(names) or 'fixed'}."
            )
        if any(extent < 1 for extent in extents):
            raise InvalidOptionError(
                f"The shape of {name} must be positive, not {shape_text(extents)}."
            )
        found[name] = tuple(int(extent) for extent in extents)
    return found


def network_of_imported(
    name: str,
    mod: IRModule,
    shapes: Shapes,
    *,
    params: dict[str, Any] | None = None,
    original: Original | None = None,
    source: str | None = None,
) -> Network:
    """Return a module, which the command line calls ``source``, with inputs fixed to shapes."""
    weights = params or {}
    given, values = matched(_declared(mod, weights), shapes, name)
    symbols = {symbol: value for (symbol, _), value in values.items()}
    fixed = relax_transform.BindSymbolicVars(symbols, "main")(mod) if symbols else mod
    still_open = [each for each in _declared(fixed, weights).values() if each.is_open]
    # An expression of other extents has a value once those have; it is no choice of its own.
    chosen = [each for each in still_open if "(" not in each.text and each.extents is not None]
    if chosen:
        # What is given already belongs to the command, too.
        proposal = {**given, **next(open_extents.proposals(chosen))}
        raise InvalidOptionError(open_extents.open_message(source or name, chosen, proposal))
    return network.network_of_relax(name, fixed, weights, original)


def _declared(mod: IRModule, weights: Mapping[str, Any]) -> dict[str, InputShape]:
    """Return the shapes of the inputs of ``main``."""
    found = {}
    for variable in network.main_of(mod).params:
        key = str(variable.name)
        if key not in weights:
            shape = getattr(variable.ty, "shape", None)
            found[key] = InputShape(
                key, None if shape is None else tuple(network.extents_of(shape))
            )
    return found


def matched(
    declared: Mapping[str, InputShape], shapes: Shapes, source: str, *, expressions: bool = False
) -> tuple[dict[str, tuple[int, ...]], dict[open_extents.Key, int]]:
    """Check given shapes against declared ones; return them by input, and open extents' values.

    Extents that are ``expressions`` of others are refused, or left to the caller.
    """
    values: dict[open_extents.Key, int] = {}
    given = by_name(shapes, list(declared), source)
    for key, shape in given.items():
        _match(declared[key], shape, values, expressions=expressions)
    return given, values


def _match(
    shape: InputShape,
    given: Sequence[int],
    values: dict[open_extents.Key, int],
    *,
    expressions: bool,
) -> None:
    """Check a given shape against a declared one; add the values of open extents."""
    key, extents = shape.name, shape.extents
    if extents is None:
        return
    if len(extents) != len(given):
        raise InvalidOptionError(
            f"Input {key} has {len(extents)} extents, {shape.text}, but the shape given has "
            f"{len(given)}."
        )
    for place, (extent, value) in enumerate(zip(extents, given, strict=True)):
        if isinstance(extent, str) and extent.startswith("("):
            if expressions:
                continue
            raise InvalidOptionError(
                f"The extent {extent} of input {key} depends on others; give a shape for those."
            )
        known = extent
        if isinstance(extent, str):
            known = values.setdefault(open_extents.key_of(key, place, extent), value)
        if known != value:
            raise InvalidOptionError(
                f"Input {key} has the shape {shape.text}, where {known} is not {value}."
            )
