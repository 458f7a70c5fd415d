"""Keep a module's large constants apart from it, in a file that is read without parsing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, Tensor, relax

MODULE_FILE = "module.json"
WEIGHTS_FILE = "weights.bin"
# Smaller ones stay in the module: as JSON they cost no time, and passes look into some.
_MIN_BYTES = 1024


def save_module(mod: IRModule, folder: Path) -> None:
    """Write a module, and the large constants of ``main`` in a file of their own."""
    main = mod["main"]
    taken = {str(variable.name) for variable in main.params}
    prefix = "weight_"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    lifting = _Lifting(mod, prefix)
    body = lifting.visit_expr(main.body)
    weights = {}
    with open(folder / WEIGHTS_FILE, "wb") as file:
        for variable, value in lifting.lifted:
            array = np.ascontiguousarray(value.numpy())
            weights[str(variable.name)] = (array.dtype.name, array.shape, file.tell())
            file.write(array.view(np.uint8).data)  # bfloat16 has no buffer of its own
    parameters = [*main.params, *(variable for variable, _ in lifting.lifted)]
    text = str(_tvm.save_json(_tvm.with_main(mod, _tvm.with_body(main, body, parameters))))
    (folder / MODULE_FILE).write_text(json.dumps({"module": text, "weights": weights}))


def load_weighted_module(folder: Path) -> IRModule:
    """Read a module that :func:`save_module` wrote."""
    saved = json.loads((folder / MODULE_FILE).read_text())
    mod = _tvm.load_own_json(saved["module"])
    values = {}
    for name, (dtype, shape, offset_bytes) in saved["weights"].items():
        array = np.memmap(folder / WEIGHTS_FILE, dtype, "r", offset_bytes, tuple(shape))
        values[name] = _tvm.tensor(array)
    return _tvm.relax_transform.BindParams("main", values)(mod) if values else mod


@_tvm.mutator
class _Lifting(_tvm.PyExprMutator):  # type: ignore[misc]
    """Put a variable in the place of each large constant."""

    def __init__(self, mod: IRModule, prefix: str) -> None:
        super().__init__(mod)
        self.prefix = prefix
        self.lifted: list[tuple[Any, Tensor]] = []
        # By constants: what all steps of a recurrent layer share is written once.
        self._known: dict[int, Any] = {}

    def visit_generic_const_(self, op: Any) -> Any:
        """Visit a constant, as TVM 0.27 calls it."""
        value = _tvm.data_of_constant(op)
        if not isinstance(value, Tensor) or _n_bytes(value) < _MIN_BYTES:
            return op
        key = _tvm.handle(op)
        if key not in self._known:
            self._known[key] = relax.Var(f"{self.prefix}{len(self.lifted)}", op.ty)
            self.lifted.append((self._known[key], value))
        return self._known[key]

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
