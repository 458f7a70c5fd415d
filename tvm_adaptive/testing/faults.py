"""Compilers and devices that fail: what a share of the candidates does instead.

Which candidate does what depends on the candidate and the seed alone, so that a candidate
that is built again, in a play-off or after a crash, does the same again.
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
    IRModule,
    Module,
    Target,
    Tensor,
    structural_hash,
    with_swapped_arguments,
    without_bodies,
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
    """The share of candidates with each fault; each in [0, 1], and in all at most 1."""

    abort: float = 0.0  # the process ends while it measures
    segfault: float = 0.0
    exit: float = 0.0
    hang: float = 0.0  # measuring never ends, and holds the interpreter meanwhile
    nan: float = 0.0  # measuring gives this time
    negative: float = 0.0
    zero: float = 0.0
    lie: float = 0.0  # measuring gives a hundredth of the time
    leak: float = 0.0  # measuring leaks 8 MiB in the worker
    wrong: float = 0.0  # the kernel computes nothing, which makes it the fastest
    # the kernel takes its first two arguments, where they are alike, in the other order: that is as
    # fast, and only a look at the results tells
    swapped: float = 0.0
    compile_crash: float = 0.0  # the compiler does
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
        """Return the fault of a candidate, by whatever stays the same of it; ``""`` for none."""
        text = f"{self.seed}:{candidate}".encode()
        level = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2.0**64
        for name, share in self.shares().items():
            if level < share:
                return name
            level -= share
        return ""


@dataclasses.dataclass(frozen=True)
class FaultyBuild:
    """A build function for :class:`~tvm_adaptive.PersistentBuilder`."""

    faults: Faults

    def __call__(self, mod: IRModule, target: Target, params: dict[str, Tensor] | None) -> Module:
        """Build a module, or something else."""
        fault = self.faults.of(structural_hash(mod))
        if fault == "compile_crash":
            os.abort()
        if fault == "compile_hang":
            hang()
        if fault == "wrong":
            mod = without_bodies(mod)
        if fault == "swapped":
            mod = with_swapped_arguments(mod)
        return build_candidate(mod, target, params)


@dataclasses.dataclass(frozen=True)
class FaultyMeasure:
    """A measuring function for :class:`~tvm_adaptive.AdaptiveRunner`."""

    faults: Faults

    def __call__(
        self,
        artifact_path: str,
        device_type: str,
        args_info: Sequence[Any],
        options: MeasureOptions,
    ) -> Timing:
        """Measure a candidate, or do something else."""
        content = Path(artifact_path).read_bytes()
        fault = self.faults.of(hashlib.sha256(content).hexdigest())
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
        told = {"nan": float("nan"), "negative": -1.0, "zero": 0.0}
        if fault in told:
            return dataclasses.replace(timing, mean_sec=told[fault])
        if fault == "lie":
            return dataclasses.replace(timing, mean_sec=timing.mean_sec / 100.0)
        return timing


# Of the worker process.
_leaked: list[bytes] = []


def hang() -> None:
    """Do nothing for an hour, and let no other thread of the process do anything."""
    ctypes.PyDLL(None).sleep(_HANG_SEC)


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Let our builder and local runner fail in every run that begins inside."""
    options: dict[tuple[str, str], dict[str, Any]] = {
        ("builder", "persistent"): {"build_function": FaultyBuild(faults)},
        ("runner", "adaptive"): {"measure": FaultyMeasure(faults)},
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
