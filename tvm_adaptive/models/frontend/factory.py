"""Models that the user's own code makes: ``package.module:factory``.

The factory takes no arguments and returns one of

- ``(module, inputs)``: a ``torch.nn.Module`` and example inputs, a tensor, a sequence of
  arguments or a mapping of keyword arguments; the module is imported in evaluation mode;
- ``(module, inputs, named)``: the same with a sequence of arguments and keyword arguments;
- ``(mod, params)``: a Relax module and its weights, as for
  :func:`~tvm_adaptive.tune_relax`;
- a :class:`~tvm_adaptive.models.Network`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import IRModule
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option
from tvm_adaptive.models.frontend.open_extents import InputShape
from tvm_adaptive.models.frontend.shapes import Shapes, matched, network_of_imported
from tvm_adaptive.models.frontend.torch_program import network_of_module
from tvm_adaptive.models.network import Network

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_RETURNS = "It must return (torch.nn.Module, example inputs), (Relax module, weights) or a Network"
# A module, its arguments, and perhaps its keyword arguments.
_PARTS = (2, 3)


def is_factory(what: str) -> bool:
    """Say whether a text names a factory; MetaSchedule's operators (``te:``) are none."""
    return _FACTORY.fullmatch(what) is not None and not what.startswith("te:")


def network_of_factory(what: str, name: str, shapes: Shapes) -> Network:
    """Call a factory and import what it returns."""
    made = _call(what)
    if isinstance(made, Network):
        fixed = {key: InputShape(key, shape) for key, shape in made.input_shapes.items()}
        matched(fixed, shapes, what)
        return dataclasses.replace(made, name=name)
    if not isinstance(made, tuple) or len(made) not in _PARTS:
        raise InvalidOptionError(f"{_RETURNS}, but {what} returned {type(made).__name__}.")
    model, rest, *more = made
    if isinstance(model, IRModule) and not more:
        if rest is not None and not isinstance(rest, Mapping):
            raise InvalidOptionError(
                f"{_RETURNS}, but {what} returned weights of the type {type(rest).__name__}; map "
                "the names of main's parameters to them."
            )
        return network_of_imported(name, model, shapes, params=dict(rest or {}), source=what)
    named = more[0] if more else {}
    if not _is_torch_module(model) or not isinstance(named, Mapping):
        raise InvalidOptionError(
            f"{_RETURNS}, but {what} returned a tuple with {type(model).__name__}."
        )
    arguments = tuple(rest) if isinstance(rest, (list, tuple)) else (rest,)
    if isinstance(rest, Mapping) and not more:
        arguments, named = (), rest
    return network_of_module(model, arguments, named, name=name, shapes=shapes, source=what)


def _call(what: str) -> Any:
    """Return what a factory returns."""
    module_name, _, function_name = what.partition(":")
    # Also while it runs, for what it imports and reads then.
    with _as_a_program(module_name):
        with as_invalid_option(f"{module_name} of {what} cannot be imported"):
            module = importlib.import_module(module_name)
        factory = getattr(module, function_name, None)
        if not callable(factory):
            raise InvalidOptionError(f"{module_name} has no function {function_name}.")
        with as_invalid_option(f"{what} failed"):
            return factory()


def _is_torch_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # a module's class has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


@contextlib.contextmanager
def _as_a_program(name: str) -> Iterator[None]:
    """Look for modules in the current directory first, and hide this program's own arguments."""
    here, arguments = str(Path.cwd()), sys.argv
    sys.path.insert(0, here)
    sys.argv = [name]  # else a script that parses them as it is imported takes them for its own
    try:
        yield
    finally:
        sys.argv = arguments
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(here)
