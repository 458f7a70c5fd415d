"""Compiled modules that a process can load and drop."""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import load_module, tvm


def load_until_dropped(path: str) -> Any:
    """Load a compiled module that is unloaded with the last object that needs it."""
    module = load_module(path)  # links an archive first; adds the module to those that stay
    tvm.get_global_func("ffi.ModuleGlobalsRemove")(module)
    return module
