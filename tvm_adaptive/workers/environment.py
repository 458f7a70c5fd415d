"""Where times are taken: on another device, or with another TVM, a kernel takes another time."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm.versions import installed_version
from tvm_adaptive.workers.cores import usable_physical_cores

if TYPE_CHECKING:
    from tvm_adaptive._tvm import RPCConfig, Target

_CPUINFO = Path("/proc/cpuinfo")
# Virtual machines often hide the model's name ("AMD EPYC"); these numbers still tell
# generations apart. ARM has no name there, but the other ones.
_CPU_NUMBERS = (
    "cpu family",
    "model",
    "stepping",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "CPU revision",
)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where times were taken; empty texts are not known.

    Equal environments have comparable times. The version of this package takes no part in
    that: it changes which kernels are tried, not what one takes.
    """

    device: str = ""  # processor and number of cores, name of the GPU, or tracker key of a farm
    tvm: str = ""  # version of apache-tvm
    tvm_ffi: str = ""  # version of apache-tvm-ffi
    tvm_adaptive: str = dataclasses.field(default="", compare=False)  # version of this package

    @classmethod
    def current(cls, target: Target, farm: RPCConfig | None = None) -> Environment:
        """Return where kernels for a target are timed now."""
        return cls(
            device_name(target) if farm is None else f"tracker key {farm.tracker_key}",
            installed_version("apache-tvm") or "",
            installed_version("apache-tvm-ffi") or "",
            installed_version("tvm-adaptive") or "",
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Environment:
        """Return what :meth:`as_fields` made fields of.

        What is missing, or is no text, is not known. Other fields are passed over, so that
        the ``"run"`` event of a journal, which holds these fields, can be given as it is.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: value for name in names if isinstance(value := fields.get(name), str)})

    def as_fields(self) -> dict[str, str]:
        """Return what a journal's ``"run"`` event holds of it, as fields of the event."""
        return dataclasses.asdict(self)

    @property
    def is_known(self) -> bool:
        """Whether device and TVM are known; times of nowhere compare with nothing."""
        return bool(self.device and self.tvm)

    def compares_with(self, other: Environment) -> bool:
        """Say whether times of the one can be compared with times of the other."""
        return self.is_known and self == other

    def __str__(self) -> str:
        if not self.is_known:
            return "an unknown device"
        return f"{self.device}, TVM {self.tvm}"


# Of records that do not say where they were measured.
UNKNOWN = Environment()


def device_name(target: Target) -> str:
    """Return what this machine runs kernels of a target on."""
    kind = str(target.kind.name)
    if kind in ("llvm", "c"):
        # What a kernel may use; a schedule is made for so many.
        n_cores = int(target.attrs.get("num-cores", 0)) or usable_physical_cores()
        return f"{processor_name()}, {n_cores} cores"
    return _gpu_name(kind)


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's name with what else tells its generation."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    numbers = " ".join(facts[key] for key in _CPU_NUMBERS if facts.get(key))
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({numbers})" if numbers else name


def _gpu_name(kind: str) -> str:
    """Return the name of the first device of a kind; empty where the driver gives none."""
    from tvm_adaptive._tvm import device

    try:
        gpu = device(kind, 0)
        return str(gpu.device_name) if gpu.exist else ""
    except Exception:  # a kind without devices, or a driver that fails: TVM raises anything
        return ""
