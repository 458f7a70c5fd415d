"""Keep a module's large constants apart from it, in a file that is read without parsing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    IRModule,
    PyExprMutator,
    Tensor,
    data_of_constant,
    load_json,
    mutator,
    relax,
    relax_transform,
    save_json,
    tensor,
)

# Smaller ones stay in the module: as JSON they cost no time, and passes look into some.
_MIN_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a constant is in the file."""

    name: str  # of the parameter of ``main`` in its place
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


@dataclasses.dataclass(frozen=True)
class Detached:
    """A module without its large constants."""

    module: str  # as JSON
    weights: tuple[Weight, ...]  # where those are in a file of their own


def detach(mod: IRModule, path: Path) -> Detached:
    """Write the large constants of ``main`` to a file."""
    main = mod["main"]
    taken = {str(variable.name) for variable in main.params}
    prefix = "weight_"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    lifting = _Lifting(mod, prefix)
    body = lifting.visit_expr(main.body)
    weights = []
    with open(path, "wb") as file:
        for variable, value in lifting.lifted:
            array = np.ascontiguousarray(value.numpy())
            name = str(variable.name)
            weights.append(Weight(name, array.dtype.name, array.shape, file.tell()))
            file.write(array.view(np.uint8).data)  # bfloat16 has no buffer of its own
    # TVM 0.26 has the type under the other name.
    result = main.ret_ty if hasattr(main, "ret_ty") else main.ret_struct_info
    parameters = [*main.params, *(variable for variable, _ in lifting.lifted)]
    bare = relax.Function(parameters, body, result, main.is_pure, main.attrs)
    functions = {**dict(mod.functions.items()), mod.get_global_var("main"): bare}
    return Detached(str(save_json(IRModule(functions, attrs=mod.attrs))), tuple(weights))


def attach(detached: Detached, path: Path) -> IRModule:
    """Undo :func:`detach`."""
    mod = load_json(detached.module)
    values = {
        each.name: tensor(np.memmap(path, each.dtype, "r", each.offset_bytes, each.shape))
        for each in detached.weights
    }
    return relax_transform.BindParams("main", values)(mod) if values else mod


@mutator
class _Lifting(PyExprMutator):  # type: ignore[misc]
    """Put a variable in the place of each large constant."""

    def __init__(self, mod: IRModule, prefix: str) -> None:
        super().__init__(mod)
        self.prefix = prefix
        self.lifted: list[tuple[Any, Tensor]] = []

    def visit_generic_const_(self, op: Any) -> Any:
        """Visit a constant, as TVM 0.27 calls it."""
        value = data_of_constant(op)
        if not isinstance(value, Tensor) or _n_bytes(value) < _MIN_BYTES:
            return op
        variable = relax.Var(f"{self.prefix}{len(self.lifted)}", op.ty)
        self.lifted.append((variable, value))
        return variable

    visit_constant_ = visit_generic_const_  # as TVM 0.26 calls it


def _n_bytes(value: Tensor) -> int:
    """Return the size of a tensor; 0 where numpy has no such type."""
    try:
        dtype = np.dtype(str(value.dtype))
    except TypeError:
        return 0
    # Of the types that other packages register, TVM itself makes sure of this one.
    if dtype.isbuiltin != 1 and dtype.name != "bfloat16":
        return 0
    return dtype.itemsize * int(np.prod([int(extent) for extent in value.shape], dtype=object))
