"""Options of every caller: their types, as annotations say, and how a command spells them."""

from __future__ import annotations

import dataclasses
import numbers
import operator
import types
import typing
from typing import Any

from tvm_adaptive.errors import InvalidOptionError


def convert_types(options: Any) -> None:
    """Give each attribute of a frozen dataclass the type of its annotation.

    A number of numpy would be written to a journal as something else than it is read as.

    Raises
    ------
    InvalidOptionError
        When a value is of another type; a whole number may stand for a float.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        name, value = field.name, getattr(options, field.name)
        converted = value_of(value, hints[name], name)
        if converted is not value:
            object.__setattr__(options, name, converted)


# What a command does not spell by its name; --input-shape is given once for each input.
_SPELLINGS = {"what": "WHAT", "input_shapes": "--input-shape"}


def spelled(name: str, value: object) -> str:
    """Return an option as it is given on the command line."""
    prefix = "--no-" if value is False else "--"
    return _SPELLINGS.get(name) or prefix + name.replace("_", "-")


def value_of(value: Any, hint: Any, option: str) -> Any:
    """Return an option's value in the type of its annotation, or of one in a union."""
    kinds = kinds_of(hint)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        # True is an integer in Python only.
        if isinstance(value, bool) == (kind is bool) and isinstance(value, kind):
            return value
    if not isinstance(value, bool):
        if int in kinds and isinstance(value, numbers.Integral):  # of numpy
            return operator.index(value)
        if float in kinds and isinstance(value, numbers.Real):
            return float(value)
    names = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
    raise InvalidOptionError(f"{option} must be {names} but got {value!r}.")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)
