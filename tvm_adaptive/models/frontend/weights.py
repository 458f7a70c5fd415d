"""Keep a module's large constants apart from it, in a file that is read without parsing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    IRModule,
    PyExprMutator,
    Tensor,
    mutator,
    relax,
    relax_transform,
    tensor,
)

# Smaller ones stay in the module: as JSON they cost no time, and passes look into some.
_MIN_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a constant is in a file of weights."""

    name: str  # of the parameter of ``main`` that stands for it
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


def detach(mod: IRModule, path: Path) -> tuple[IRModule, tuple[Weight, ...]]:
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
            file.write(array.data)
    lifted = [variable for variable, _ in lifting.lifted]
    # TVM 0.26 has the type under the other name.
    result = main.ret_ty if hasattr(main, "ret_ty") else main.ret_struct_info
    parameters = [*main.params, *lifted]
    whole = relax.Function(parameters, body, result, main.is_pure, main.attrs)
    functions = {**dict(mod.functions.items()), mod.get_global_var("main"): whole}
    return IRModule(functions, attrs=mod.attrs), tuple(weights)


def attach(mod: IRModule, weights: Sequence[Weight], path: Path) -> IRModule:
    """Undo :func:`detach`."""
    values = {
        each.name: tensor(np.memmap(path, each.dtype, "r", each.offset_bytes, each.shape))
        for each in weights
    }
    return relax_transform.BindParams("main", values)(mod) if values else mod


@mutator
class _Lifting(PyExprMutator):  # type: ignore[misc]
    """Put a variable in the place of each large constant."""

    def __init__(self, mod: IRModule, prefix: str) -> None:
        super().__init__(mod)
        self.prefix = prefix
        self.lifted: list[tuple[Any, Tensor]] = []

    def visit_constant_(self, op: Any) -> Any:
        """Visit a constant, as TVM 0.26 calls it."""
        value = op.data if hasattr(op, "data") else op.value
        if not isinstance(value, Tensor) or _n_bytes(value) < _MIN_BYTES:
            return op
        variable = relax.Var(f"{self.prefix}{len(self.lifted)}", op.ty)
        self.lifted.append((variable, value))
        return variable

    def visit_generic_const_(self, op: Any) -> Any:
        """Visit a constant, as TVM 0.27 calls it."""
        return self.visit_constant_(op)


def _n_bytes(value: Tensor) -> int:
    """Return the size of a tensor; 0 where numpy itself has no such type."""
    try:
        dtype = np.dtype(str(value.dtype))
    except TypeError:
        return 0
    # Others (bfloat16) are there only where some package has registered them.
    own = dtype.isbuiltin == 1
    return (
        own * dtype.itemsize * int(np.prod([int(extent) for extent in value.shape], dtype=object))
    )
