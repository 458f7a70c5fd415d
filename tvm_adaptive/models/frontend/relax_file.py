"""Relax modules that ``tvm.ir.save_json`` wrote; ``main`` takes inputs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tvm_adaptive._tvm import IRModule, load_json
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend.reading import Form

_MISFIT = "is no module that tvm.ir.save_json wrote with this version of TVM"


def read_relax(path: Path, _shapes: Mapping[str, Sequence[int]]) -> IRModule:
    """Read a Relax module."""
    try:
        found = load_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # TVM's own, of any kind
        raise InvalidOptionError(f"{path} {_MISFIT}: it is damaged.") from error
    if not isinstance(found, IRModule):
        raise InvalidOptionError(f"{path} {_MISFIT}: it holds a {type(found).__name__}.")
    return found


RELAX = Form(read_relax, _MISFIT)
