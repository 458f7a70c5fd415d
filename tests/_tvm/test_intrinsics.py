"""Only the target's own tensor intrinsics are imported; nothing is missing for it."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tvm_adaptive._tvm import intrinsics
from tvm_adaptive._tvm.intrinsics import backends_for, only_intrinsics


@pytest.mark.parametrize(
    ("kind", "triple", "expected"),
    [
        ("llvm", "x86_64-pc-linux-gnu", ("x86",)),
        ("llvm", "aarch64-linux-gnu", ("dot_product_common", "arm_cpu")),
        ("llvm", "riscv64-unknown-linux-gnu", ("riscv_cpu",)),
        ("llvm", "armv7l-linux-gnueabihf", None),
        ("cuda", None, ("dot_product_common", "cuda")),
        ("rocm", None, None),
        ("vulkan", None, None),
    ],
)
def test_a_target_gets_the_intrinsics_of_its_architecture(
    kind: str, triple: str | None, expected: tuple[str, ...] | None
) -> None:
    assert backends_for(kind, triple) == expected


@pytest.mark.parametrize("triple", [None, ""])
def test_without_a_triple_the_machine_itself_is_meant(
    triple: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert backends_for("llvm", triple) == ("x86",)
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert backends_for("llvm", triple) is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A package whose modules say that they were imported."""
    folder = tmp_path / "fake_intrinsics"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import one, two\n")
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text("import builtins; builtins.imported.append(__name__)\n")
    seen: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.imported", seen, raising=False)
    monkeypatch.setattr(intrinsics, "PACKAGE", "fake_intrinsics")
    for name in ("fake_intrinsics", "fake_intrinsics.one", "fake_intrinsics.two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return types.SimpleNamespace(seen=seen)


def test_meanwhile_the_package_brings_just_these(package: types.SimpleNamespace) -> None:
    with only_intrinsics(("one",)):
        importlib.import_module("fake_intrinsics")
    assert package.seen == ["fake_intrinsics.one"]


def test_a_later_import_brings_the_rest_once(package: types.SimpleNamespace) -> None:
    with only_intrinsics(("one",)):
        pass
    whole = importlib.import_module("fake_intrinsics")
    assert package.seen == ["fake_intrinsics.one", "fake_intrinsics.two"]
    assert whole.one.__name__ == "fake_intrinsics.one"
    assert whole.__file__ is not None


def test_none_and_what_is_missing_leave_it_as_it_is(package: types.SimpleNamespace) -> None:
    with only_intrinsics(None):
        assert "fake_intrinsics" not in sys.modules
    with only_intrinsics(("gone",)):
        importlib.import_module("fake_intrinsics")
    assert package.seen == ["fake_intrinsics.one", "fake_intrinsics.two"]


def test_what_is_imported_already_stays(package: types.SimpleNamespace) -> None:
    whole = importlib.import_module("fake_intrinsics")
    with only_intrinsics(("one",)):
        assert importlib.import_module("fake_intrinsics") is whole
    assert sys.modules["fake_intrinsics"] is whole


def test_an_error_inside_takes_the_stand_in_away(package: types.SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="inside"), only_intrinsics(("one",)):
        raise RuntimeError("inside")
    assert "fake_intrinsics" not in sys.modules


def test_ctrl_c_does_not_cut_an_import_off(package: types.SimpleNamespace, tmp_path: Path) -> None:
    """TVM registers nothing twice: a half import would be the end of all later ones."""
    half = "import builtins, os, signal, time\nbuiltins.imported.append('half')\n"
    interrupted = "time.sleep(0.2)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\n"
    rest = "builtins.imported.append('rest')\n"
    (tmp_path / "fake_intrinsics" / "one.py").write_text(half + interrupted + rest)
    # Where tests run in the background, interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), only_intrinsics(("one",)):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert package.seen == ["half", "rest"]
    assert "fake_intrinsics" not in sys.modules
    with only_intrinsics(("one",)):
        importlib.import_module("fake_intrinsics.one")
    assert package.seen == ["half", "rest"]


CONTEXTS = """
import sys
from tvm_adaptive._tvm import EvolutionarySearch, Target, contexts_of, functions_as_tasks
from tvm.s_tir import TensorIntrin
from tvm import IRModule, te

data, weight = te.placeholder((64, 64), "uint8"), te.placeholder((64, 64), "int8")
k = te.reduce_axis((0, 64))
product = lambda i, j: te.sum(data[i, k].astype("int32") * weight[j, k].astype("int32"), axis=k)
result = te.compute((64, 64), product)
mod = IRModule({"main": te.create_prim_func([data, weight, result])})
target = Target(
    {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "cascadelake", "num-cores": 2}
)
tasks = functions_as_tasks(mod, target)
(context,) = contexts_of(tasks, sys.argv[1], EvolutionarySearch(), 0, reductions=True)
assert "tvm.s_tir.tensor_intrin" not in sys.modules
assert TensorIntrin.get("dot_16x4_vnni") is not None
spaces = context.generate_design_space()
assert any("dot_16x4_vnni" in str(space.trace) for space in spaces), "nothing is tensorized"
"""


@pytest.mark.slow
def test_a_task_that_is_tensorized_has_its_intrinsics(tmp_path: Path) -> None:
    run_alone(CONTEXTS, tmp_path)


@pytest.mark.slow
def test_all_the_others_can_still_be_imported(tmp_path: Path) -> None:
    more = """
import tvm.s_tir.tensor_intrin
assert TensorIntrin.get("wmma_sync_16x16x16_f16f16f32") is not None
assert tvm.s_tir.tensor_intrin.x86.VNNI_DOT_16x4_INTRIN == "dot_16x4_vnni"
"""
    run_alone(CONTEXTS + more, tmp_path)


def run_alone(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
