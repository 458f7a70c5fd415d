"""What the worker does that reads a model file; see :mod:`tvm_adaptive.models.frontend.reader`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from tvm_adaptive._tvm import IRModule, Sequential, relax, relax_transform, save_json
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.models.frontend.weights import Weight, detach

Shapes: TypeAlias = Mapping[str, Sequence[int]]
Array: TypeAlias = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of model file."""

    # ``(path, shapes) -> IRModule`` with Relax operators and the weights as constants. Runs in a
    # worker. Raises InvalidOptionError for a file that is of another kind, damaged, or of operators
    # that TVM does not know
    read: Callable[[Path, Shapes], IRModule]
    misfit: str  # what to say of a file that is of another kind or damaged: ``"is no ... "``
    # ``(path)``; raises InvalidOptionError when a package is missing. Runs in the tuner
    check: Callable[[Path], None] | None = None
    # returns name and version of what the model is compared with
    framework: Callable[[], str] | None = None
    # ``(path, inputs) -> outputs`` as that framework computes them. Runs in a worker
    run: Callable[[Path, Sequence[Array]], list[Array]] | None = None
    beside: bool = False  # whether weights may be in other files of the same folder


@dataclasses.dataclass(frozen=True)
class Description:
    """A model that was read."""

    module: str  # as JSON, without large constants
    weights: tuple[Weight, ...]  # those, in a file of their own


def describe(
    form: Form, path: Path, shapes: Shapes, weights_path: Path, memory_bytes: int
) -> Description | str:
    """Read a model file; fix its shapes and compute what depends on constants alone."""
    limit_memory(memory_bytes)
    try:
        mod = network_of_imported(path.stem, form.read(path, shapes), shapes).mod
        with as_invalid_option(f"TVM cannot import {path}"):
            # TVM 0.26 returns whether it is, later ones raise.
            if relax.analysis.well_formed(mod) is False:
                raise ValueError("the module is not well-formed")
            t = relax_transform
            mod = Sequential([t.FoldConstant(), t.DeadCodeElimination()])(mod)
            mod, weights = detach(mod, weights_path)
            return Description(str(save_json(mod)), weights)
    except (InvalidOptionError, MemoryError) as error:
        if _is_of_memory(error):
            return f"Reading {path} needs more than {memory_bytes / 2**30:.1f} GiB of memory."
        return str(error)


def run_original(form: Form, path: Path, inputs: Sequence[Array], memory_bytes: int) -> list[Array]:
    """Run a model file in its own framework."""
    limit_memory(memory_bytes)
    assert form.run is not None
    return form.run(path, inputs)


def limit_memory(n_bytes: int) -> None:
    """Let this process allocate no more; address space that it only reserves is free."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _is_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or what caused it, is a want of memory."""
    while error is not None:
        # Of numpy and Python; of C++; of PyTorch.
        texts = ("bad_alloc", "can't allocate memory", "Cannot allocate memory")
        if isinstance(error, MemoryError) or any(text in str(error) for text in texts):
            return True
        error = error.__cause__
    return False
