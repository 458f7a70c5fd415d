"""A compiler and a device that fail for a share of the candidates.

A candidate's fault depends on the candidate and the seed alone, so that it has the same one
when it is built again, in a play-off or after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    Evaluate,
    IRModule,
    Module,
    PrimFunc,
    Target,
    Tensor,
    structural_hash,
    tensor_functions_of,
)
from tvm_adaptive.builder.compile import build_candidate
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.runner.measure import MeasureOptions, measure_artifact
from tvm_adaptive.tuning import registry
from tvm_adaptive.values.trial import Timing

_HANG_SEC = 3600
_LEAK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """The share of candidates with each fault; their sum is at most 1."""

    abort: float = 0.0  # the measuring process
    segfault: float = 0.0
    exit: float = 0.0
    hang: float = 0.0  # while holding the interpreter's lock
    nan: float = 0.0  # a measured time
    negative: float = 0.0
    zero: float = 0.0
    lie: float = 0.0  # a hundredth of the time
    leak: float = 0.0  # 8 MiB in the worker
    wrong: float = 0.0  # the kernel computes nothing, which makes it the fastest
    # the kernel swaps its first two arguments, if they are alike: as fast, and only a check of
    # the results tells
    swapped: float = 0.0
    compile_crash: float = 0.0
    compile_hang: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = self.shares().values()
        if min(shares) < 0 or sum(shares) > 1:
            raise InvalidOptionError(
                f"Shares of faults must be at least 0, and 1 in all, but got {self.shares()}."
            )

    def shares(self) -> dict[str, float]:
        """Return the shares by the names of the faults."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "seed"}

    def of(self, candidate: object) -> str:
        """Return the fault of a candidate, given by any lasting key; ``""`` for none."""
        text = f"{self.seed}:{candidate}".encode()
        level = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2.0**64
        for name, share in self.shares().items():
            if level < share:
                return name
            level -= share
        return ""


def build_with_fault(
    faults: Faults, mod: IRModule, target: Target, params: dict[str, Tensor] | None
) -> Module:
    """Build a module, or carry out its fault."""
    fault = faults.of(structural_hash(mod))
    if fault == "compile_crash":
        os.abort()
    if fault == "compile_hang":
        hang()
    if fault == "wrong":
        mod = without_bodies(mod)
    if fault == "swapped":
        mod = with_swapped_arguments(mod)
    return build_candidate(mod, target, params)


def measure_with_fault(
    faults: Faults,
    artifact_path: str,
    device_type: str,
    args_info: Sequence[Any],
    options: MeasureOptions,
) -> Timing:
    """Measure a candidate, or carry out its fault."""
    content = Path(artifact_path).read_bytes()
    fault = faults.of(hashlib.sha256(content).hexdigest())
    if fault == "abort":
        os.abort()
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "exit":
        os._exit(0)
    if fault == "hang":
        hang()
    if fault == "leak":
        _leaked.append(os.urandom(_LEAK_BYTES))
    timing = measure_artifact(artifact_path, device_type, args_info, options)
    false_secs = {
        "nan": float("nan"),
        "negative": -1.0,
        "zero": 0.0,
        "lie": timing.mean_sec / 100.0,
    }
    return dataclasses.replace(timing, mean_sec=false_secs.get(fault, timing.mean_sec))


def without_bodies(mod: IRModule) -> IRModule:
    """Return the module with tensor functions that do nothing."""
    idle = {v: f.with_body(Evaluate(0)) for v, f in tensor_functions_of(mod)}
    return IRModule({**dict(mod.functions.items()), **idle})


def with_swapped_arguments(mod: IRModule) -> IRModule:
    """Return the module with each function's first two parameters swapped, if alike."""
    swapped = {v: _swapped(f) for v, f in tensor_functions_of(mod)}
    return IRModule({**dict(mod.functions.items()), **swapped})


def _swapped(function: PrimFunc) -> PrimFunc:
    first, second, *others = function.params
    kinds = [(each.ty.dtype, list(map(int, each.ty.shape))) for each in (first, second)]
    if kinds[0] != kinds[1]:
        return function
    return PrimFunc([second, first, *others], function.body, function.ret_type, function.attrs)


# In the worker process.
_leaked: list[bytes] = []


def hang() -> None:
    """Sleep for an hour with the interpreter's lock."""
    ctypes.PyDLL(None).sleep(_HANG_SEC)


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Give the faults to the persistent builder and the local runner of new runs."""
    options: dict[tuple[str, str], dict[str, Any]] = {
        ("builder", "persistent"): {"build_function": functools.partial(build_with_fault, faults)},
        ("runner", "adaptive"): {"measure": functools.partial(measure_with_fault, faults)},
    }
    sound = {}
    for (part, name), more in options.items():
        constructors = registry.PARTS[part].constructors
        sound[part, name] = constructors[name]
        constructors[name] = functools.partial(constructors[name], **more)
    try:
        yield
    finally:
        for (part, name), constructor in sound.items():
            registry.PARTS[part].constructors[name] = constructor
