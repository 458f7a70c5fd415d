"""What a deployed model takes, returns and needs, and how it was checked: ``manifest.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    FFI_VERSION,
    TVM_VERSION,
    Target,
    args_info_of,
    relax,
    result_type_of,
)
from tvm_adaptive._tvm.runtime_files import architecture_of, cpu_features_of
from tvm_adaptive._tvm.versions import installed_version
from tvm_adaptive.measure_callback.journal import finite
from tvm_adaptive.models import Coverage, Network, TIRWorkload
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.models.network import extents_of, main_of
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.tuning.target import describe_target, missing_vectors
from tvm_adaptive.values.cpu_features import CpuFeature, needed_features
from tvm_adaptive.workers.environment import processor_flags

MANIFEST_FILE = "manifest.json"
# Of the file; larger if a reader of this one would misunderstand it.
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """An input, an output or a buffer."""

    name: str
    shape: tuple[int | str, ...]  # an expression where it depends on the inputs' values
    dtype: str

    @property
    def n_bytes(self) -> int | None:
        """Size of the values; None if it is not known before they are computed."""
        extents = [extent for extent in self.shape if isinstance(extent, int)]
        try:
            n_bytes = np.dtype(self.dtype).itemsize
        except TypeError:  # numpy has no such type
            return None
        return n_bytes * int(np.prod(extents)) if len(extents) == len(self.shape) else None


@dataclasses.dataclass(frozen=True)
class Interface:
    """What a model takes and returns; a single function has buffers, a network the others."""

    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] | None = None  # None if they are no plain tensors
    buffers: tuple[TensorInfo, ...] = ()  # inputs, then outputs


def interface_of(model: Network | TIRWorkload) -> Interface:
    """Return what a model takes and returns, in the order of its compiled function."""
    if isinstance(model, TIRWorkload):
        buffers = [
            TensorInfo(f"buffer_{place}", tuple(int(n) for n in info.shape), str(info.dtype))
            for place, info in enumerate(args_info_of(model.mod))
        ]
        return Interface(buffers=tuple(buffers))
    inputs = [
        TensorInfo(name, tuple(shape), model.input_dtypes[name])
        for name, shape in model.input_shapes.items()
    ]
    return Interface(tuple(inputs), _outputs_of(model))


def _outputs_of(model: Network) -> tuple[TensorInfo, ...] | None:
    result = result_type_of(main_of(model.mod))
    types = (
        [result] if isinstance(result, relax.TensorType) else list(getattr(result, "fields", ()))
    )
    names = model.output_names
    if len(names) != len(types):
        names = [f"output_{place}" for place in range(len(types))]
    outputs = []
    for name, kind in zip(names, types, strict=True):
        if not isinstance(kind, relax.TensorType) or kind.shape is None:
            return None
        outputs.append(TensorInfo(name, tuple(extents_of(kind.shape)), str(kind.dtype)))
    return tuple(outputs) or None


def features_of(context: RunContext) -> dict[str, CpuFeature]:
    """Return the instruction sets that a library for a CPU needs; empty for other devices."""
    target = context.target
    if target.kind.name != "llvm":
        return {}
    # A farm's devices have processors of their own, and what this one lacks it could not check.
    has_run = context.farm is None and not missing_vectors(target)
    here = processor_flags() if has_run else None
    return needed_features(architecture_of(target), cpu_features_of(target), here)


def write_manifest(
    path: Path,
    what: str,
    library: str,
    target: Target,
    interface: Interface,
    *,
    cpu_features: Mapping[str, CpuFeature],
    runtime_libraries: Sequence[str],
    coverage: str,
    functions: Coverage,
    comparison: Comparison | None,
    n_threads: int | None,
    thread_secs: Mapping[int, float],
) -> Path:
    """Write what is known of a deployed model; return the file."""
    is_cpu = device_kind(target) == "cpu"
    # Renamed or removed keys need another format: programs of users read them.
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "what": what,
        "library": library,
        "runtime_libraries": runtime_libraries,
        **dataclasses.asdict(interface),
        "target": describe_target(target),
        "target_config": json.loads(str(target)),
        "architecture": architecture_of(target) if is_cpu else None,
        "mcpu": target.attrs.get("mcpu") and str(target.attrs["mcpu"]),
        "cpu_features": {name: each.flag for name, each in cpu_features.items()},
        "n_threads": n_threads,
        "latency_sec_by_threads": {str(count): sec for count, sec in thread_secs.items()},
        "latency_sec": comparison and comparison.after_sec,
        "coverage": coverage,
        "functions": dataclasses.asdict(functions),
        "comparison": comparison and dataclasses.asdict(comparison),
        "tvm": TVM_VERSION,
        "tvm_ffi": FFI_VERSION,
        "tvm_adaptive": installed_version("tvm-adaptive"),
    }
    path.write_text(json.dumps(finite(fields), indent=2) + "\n", encoding="utf-8")
    return path
