"""Relax modules that ``tvm.ir.save_json`` wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvm_adaptive._tvm import IRModule, load_json
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.importers.shapes import network_of_imported
from tvm_adaptive.models.network import Network
from tvm_adaptive.workers import WorkerPool

# Half a gigabyte of weights takes less.
_READ_TIMEOUT_SEC = 300.0


def network_of_json(path: Path, name: str, shapes: Mapping[str, Sequence[int]]) -> Network:
    """Read a Relax module.

    Parameters
    ----------
    path : Path
        Its ``main`` takes inputs only: weights are constants.
    name : str
        Of the network.
    shapes : mapping of str to sequence of int
        As for :func:`~tvm_adaptive.importers.load`.

    Raises
    ------
    InvalidOptionError
        When the file holds no such module, or a shape stays dynamic.
    """
    # TVM reads it in C++, where a damaged file can end the process.
    with contextlib.closing(WorkerPool(1)) as pool:
        (outcome,) = pool.map(_describe, [(str(path),)], _READ_TIMEOUT_SEC)
    if outcome.error is not None or outcome.value != IRModule.__name__:
        found = f"it holds a {outcome.value}" if outcome.error is None else "it is damaged"
        raise InvalidOptionError(
            f"{path} is no module that tvm.ir.save_json wrote with this version of TVM: {found}."
        )
    return network_of_imported(name, load_json(path.read_text(encoding="utf-8")), shapes)


def _describe(path: str) -> str:
    """Read a file as a worker; return the class of what it holds."""
    return type(load_json(Path(path).read_text(encoding="utf-8"))).__name__
