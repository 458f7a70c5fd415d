"""Compile a network in another process, which can be killed when it takes too long.

Weights travel as they are, beside the module: as text they would take minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    IRModule,
    Module,
    Target,
    constants_as_parameters,
    load_json,
    load_param_dict,
    relax_transform,
    save_json,
    save_param_dict,
)
from tvm_adaptive.models.compare import export
from tvm_adaptive.models.compile import build_network, build_scheduled

_MODULE_FILE = "module.json"
_WEIGHTS_FILE = "weights.bin"
# A smaller constant is not worth a parameter.
_LEAST_BYTES = 1 << 12


def save_module(mod: IRModule, folder: Path) -> None:
    """Write a network's module with its weights."""
    light, weights = constants_as_parameters(mod, _LEAST_BYTES)
    (folder / _MODULE_FILE).write_text(save_json(light))
    (folder / _WEIGHTS_FILE).write_bytes(bytes(save_param_dict(weights)))


def load_module(folder: Path) -> IRModule:
    """Undo :func:`save_module`."""
    weights: dict[str, Any] = dict(load_param_dict((folder / _WEIGHTS_FILE).read_bytes()))
    mod = load_json((folder / _MODULE_FILE).read_text())
    return relax_transform.BindParams("main", weights)(mod) if weights else mod


def export_module(folder: str, target_json: str, path: str) -> None:
    """Compile a network that :func:`save_module` wrote; runs in a worker."""
    target: Target = load_json(target_json)
    export(build_network(load_module(Path(folder)), target), path)


def export_function(mod_json: str, target_json: str, path: str) -> None:
    """Compile a tensor function that has its schedule; runs in a worker."""
    built: Module = build_scheduled(load_json(mod_json), load_json(target_json))
    built.export_library(path)
