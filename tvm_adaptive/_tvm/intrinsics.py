"""Import the tensor intrinsics that a target's schedules may name, and no others.

MetaSchedule imports its package of tensor intrinsics when a task is set up. The package
parses the intrinsics of every backend, which takes 12 to 20 s of CPU, nearly all for CUDA
and AMD; those of x86 take 0.2 s.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import importlib.util
import platform
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGE = "tvm.s_tir.tensor_intrin"

# Modules with the intrinsics of MetaSchedule's default schedule rules for an architecture.
# Other architectures need all modules.
_OF_ARCHITECTURE = {
    "x86_64": ("x86",),
    "amd64": ("x86",),
    "aarch64": ("dot_product_common", "arm_cpu"),
    "arm64": ("dot_product_common", "arm_cpu"),
    "riscv64": ("riscv_cpu",),
}
_OF_KIND = {"cuda": ("dot_product_common", "cuda"), "hexagon": ("hexagon",)}


def backends_for(kind: str, triple: str | None = None) -> tuple[str, ...] | None:
    """Return the modules of intrinsics that a target needs; None for all of them."""
    if kind != "llvm":
        return _OF_KIND.get(kind)
    architecture = (triple or platform.machine()).partition("-")[0].lower()
    return _OF_ARCHITECTURE.get(architecture)


def backends_of(targets: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the modules of intrinsics that any of TVM's targets needs; None for all of them."""
    found: dict[str, None] = {}
    for target in targets:
        triple = target.attrs.get("mtriple")
        backends = backends_for(str(target.kind.name), triple and str(triple))
        if backends is None:
            return None
        found.update(dict.fromkeys(backends))
    return tuple(found)


@contextlib.contextmanager
def only_intrinsics(backends: tuple[str, ...] | None) -> Iterator[None]:
    """Restrict an import of the whole package to these backends; a later one adds the rest."""
    spec = None if PACKAGE in sys.modules else importlib.util.find_spec(PACKAGE)
    if backends is None or spec is None or spec.submodule_search_locations is None:
        yield
        return
    stand_in = types.ModuleType(PACKAGE)
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = stand_in
    try:
        if _import_uninterrupted([f"{PACKAGE}.{backend}" for backend in backends]):
            yield
            return
    finally:
        if sys.modules.get(PACKAGE) is stand_in:
            del sys.modules[PACKAGE]
    yield


def _import_uninterrupted(modules: Sequence[str]) -> bool:
    """Import modules where Ctrl-C cannot interrupt; return whether all exist.

    Ctrl-C reaches the main thread only. TVM refuses to register anything twice, so that a
    partly executed module could not be imported again in this process.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "intrinsics") as thread:
        try:
            list(thread.map(importlib.import_module, modules))
        except ImportError:
            return False
    return True
