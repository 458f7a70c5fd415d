"""PyTorch programs: files of ``torch.export.save``, and modules in memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tvm_adaptive._tvm import relax_of_exported_program
from tvm_adaptive.errors import InvalidOptionError, essence, refused
from tvm_adaptive.importers.shapes import network_of_imported
from tvm_adaptive.models.network import Network, Original


def network_of_pt2(path: Path, name: str, shapes: Mapping[str, Sequence[int]]) -> Network:
    """Read a file that ``torch.export.save`` wrote.

    Parameters
    ----------
    path : Path
    name : str
        Of the network.
    shapes : mapping of str to sequence of int
        As for :func:`~tvm_adaptive.importers.load`.

    Raises
    ------
    InvalidOptionError
        When PyTorch is missing, the file is no exported program, an operator is unknown
        to TVM, or a shape stays dynamic.
    """
    check_torch(f"Reading {path}")
    import torch

    try:
        program = torch.export.load(str(path))
    except Exception as error:  # zip, JSON and pickle errors, and PyTorch's own
        raise InvalidOptionError(
            f"{path} is no program of torch.export.save, or a damaged one: {essence(error)}"
        ) from error
    return network_of_program(program, name, shapes, str(path))


def network_of_program(
    program: Any, name: str, shapes: Mapping[str, Sequence[int]], source: str
) -> Network:
    """Import a ``torch.export.ExportedProgram``.

    Parameters
    ----------
    program : torch.export.ExportedProgram
    name : str
    shapes : mapping of str to sequence of int
    source : str
        Where it comes from, for messages.

    Raises
    ------
    InvalidOptionError
        When an operator is unknown to TVM, or a shape stays dynamic.
    """
    with refused(f"TVM cannot import {source}"):
        mod = relax_of_exported_program(program)
    return network_of_imported(name, mod, shapes, original=_original(program))


def check_torch(what: str) -> None:
    """Raise InvalidOptionError where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InvalidOptionError(f"{what} needs PyTorch: pip install torch.")


def _original(program: Any) -> Original:
    import torch

    module = program.module()
    pytree = torch.utils._pytree

    def run(inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        tensors = [torch.from_numpy(value) for value in inputs]
        positional, named = pytree.tree_unflatten(tensors, program.call_spec.in_spec)
        with torch.inference_mode():
            outputs = module(*positional, **named)
        return [output.detach().numpy() for output in pytree.tree_leaves(outputs)]

    return Original(f"PyTorch {torch.__version__}", run)
