from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tvm_adaptive._tvm import Target
from tvm_adaptive._tvm.runtime_files import architecture_of, cpu_features_of
from tvm_adaptive.values.cpu_features import CPU_FEATURES, needed_features
from tvm_adaptive.workers.environment import processor_flags

# Instruction sets for vectors and bits, by the beginnings of LLVM's names.
VECTORS = re.compile(r"(sse|ssse|avx|fma|f16c|bmi|lzcnt|popcnt|movbe|gfni|xop|amx-tile|egpr)")
# TVM's functions never need what only intrinsics reach; AVX10 stands for sets listed here.
LEFT_OUT = {"sse", "sse2", "avx10.1", "avx10.2", "avx512vp2intersect"}


@pytest.mark.parametrize("processor", ["x86-64-v4", "znver5", "sapphirerapids", "diamondrapids"])
def test_the_table_has_what_the_compiler_knows(processor):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": processor})
    allowed = cpu_features_of(target)
    vectors = {name for name in allowed if VECTORS.match(name)} - LEFT_OUT
    assert vectors <= CPU_FEATURES["x86_64"].keys()
    assert "avx512vl" in needed_features("x86_64", allowed, None)


def test_a_plain_processor_needs_nothing():
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"})
    assert needed_features(architecture_of(target), cpu_features_of(target), None) == {}


def test_what_is_hidden_here_is_not_needed():
    needed = needed_features("x86_64", {"avx2", "fma", "avx512f"}, {"avx2", "fma", "sse4_2"})
    assert list(needed) == ["fma", "avx2"]


def test_what_linux_does_not_list_is_needed_with_what_it_lists():
    vectors = {"avxifma", "avxvnniint8", "avxneconvert", "avxvnniint16", "egpr"}
    allowed = {*vectors, "amx-fp16"}
    elsewhere = needed_features("x86_64", allowed, None)
    assert elsewhere.keys() == allowed
    assert {each.flag for each in elsewhere.values()} == {""}
    assert needed_features("x86_64", allowed, {"avx2", ""}) == {}
    assert needed_features("x86_64", allowed, {"avx_vnni"}).keys() == vectors
    assert needed_features("x86_64", allowed, {"amx_tile"}).keys() == {"amx-fp16"}


def test_arm_has_its_own_table():
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"})
    assert architecture_of(target) == "aarch64"
    needed = needed_features("aarch64", cpu_features_of(target), None)
    assert needed.keys() == {"lse", "fullfp16", "rdm", "dotprod"}


def test_nothing_is_known_of_other_processors():
    assert needed_features("riscv64", {"v"}, None) == {}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", {"fpu", "avx2", "fma"}),
        ("processor : 0\nFeatures\t: fp asimd asimddp\n", {"fp", "asimd", "asimddp"}),
        ("processor : 0\n", None),
    ],
)
def test_flags_are_read_as_linux_lists_them(text, flags, tmp_path):
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_flags(tmp_path / "cpuinfo") == flags
    assert processor_flags(tmp_path / "none") is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_bits_are_those_of_the_compiler_s_header():
    """GCC's cpuid.h was not made here: it says at which bit of its register each name is."""
    command = ["cc", "-E", "-dM", "-include", "cpuid.h", "-x", "c", "/dev/null"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    bits = dict(re.findall(r"#define bit_(\w+)\s+\(1U? << (\d+)\)", found.stdout))
    if not bits:
        pytest.skip("this compiler has no such header")
    table = CPU_FEATURES["x86_64"]
    header = {name: bits.get(re.sub(r"[-.]", "_", name).upper()) for name in table}
    header["sse4a"] = bits["SSE4a"]
    known = {name: int(bit) for name, bit in header.items() if bit is not None}
    assert known == {name: table[name].bit for name in known}
    assert len(known) > len(table) / 2
