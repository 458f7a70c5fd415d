"""From a user's options to the target to tune for, and the devices that measure."""

from __future__ import annotations

import difflib
import json
import math
import platform
from collections.abc import Mapping
from typing import Any, TypeAlias

from tvm_adaptive._tvm import RPCConfig, Target, device, llvm_get_system_cpu
from tvm_adaptive._tvm.runtime_files import architecture_of, cpu_features_of, processors_of
from tvm_adaptive.errors import InvalidOptionError, check_at_least
from tvm_adaptive.tuning.config import MeasureConfig, TuneConfig
from tvm_adaptive.values.cpu_features import CPU_FEATURES
from tvm_adaptive.workers.cores import usable_physical_cores
from tvm_adaptive.workers.environment import Environment, processor_flags

TargetLike: TypeAlias = Target | str | Mapping[str, Any] | None

# Runners that measure behind a tracker.
FARM_RUNNERS = ("adaptive-rpc", "rpc")

# What says for which processors LLVM compiles.
_PROCESSOR_KEYS = {"mcpu", "mattr", "mtriple"}

# Instruction sets, by LLVM's names, that compilers use for any loop. Others may be hidden, by a
# virtual machine, where code runs that may use them.
_VECTORS = frozenset({"avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "sve"})
# By the names of other systems.
_ARCHITECTURES = {"arm64": "aarch64", "AMD64": "x86_64"}

_EXAMPLE = '{"kind": "llvm", "mcpu": "znver4", "num-cores": 8}'
_ELSEWHERE = (
    'write target="cpu" for this machine, work on one that has it, or measure on such devices '
    "(--tracker)."
)


def resolve_target(spec: TargetLike, *, is_here: bool = True, device_index: int = 0) -> Target:
    """Return the target of a user's specification.

    None, or a text or mapping of kind llvm that names no processor, means this machine's, unless
    code runs elsewhere (``is_here``). A ``Target`` stays what it is: TVM compiles one without
    ``mcpu`` for every processor of its architecture, on x86-64 without AVX. "cuda" means the GPU
    of ``device_index``.
    """
    name = spec.strip() if isinstance(spec, str) else spec
    if name is None and not is_here:
        raise InvalidOptionError(
            "Devices behind a tracker may have another processor than this machine: name it with "
            f"--target, e.g. {_EXAMPLE}, or cpu if they are alike."
        )
    if name is None or name in ("cpu", "auto"):
        return _parse({"kind": "llvm", "num-cores": usable_physical_cores()}, is_here=True)
    if name == "cuda":
        return _gpu(device_index)
    target = spec if isinstance(spec, Target) else _parse(spec, is_here=is_here)
    if target.kind.name == "llvm" and "num-cores" not in dict(target.attrs):
        raise InvalidOptionError(
            "target llvm needs num-cores, because schedules are made for a number of cores. "
            f'Add it, as in {_EXAMPLE}, or write target="cpu" for this machine '
            f"({usable_physical_cores()} cores)."
        )
    if target.kind.name == "llvm":
        check_at_least("num-cores", int(target.attrs["num-cores"]), 1)
    return target


def _check_processor(target: Target) -> None:
    """Raise InvalidOptionError for a processor that LLVM does not know."""
    name = str(target.attrs.get("mcpu", ""))
    if target.kind.name != "llvm" or not name:
        return
    known = processors_of(target)
    if known and name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise InvalidOptionError(
            f"LLVM knows no processor {name!r} of {architecture_of(target)}, and TVM would compile "
            "for any, on x86-64 without AVX"
            + (f"; it knows {', '.join(near)}" if near else "")
            + '. Write target="cpu" for this machine, or the name that `llc -mcpu=help` lists.'
        )


def possible_targets(spec: TargetLike) -> list[Target]:
    """Return what a specification means in a run on this machine, and in one on a farm."""
    return [resolve_target(spec, is_here=is_here) for is_here in (True, False)]


def check_architecture(target: Target) -> None:
    """Raise InvalidOptionError for another architecture, whose code this machine cannot link."""
    if target.kind.name != "llvm":
        return
    architecture, here = architecture_of(target), platform.machine()
    if _ARCHITECTURES.get(here, here) != architecture:
        raise InvalidOptionError(
            f"The target is for {architecture}, but this machine is {here}: work on one of that "
            "architecture, measure and link on such devices (--tracker), or, unless it is a run's "
            'target, write target="cpu" for this machine.'
        )


def check_runs_here(target: Target) -> None:
    """Raise InvalidOptionError for code that this machine's processor cannot run."""
    check_architecture(target)
    if target.kind.name != "llvm":
        return
    if missing := missing_vectors(target):
        raise InvalidOptionError(
            f"The target ({describe_target(target)}) uses {', '.join(missing)}, which this "
            f"machine's processor lacks or hides: {_ELSEWHERE}"
        )


def missing_vectors(target: Target) -> list[str]:
    """Return what code for a target uses and this machine's processor lacks or hides."""
    flags, known = processor_flags(), CPU_FEATURES.get(architecture_of(target), {})
    if flags is None:
        return []
    wanted = _VECTORS & known.keys() & cpu_features_of(target)
    return sorted(name for name in wanted if known[name].flag not in flags)


def describe_target(target: Target) -> str:
    """Return a target on one line, e.g. ``"llvm, mcpu znver4, 2 cores"``."""
    attrs = dict(target.attrs)
    parts = [str(target.kind.name)]
    parts += [f"{key} {attrs[key]}" for key in ("mcpu", "arch") if key in attrs]
    if "num-cores" in attrs:
        count = int(attrs["num-cores"])
        parts.append(f"{count} core{'s' if count != 1 else ''}")
    if "max_shared_memory_per_block" in attrs:
        parts.append(f"{int(attrs['max_shared_memory_per_block']) // 1024} KiB shared memory")
    return ", ".join(parts)


def target_fields(target: Target) -> dict[str, Any]:
    """Return what a journal keeps of a target."""
    fields: dict[str, Any] = json.loads(str(target))
    return fields


def target_differences(before: Any, target: Target) -> list[str]:
    """Describe how a target differs from one that a journal has kept; none if it kept none."""
    now = target_fields(target)
    if not isinstance(before, dict):
        return []
    return [
        f"target's {name} {before.get(name, 'not set')}, here {now.get(name, 'not set')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def n_cores_of(target: Target) -> int | None:
    """Return a target's ``num-cores``, or None where it has none, as a GPU's."""
    return int(target.attrs.get("num-cores", 0)) or None


def n_threads_of(target: Target) -> int:
    """Return the threads of kernels: the target's cores, or those that this process may use."""
    return n_cores_of(target) or usable_physical_cores()


def farm_of(config: TuneConfig) -> RPCConfig | None:
    """Return where the devices are that a configuration measures on; None for this machine."""
    if config.runner not in FARM_RUNNERS:
        return None
    from tvm_adaptive.runner.rpc.runner import complete_config

    return complete_config(rpc_config_of(config.measure))


def environment_of(target: Target, config: TuneConfig) -> Environment:
    """Return the environment in which a configuration times kernels for a target."""
    return Environment.current(target, farm_of(config), config.measure.device_indices[0])


def rpc_config_of(measure: MeasureConfig) -> RPCConfig:
    """Return a tracker's address; TVM takes what is None from the environment."""
    if math.isinf(measure.timeout_sec):
        raise InvalidOptionError("timeout_sec must be finite: a device is leased for as long.")
    host, _, port = (measure.tracker or "").rpartition(":")
    return RPCConfig(
        tracker_host=host.strip("[]") or None,  # of an IPv6 address
        tracker_port=int(port) if port else None,
        tracker_key=measure.tracker_key,
        session_timeout_sec=math.ceil(measure.timeout_sec),
    )


def _gpu(device_index: int) -> Target:
    gpu = device("cuda", device_index)
    if not gpu.exist:
        raise InvalidOptionError(
            f'target "cuda" means NVIDIA GPU {device_index} of this machine, but TVM found none '
            f"(it asked the driver for device cuda:{device_index}). Check that nvidia-smi lists "
            "it, or, for devices behind a tracker (--tracker), name the GPU to compile for: "
            '{"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024, '
            '"max_shared_memory_per_block": 49152}.'
        )
    return Target.from_device(gpu)


def _parse(spec: Any, *, is_here: bool) -> Target:
    config = _as_config(spec)
    kinds = sorted(str(kind) for kind in Target.list_kinds())
    if isinstance(config, dict) and config.get("kind") not in kinds and "tag" not in config:
        raise InvalidOptionError(
            f"target kind must be one of {', '.join(kinds)} but got "
            f'{config.get("kind")!r}. On this machine, write target="cpu"; '
            f"otherwise e.g. {_EXAMPLE}."
        )
    is_llvm = isinstance(config, dict) and config.get("kind") == "llvm"
    if is_here and is_llvm and not _PROCESSOR_KEYS & {*config}:
        config["mcpu"] = str(llvm_get_system_cpu())
        # LLVM knows a processor by its model; a virtual machine may hide what that has.
        if hidden := missing_vectors(Target({"kind": "llvm", "mcpu": config["mcpu"]})):
            config["mattr"] = [f"-{name}" for name in hidden]
    try:
        target = Target(config)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].rstrip(".")
        raise InvalidOptionError(
            f"target {spec!r} is not one that TVM knows: {reason}. "
            f'Write "cpu", "cuda", or a mapping such as {_EXAMPLE}.'
        ) from error
    _check_processor(target)
    return target


def _as_config(spec: Any) -> Any:
    if isinstance(spec, Mapping):
        return dict(spec)
    if not isinstance(spec, str):
        raise InvalidOptionError(
            "target must be a string, a mapping or a Target but got "
            f'{type(spec).__name__}. Write e.g. target="cpu" or {_EXAMPLE}.'
        )
    text = spec.strip()
    if text.startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(
                f"target looks like JSON but cannot be read: {error}. Got {text!r}; "
                f"write e.g. {_EXAMPLE}."
            ) from error
    # A bare kind becomes a mapping, so that the same checks apply.
    return text if "/" in text else {"kind": text}
