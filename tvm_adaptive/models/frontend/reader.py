"""Read model files in a worker: a damaged or hostile one costs a message, not the tuner.

The worker may take so much time and memory as suits the size of the file. That keeps out
crashes, hangs and memory bombs; it is no sandbox, since the worker runs as the same user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from tvm_adaptive._tvm import load_json
from tvm_adaptive.errors import InvalidOptionError, WorkerTaskError, summary_line
from tvm_adaptive.models.frontend.reading import (
    Array,
    Description,
    Form,
    Shapes,
    describe,
    run_original,
)
from tvm_adaptive.models.frontend.weights import attach
from tvm_adaptive.models.network import Network, Original, network_of_relax
from tvm_adaptive.workers.fork_server import new_fork_server
from tvm_adaptive.workers.pool import WorkerPool

_GIB = 1 << 30
# Imports of TVM and PyTorch are half a gigabyte; models whose weights are computed when
# they are read (a small file) get the rest.
_MIN_MEMORY_BYTES = 4 * _GIB
# The file's bytes, the framework's tensors, TVM's, and those of one folding pass.
_MEMORY_PER_BYTE = 8
# Half a gigabyte of weights takes 20 s on two slow cores.
_READ_SEC = 120.0
_READ_SEC_PER_GIB = 120.0
# An inference of a large network in a framework that was not tuned for the machine.
_RUN_SEC = 120.0
# PyTorch reads a program's tensors without unpickling, and would unpickle as a second try.
_ENV = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What reading a model may take."""

    memory_bytes: int
    read_sec: float
    run_sec: float  # of one inference in its own framework, which reads it again


class ModelReader:
    """A worker that reads model files, and runs them in their own frameworks.

    It starts when it is first needed, and again after a file that ended it.
    """

    def __init__(self) -> None:
        self._server = new_fork_server(("tvm_adaptive.models.frontend.reading",))
        self._pool = WorkerPool(1, env=_ENV, server=self._server)

    def read(self, form: Form, path: Path, name: str, shapes: Shapes) -> Network:
        """Read a model file."""
        if form.check is not None:
            form.check(path)
        limits = limits_of(path, form)
        with tempfile.TemporaryDirectory(prefix="tvm-adaptive-model-") as folder:
            weights_path = Path(folder) / "weights"
            task = (form, path.resolve(), shapes, weights_path, limits.memory_bytes)
            (outcome,) = self._pool.map(describe, [task], limits.read_sec)
            if outcome.error is not None:
                raise InvalidOptionError(f"{path} {form.misfit}: {summary_line(outcome.error)}")
            if not isinstance(outcome.value, Description):
                text = str(outcome.value).replace(str(path.resolve()), str(path))
                raise InvalidOptionError(text)
            mod = attach(load_json(outcome.value.module), outcome.value.weights, weights_path)
        return network_of_relax(name, mod, {}, self._original(form, path.resolve(), limits))

    def close(self) -> None:
        """End the worker; a later use starts a new one."""
        self._pool.close()
        if self._server is not None:
            self._server.close()

    def _original(self, form: Form, path: Path, limits: Limits) -> Original | None:
        if form.run is None or form.framework is None:
            return None
        run = functools.partial(self._run, form, path, limits)
        return Original(form.framework(), run, self.close)

    def _run(self, form: Form, path: Path, limits: Limits, inputs: Sequence[Array]) -> list[Array]:
        """Run a file as its own framework does; raises WorkerError."""
        task = (form, path, list(inputs), limits.memory_bytes)
        (outcome,) = self._pool.map(run_original, [task], limits.run_sec)
        if outcome.error is not None:
            raise outcome.error
        if not isinstance(outcome.value, list):
            raise WorkerTaskError(f"expected a list of outputs, got {type(outcome.value)}")
        return outcome.value


def limits_of(path: Path, form: Form) -> Limits:
    """Return what reading a file may take."""
    paths = [path]
    if form.beside:
        paths = [each for each in path.resolve().parent.iterdir() if each.is_file()]
    n_bytes = sum(_size_bytes(each) for each in paths)
    total_bytes = psutil.virtual_memory().total
    if _size_bytes(path) > total_bytes:
        raise InvalidOptionError(
            f"{path} has {_size_bytes(path) / _GIB:.1f} GiB, but this machine has "
            f"{total_bytes / _GIB:.1f} GiB of memory; read it on a larger one."
        )
    scale_sec = _READ_SEC_PER_GIB * min(n_bytes, total_bytes) / _GIB
    return Limits(
        min(total_bytes, _MIN_MEMORY_BYTES + _MEMORY_PER_BYTE * n_bytes),
        _READ_SEC + scale_sec,
        _RUN_SEC + scale_sec,
    )


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
