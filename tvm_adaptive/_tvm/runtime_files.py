"""What a compiled library needs of the machine that runs it: TVM's files and the processor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path

import tvm
import tvm_ffi
from tvm.target import Target
from tvm.target.codegen import (
    llvm_get_cpu_archlist,
    llvm_get_cpu_features,
    llvm_get_system_triple,
)

# Sorting and random numbers stand in a library of their own, by these prefixes.
_EXTRA = (b"tvm.contrib.sort.", b"tvm.contrib.random.")
# TVM has what Relax calls at run time in Python: nonzero, unique, assertions, prints.
_IN_PYTHON = re.compile(rb"relax\.run\.[a-z_]+")
# What C programs include, below include/.
HEADERS = ("tvm/ffi/c_api.h", "dlpack/dlpack.h")


def architecture_of(target: Target) -> str:
    """Return what code for a CPU runs on, e.g. ``"x86_64"`` or ``"aarch64"``."""
    triple = str(target.attrs.get("mtriple") or llvm_get_system_triple())
    name = triple.split("-", 1)[0]
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def cpu_features_of(target: Target) -> frozenset[str]:
    """Return the features that LLVM may use for a target of kind llvm, by its names."""
    return frozenset(str(name) for name in llvm_get_cpu_features(target))


def processors_of(target: Target) -> frozenset[str]:
    """Return the processors that LLVM knows of a target's architecture, by the names of mcpu."""
    # With mcpu, TVM would warn of one that it does not know.
    config = {"kind": "llvm"}
    if "mtriple" in target.attrs:
        config["mtriple"] = str(target.attrs["mtriple"])
    return frozenset(str(name) for name in llvm_get_cpu_archlist(Target(config)))


def runtime_libraries(library: Path) -> list[Path]:
    """Return those of TVM's libraries that a library for the CPU needs to run."""
    folder = Path(tvm.__file__).parent / "lib"
    found = [folder / "libtvm_runtime.so"]
    with _content_of(library) as content:
        if any(content.find(prefix) >= 0 for prefix in _EXTRA):
            found.append(folder / "libtvm_runtime_extra.so")
    return [*found, Path(tvm_ffi.__file__).parent / "lib" / "libtvm_ffi.so"]


def python_functions(library: Path) -> list[str]:
    """Return the functions that a library calls and that TVM has in Python only, by name."""
    with _content_of(library) as content:
        return sorted({name.decode() for name in _IN_PYTHON.findall(content)})


@contextmanager
def _content_of(library: Path) -> Iterator[mmap]:
    with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        yield content


def header_folder() -> Path:
    """Return the folder below which :data:`HEADERS` are."""
    return Path(tvm_ffi.__file__).parent / "include"
