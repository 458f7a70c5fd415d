"""Fix the inputs of an imported module to the shapes that the user gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm_adaptive._tvm import IRModule, bind_symbols
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.network import (
    Network,
    Original,
    extents_of,
    main_of,
    network_of_relax,
    shape_text,
)


def by_name(
    shapes: Mapping[str, Sequence[int]], names: Sequence[str], source: str
) -> dict[str, tuple[int, ...]]:
    """Check that shapes belong to inputs; the name ``""`` means the only input."""
    found: dict[str, tuple[int, ...]] = {}
    for given, extents in shapes.items():
        name = names[0] if not given and len(names) == 1 else given
        if name not in names:
            raise InvalidOptionError(
                f"An input shape was given for {name or 'the only input'}, but the inputs of "
                f"{source} are {', '.join(names) or 'fixed'}."
            )
        if any(extent < 1 for extent in extents):
            raise InvalidOptionError(f"The shape of {name} must be positive, not {extents}.")
        found[name] = tuple(int(extent) for extent in extents)
    return found


def network_of_imported(
    name: str,
    mod: IRModule,
    shapes: Mapping[str, Sequence[int]],
    *,
    params: dict[str, Any] | None = None,
    original: Original | None = None,
) -> Network:
    """Return an imported module as a network, its inputs fixed to shapes."""
    weights = params or {}
    parameters = {str(variable.name): variable for variable in main_of(mod).params}
    given = by_name(shapes, [key for key in parameters if key not in weights], name)
    values: dict[str, int] = {}
    for key, variable in parameters.items():
        if key in given:
            shape = getattr(variable.ty, "shape", None)
            extents = extents_of(shape) if shape is not None else []
            match(key, extents, given[key], values)
    fixed = bind_symbols(mod, values) if values else mod
    return network_of_relax(name, fixed, weights, original)


def match(
    key: str, extents: Sequence[int | str], given: Sequence[int], values: dict[str, int]
) -> None:
    """Check a given shape against that of an input; add the values of symbols to ``values``."""
    if len(extents) != len(given):
        raise InvalidOptionError(
            f"Input {key} has {len(extents)} extents, {shape_text(extents) or 'none'}, but the "
            f"shape given has {len(given)}."
        )
    for extent, value in zip(extents, given, strict=True):
        if isinstance(extent, str) and extent.startswith("("):
            raise InvalidOptionError(
                f"The extent {extent} of input {key} depends on others; give a shape for those."
            )
        known = extent if isinstance(extent, int) else values.setdefault(extent, value)
        if known != value:
            raise InvalidOptionError(
                f"Input {key} has the shape {shape_text(extents)}, where {known} is not {value}."
            )
