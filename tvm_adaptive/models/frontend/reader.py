"""Read model files in a worker: a damaged or hostile one costs a message, not the tuner.

The time and memory that the worker may take depend on the size of the file. That keeps out
crashes, hangs and memory bombs; it is no sandbox, since the worker runs as the same user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import psutil

from tvm_adaptive._tvm import IRModule, check_well_formed
from tvm_adaptive._tvm.versions import installed_version, release
from tvm_adaptive.errors import (
    InvalidOptionError,
    MachineError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    as_invalid_option,
    machine_failure,
    summary_line,
)
from tvm_adaptive.models.frontend.shapes import Shapes, network_of_imported
from tvm_adaptive.models.network import Network, Original, network_of_relax
from tvm_adaptive.models.rewrites.folding import fold
from tvm_adaptive.models.weights import load_weighted_module, save_module
from tvm_adaptive.workers.containers import memory_limit
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

Numbers: TypeAlias = Mapping[str, int]
Array: TypeAlias = npt.NDArray[Any]

_GIB = 1 << 30
# Imports of TVM and PyTorch are half a gigabyte; models whose weights are computed when
# they are read (a small file) get the rest.
_MIN_MEMORY_BYTES = 4 * _GIB
# Files beside a model whose sizes are added: it may lie in a folder of data.
_MAX_ENTRIES = 1000
# The file's bytes, the framework's tensors, TVM's, and those of one folding pass.
_MEMORY_PER_BYTE = 8
# Half a gigabyte of weights takes 20 s on two slow cores.
_READ_SEC = 120.0
_READ_SEC_PER_GIB = 120.0
# An inference of a large network in a framework that was not tuned for the machine.
_RUN_SEC = 120.0
# PyTorch reads a program's tensors without unpickling, and would unpickle as a second try.
READER_ENV = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
# In messages of numpy and Python; of C++; of PyTorch.
_MEMORY_ERRORS = ("bad_alloc", "can't allocate memory", "Cannot allocate memory")
# In the message of a file whose reading was stopped.
LATE = "took longer than"


class Inference(NamedTuple):
    """A model with its inputs, opened by a framework."""

    run: Callable[[], Any]
    outputs: Callable[[Any], list[Array]]  # of what ``run`` has returned


# From a file, inputs, and a number of threads (None: the framework's default).
Opener: TypeAlias = Callable[[Path, Sequence[Array], int | None], Inference]


def framework_version(title: str, package: str) -> str:
    """Return the name of a framework, with its version if its package is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{title} {importlib.metadata.version(package)}"
    return title


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A kind of model file; its functions run in a worker."""

    # From path and shapes to Relax operators with the weights as constants. Raises
    # InvalidOptionError for a file of another kind, a damaged one, or unsupported operators.
    read: Callable[..., IRModule]
    misfit: str  # what to say of a file that is of another kind or damaged: ``"is no ... "``
    package: str = ""  # that reads it, if any, and what pip calls it
    install: str = ""
    # The framework that computes the original outputs, and its package.
    framework: tuple[str, str] | None = None
    open: Opener | None = None  # in that framework
    open_plainly: Opener | None = None  # with other kernels, which round otherwise
    peer: str = ""  # that framework in PEERS, which is timed beside the library; "" for none
    takes_numbers: bool = False  # ``read`` has a keyword ``numbers``: inputs that decide branches
    beside: bool = False  # whether weights may be in other files, beside it or in a folder there
    least_version: tuple[int, ...] = ()  # of the package that reads it


@dataclasses.dataclass(frozen=True)
class Limits:
    """What reading a model may take."""

    memory_bytes: int
    read_sec: float
    run_sec: float  # of one inference in its own framework, which reads it again


class ModelReader:
    """A worker, started when needed, that reads model files and runs them in their frameworks."""

    def __init__(self, server: ForkServer | None = None) -> None:
        self._pool = WorkerPool(1, env=READER_ENV, server=server, modules=(__name__,))

    def read(
        self,
        file_format: FileFormat,
        path: Path,
        name: str,
        shapes: Shapes,
        numbers: Numbers | None = None,
    ) -> Network:
        """Read a model file; ``numbers`` are those of the inputs, where they are known."""
        check_package(file_format, path)
        limits = limits_of(path, file_format)
        with _printable_refusals():
            if file_format.takes_numbers and numbers:
                reading = functools.partial(file_format.read, numbers=dict(numbers))
                file_format = dataclasses.replace(file_format, read=reading)
            mod = self._read(file_format, path, shapes, limits)
            return network_of_relax(
                name, mod, {}, self._original(file_format, path.absolute(), limits)
            )

    def close(self) -> None:
        """End the worker; a later use starts a new one."""
        self._pool.close()

    def _read(
        self, file_format: FileFormat, path: Path, shapes: Shapes, limits: Limits
    ) -> IRModule:
        with ScratchFolder("model") as folder:
            task = (file_format, path.absolute(), shapes, folder, limits.memory_bytes)
            (outcome,) = self._pool.map(convert, [task], limits.read_sec)
            if outcome.error is not None:
                raise _refusal(outcome.error, path, file_format, limits)
            if outcome.value != "":
                raise InvalidOptionError(
                    str(outcome.value).replace(str(path.absolute()), str(path))
                )
            return load_weighted_module(folder)

    def _original(self, file_format: FileFormat, path: Path, limits: Limits) -> Original | None:
        if file_format.open is None or file_format.framework is None:
            return None
        run = functools.partial(self._run, file_format, path, limits)
        run_plainly: functools.partial[list[Array]] | None = None
        if file_format.open_plainly is not None:
            plain = dataclasses.replace(file_format, open=file_format.open_plainly)
            run_plainly = functools.partial(self._run, plain, path, limits)
        return Original(
            framework_version(*file_format.framework),
            run,
            run_plainly,
            file=(lambda _folder: path) if file_format.peer else None,
            memory_bytes=limits.memory_bytes,
            worker=self._pool,
        )

    def _run(
        self, file_format: FileFormat, path: Path, limits: Limits, inputs: Sequence[Array]
    ) -> list[Array]:
        """Run a file as its own framework does; raises WorkerError."""
        task = (file_format, path, list(inputs), limits.memory_bytes)
        (outcome,) = self._pool.map(run_original, [task], limits.run_sec)
        if outcome.error is not None:
            raise outcome.error
        if not isinstance(outcome.value, list):
            raise WorkerTaskError(f"expected a list of outputs, got {type(outcome.value)}")
        return outcome.value


@contextlib.contextmanager
def _printable_refusals() -> Iterator[None]:
    """Escape what messages quote from a file: control characters, ends of lines."""
    try:
        yield
    except InvalidOptionError as error:
        text = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))
        error.args = ("".join(text),)
        raise


def check_package(file_format: FileFormat, what: object) -> None:
    """Raise InvalidOptionError if the package that reads a format is missing or too old."""
    package = file_format.package
    if not package:
        return
    if importlib.util.find_spec(package) is None:
        raise InvalidOptionError(
            f"Reading {what} needs the package {package}: pip install {file_format.install}."
        )
    version = installed_version(package) or ""
    # Of one that was not installed by pip, nothing is known.
    if () < release(version) < file_format.least_version:
        least = ".".join(map(str, file_format.least_version))
        raise InvalidOptionError(
            f"Reading {what} needs {package} {least} or newer, but {version} is installed: pip "
            f"install {file_format.install}."
        )


def _refusal(
    error: WorkerError, path: Path, file_format: FileFormat, limits: Limits
) -> WorkerError | InvalidOptionError:
    """Return what to raise where the worker could not read a file."""
    if isinstance(error, MachineError):
        return error
    if isinstance(error, WorkerTimeoutError):
        return InvalidOptionError(
            f"Reading {path} {LATE} {limits.read_sec:.0f} s; try again where fewer "
            "programs run, or give a smaller model."
        )
    return InvalidOptionError(f"{path} {file_format.misfit}: {summary_line(error)}")


def limits_of(path: Path, file_format: FileFormat) -> Limits:
    """Return what reading a file may take."""
    paths = {path.absolute()}
    if file_format.beside:
        paths |= set(_files_beside(path.absolute()))
    n_bytes = sum(_size_bytes(each) for each in paths)
    total_bytes = psutil.virtual_memory().total
    total_bytes = min(total_bytes, memory_limit() or total_bytes)
    if _size_bytes(path) > total_bytes:
        raise InvalidOptionError(
            f"{path} has {_size_bytes(path) / _GIB:.1f} GiB, but this machine, or its container, "
            f"has {total_bytes / _GIB:.1f} GiB of memory; read it on a larger one."
        )
    scale_sec = _READ_SEC_PER_GIB * min(n_bytes, total_bytes) / _GIB
    return Limits(
        min(total_bytes, _MIN_MEMORY_BYTES + _MEMORY_PER_BYTE * n_bytes),
        _READ_SEC + scale_sec,
        _RUN_SEC + scale_sec,
    )


def _files_beside(path: Path) -> list[Path]:
    """Return the files of a folder, and some of the folders in it, where weights may be."""
    found: list[Path] = []
    folders = [path.parent]
    with contextlib.suppress(OSError):  # a folder may be closed, and its files not
        # Weights mostly have the model's name, and an ending of their own.
        named = path.parent.glob(f"{glob.escape(path.stem)}*")
        found += [each for each in named if each.is_file()]
        folders += itertools.islice(path.parent.iterdir(), _MAX_ENTRIES)
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder.is_dir():
                entries = itertools.islice(folder.iterdir(), max(0, _MAX_ENTRIES - len(found)))
                found += [each for each in entries if each.is_file()]
    return found


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def convert(
    file_format: FileFormat, path: Path, shapes: Shapes, folder: Path, memory_bytes: int
) -> str:
    """Write a file's module with fixed shapes and folded constants; return why not, or ``""``."""
    limit_memory(memory_bytes)
    try:
        mod = file_format.read(path, shapes)
        mod = network_of_imported(path.stem, mod, shapes, source=str(path)).mod
        with as_invalid_option(f"TVM cannot import {path}"):
            check_well_formed(mod)
            # Each bias of a convolution is a reshaped constant.
            save_module(fold(mod), folder)
            return ""
    except Exception as error:  # also C++'s and PyTorch's own, where no memory is left
        if is_of_memory(error):
            return (
                f"Reading {path} needs more than {memory_bytes / _GIB:.1f} GiB of memory, its "
                "limit here; read it where there is more memory, or store constants in the file "
                "instead of computing them there."
            )
        if not isinstance(error, InvalidOptionError):
            raise
        if machine_failure(error):  # it says nothing of the file
            raise (error.__cause__ or error) from None
        return str(error)


def run_original(
    file_format: FileFormat, path: Path, inputs: Sequence[Array], memory_bytes: int
) -> list[Array]:
    """Run a model file in its own framework."""
    limit_memory(memory_bytes)
    assert file_format.open is not None
    inference = file_format.open(path, inputs, None)
    return inference.outputs(inference.run())


def limit_memory(n_bytes: int) -> None:
    """Limit what this process allocates; address space that it only reserves is free."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or what caused it, is a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or any(text in str(error) for text in _MEMORY_ERRORS):
            return True
        error = error.__cause__
    return False
