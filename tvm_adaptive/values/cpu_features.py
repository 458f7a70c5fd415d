"""Instruction sets that compiled code may use, and how a program finds out at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType

_EAX, _EBX, _ECX, _EDX = range(4)
# Registers that the operating system must save (XCR0): those of AVX; of AVX-512, which are
# added; the tiles of AMX; the additional general registers of APX.
_AVX, _AVX512, _AMX, _APX = 0x6, 0xE6, 0x60000, 0x80000
# Numbers of AT_HWCAP and AT_HWCAP2 in Linux.
_HWCAP, _HWCAP2 = 16, 26


@dataclasses.dataclass(frozen=True)
class CpuFeature:
    """An instruction set, and where a processor says that it has it.

    Attributes
    ----------
    flag : str
        As Linux names it in ``/proc/cpuinfo``, "" where Linux does not list it; LLVM's names
        are the keys of :data:`CPU_FEATURES`.
    leaf, subleaf : int
        Of the instruction CPUID on x86; on Arm, ``leaf`` is the number for ``getauxval``.
    register : int
        0 to 3 for EAX to EDX; 0 on Arm.
    bit : int
    xcr0 : int
        Mask of the registers that the operating system must save, x86 only.
    companion : str
        What Linux lists of all processors that have it, for one that it does not list.
    """

    flag: str
    leaf: int
    subleaf: int
    register: int
    bit: int
    xcr0: int = 0
    companion: str = ""


# What compilers use without being asked, for vectors and bits, and AMX, which schedules use.
# Other sets (AES, SHA, VP2INTERSECT, ...) take intrinsics that no schedule has.
# Source: Intel's Software Developer's Manual, volume 2A, CPUID; AMD's Architecture
# Programmer's Manual, volume 3, appendix E (leaf 0x80000001); the kernel's cpufeatures.h, in
# which only names in quotes are listed.
_X86_64 = {
    "sse3": CpuFeature("pni", 1, 0, _ECX, 0),
    "ssse3": CpuFeature("ssse3", 1, 0, _ECX, 9),
    "fma": CpuFeature("fma", 1, 0, _ECX, 12, _AVX),
    "sse4.1": CpuFeature("sse4_1", 1, 0, _ECX, 19),
    "sse4.2": CpuFeature("sse4_2", 1, 0, _ECX, 20),
    "movbe": CpuFeature("movbe", 1, 0, _ECX, 22),
    "popcnt": CpuFeature("popcnt", 1, 0, _ECX, 23),
    "avx": CpuFeature("avx", 1, 0, _ECX, 28, _AVX),
    "f16c": CpuFeature("f16c", 1, 0, _ECX, 29, _AVX),
    "bmi": CpuFeature("bmi1", 7, 0, _EBX, 3),
    "avx2": CpuFeature("avx2", 7, 0, _EBX, 5, _AVX),
    "bmi2": CpuFeature("bmi2", 7, 0, _EBX, 8),
    "avx512f": CpuFeature("avx512f", 7, 0, _EBX, 16, _AVX512),
    "avx512dq": CpuFeature("avx512dq", 7, 0, _EBX, 17, _AVX512),
    "avx512ifma": CpuFeature("avx512ifma", 7, 0, _EBX, 21, _AVX512),
    "avx512cd": CpuFeature("avx512cd", 7, 0, _EBX, 28, _AVX512),
    "avx512bw": CpuFeature("avx512bw", 7, 0, _EBX, 30, _AVX512),
    "avx512vl": CpuFeature("avx512vl", 7, 0, _EBX, 31, _AVX512),
    "avx512vbmi": CpuFeature("avx512vbmi", 7, 0, _ECX, 1, _AVX512),
    "avx512vbmi2": CpuFeature("avx512_vbmi2", 7, 0, _ECX, 6, _AVX512),
    "gfni": CpuFeature("gfni", 7, 0, _ECX, 8),
    "avx512vnni": CpuFeature("avx512_vnni", 7, 0, _ECX, 11, _AVX512),
    "avx512bitalg": CpuFeature("avx512_bitalg", 7, 0, _ECX, 12, _AVX512),
    "avx512vpopcntdq": CpuFeature("avx512_vpopcntdq", 7, 0, _ECX, 14, _AVX512),
    "amx-bf16": CpuFeature("amx_bf16", 7, 0, _EDX, 22, _AMX),
    "avx512fp16": CpuFeature("avx512_fp16", 7, 0, _EDX, 23, _AVX512),
    "amx-tile": CpuFeature("amx_tile", 7, 0, _EDX, 24, _AMX),
    "amx-int8": CpuFeature("amx_int8", 7, 0, _EDX, 25, _AMX),
    "avxvnni": CpuFeature("avx_vnni", 7, 1, _EAX, 4, _AVX),
    "avx512bf16": CpuFeature("avx512_bf16", 7, 1, _EAX, 5, _AVX512),
    "amx-fp16": CpuFeature("", 7, 1, _EAX, 21, _AMX, "amx_tile"),
    "avxifma": CpuFeature("", 7, 1, _EAX, 23, _AVX, "avx_vnni"),
    "avxvnniint8": CpuFeature("", 7, 1, _EDX, 4, _AVX, "avx_vnni"),
    "avxneconvert": CpuFeature("", 7, 1, _EDX, 5, _AVX, "avx_vnni"),
    "avxvnniint16": CpuFeature("", 7, 1, _EDX, 10, _AVX, "avx_vnni"),
    "egpr": CpuFeature("", 7, 1, _EDX, 21, _APX, "avx_vnni"),
    "lzcnt": CpuFeature("abm", 0x80000001, 0, _ECX, 5),
    "sse4a": CpuFeature("sse4a", 0x80000001, 0, _ECX, 6),
    "xop": CpuFeature("xop", 0x80000001, 0, _ECX, 11, _AVX),
    "fma4": CpuFeature("fma4", 0x80000001, 0, _ECX, 16, _AVX),
    "tbm": CpuFeature("tbm", 0x80000001, 0, _ECX, 21),
}
# Source: the kernel's Documentation/arch/arm64/elf_hwcaps.rst and uapi/asm/hwcap.h.
_AARCH64 = {
    "lse": CpuFeature("atomics", _HWCAP, 0, 0, 8),
    "fullfp16": CpuFeature("asimdhp", _HWCAP, 0, 0, 10),
    "rdm": CpuFeature("asimdrdm", _HWCAP, 0, 0, 12),
    "jsconv": CpuFeature("jscvt", _HWCAP, 0, 0, 13),
    "complxnum": CpuFeature("fcma", _HWCAP, 0, 0, 14),
    "dotprod": CpuFeature("asimddp", _HWCAP, 0, 0, 20),
    "sve": CpuFeature("sve", _HWCAP, 0, 0, 22),
    "fp16fml": CpuFeature("asimdfhm", _HWCAP, 0, 0, 23),
    "sve2": CpuFeature("sve2", _HWCAP2, 0, 0, 1),
    "i8mm": CpuFeature("i8mm", _HWCAP2, 0, 0, 13),
    "bf16": CpuFeature("bf16", _HWCAP2, 0, 0, 14),
}
# By architecture, then by LLVM's name.
CPU_FEATURES: Mapping[str, Mapping[str, CpuFeature]] = MappingProxyType(
    {"x86_64": MappingProxyType(_X86_64), "aarch64": MappingProxyType(_AARCH64)}
)


def needed_features(
    architecture: str, allowed: Collection[str], here: Collection[str] | None
) -> dict[str, CpuFeature]:
    """Return the instruction sets, by LLVM's names, that a library needs of those it may use."""
    known = CPU_FEATURES.get(architecture, {})
    # Virtual machines hide some of what the compiler expects of their processor: what one lacks
    # on which the library has run (``here``, its flags) is not needed.
    return {
        name: feature
        for name, feature in known.items()
        if name in allowed and (here is None or (feature.flag or feature.companion) in here)
    }
