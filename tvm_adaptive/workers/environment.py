"""The device and the versions that measured times depend on."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm.versions import installed_version
from tvm_adaptive.workers.cores import usable_physical_cores
from tvm_adaptive.workers.file_system import text_of

if TYPE_CHECKING:
    from tvm_adaptive._tvm import RPCConfig, Target

_CPUINFO = Path("/proc/cpuinfo")
# Virtual machines often hide the model's name ("AMD EPYC"); these numbers still
# distinguish generations. ARM has only numbers.
_X86_NUMBERS = ("cpu family", "model", "stepping")
_ARM_NUMBERS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment of measured times, comparable if equal; an empty text is unknown."""

    device: str = ""  # processor and number of cores, name of the GPU, or tracker key of a farm
    tvm: str = ""  # version of apache-tvm
    tvm_ffi: str = ""  # version of apache-tvm-ffi
    # version of this package, which changes what kernels are tried but not their times
    tvm_adaptive: str = dataclasses.field(default="", compare=False)

    @classmethod
    def current(
        cls, target: Target, farm: RPCConfig | None = None, device_index: int = 0
    ) -> Environment:
        """Return the environment in which kernels for a target are timed now."""
        return cls(
            device_name(target, device_index)
            if farm is None
            else f"tracker key {farm.tracker_key}",
            installed_version("apache-tvm") or "",
            installed_version("apache-tvm-ffi") or "",
            installed_version("tvm-adaptive") or "",
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Environment:
        """Return the environment in the fields of a journal's ``"run"`` event."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: value for name in names if isinstance(value := fields.get(name), str)})

    def as_fields(self) -> dict[str, str]:
        """Return the fields of a journal's ``"run"`` event."""
        return dataclasses.asdict(self)

    @property
    def is_known(self) -> bool:
        """Whether device and TVM are known."""
        return bool(self.device and self.tvm)

    def __str__(self) -> str:
        return f"{self.device}, TVM {self.tvm}" if self.is_known else "an unknown device"


# Of records without an environment.
UNKNOWN = Environment()


def device_name(target: Target, index: int = 0) -> str:
    """Return the device of this machine that runs kernels for a target."""
    kind = str(target.kind.name)
    if kind in ("llvm", "c"):
        n_usable = usable_physical_cores()
        n_cores = int(target.attrs.get("num-cores", 0)) or n_usable
        # Kernels with more threads than cores take longer.
        lacking = f", {n_usable} usable" if n_usable < n_cores else ""
        return f"{processor_name()}, {n_cores} cores{lacking}"
    return gpu_name(kind, index) or ""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's name and the numbers of its generation."""
    facts: dict[str, str] = {}
    for line in text_of(cpuinfo, "replace").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    numbers = " ".join(facts[key] for key in (*_X86_NUMBERS, *_ARM_NUMBERS) if facts.get(key))
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({numbers})" if numbers else name


def processor_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str] | None:
    """Return the instruction sets of this machine by Linux's names; None where it has no list."""
    for line in text_of(cpuinfo, "replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, Arm
            return frozenset(value.split())
    return None


def compiler_problem() -> str:
    """Return why nothing here links what TVM compiles; "" if something does."""
    from tvm_adaptive._tvm import get_cc

    compiler = get_cc()  # as TVM looks for it: CXX, CC, PATH
    if compiler is None:
        return "no C compiler"
    # TVM starts it as it is written, as one program without arguments.
    return "" if shutil.which(compiler) else f"no {compiler}, which CXX or CC names"


def gpu_name(kind: str, index: int) -> str | None:
    """Return a device's name, empty where the driver gives none; None without the device."""
    from tvm_adaptive._tvm import device

    try:
        gpu = device(kind, index)
        return str(gpu.device_name or "") if gpu.exist else None
    except Exception:  # TVM may raise anything: no such devices, or a driver fails
        return None
