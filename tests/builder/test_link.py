"""Libraries that the linker alone has made load, and compute what the others compute."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir.meta_schedule.builder import BuilderInput

from tvm_adaptive.builder import compile as compiling
from tvm_adaptive.builder.compile import build_candidate, link_shared
from tvm_adaptive.builder.persistent import PersistentBuilder

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 1})


def function(expression: Any, dtype: str, n: int = 16) -> tvm.IRModule:
    data = te.placeholder((n,), dtype)
    result = te.compute((n,), lambda i: expression(data[i]))
    return tvm.IRModule({"main": te.create_prim_func([data, result])})


# What is not in the object itself: the C library's functions, the runtime's own threads,
# and libgcc's conversions of half precision.
KERNELS = {
    "libm": (function(lambda x: te.power(te.erf(x), 3.0), "float32"), "float32"),
    "half": (
        function(lambda x: te.exp(x.astype("float32")).astype("float16"), "float16"),
        "float16",
    ),
    "double": (function(te.tanh, "float64"), "float64"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_linked_candidate_computes_what_an_archive_computes(name: str) -> None:
    mod, dtype = KERNELS[name]
    data = np.linspace(-1, 1, 16).astype(dtype)
    outputs = []
    for is_linked in (False, True):
        builder = PersistentBuilder(max_workers=1, link=is_linked)
        try:
            (result,) = builder.build([BuilderInput(mod, TARGET)])
            assert result.error_msg is None
            assert result.artifact_path.endswith(".so" if is_linked else ".tar")
            out = tvm.runtime.tensor(np.full(16, np.nan, dtype))
            tvm.runtime.load_module(result.artifact_path)["main"](tvm.runtime.tensor(data), out)
            outputs.append(out.numpy())
        finally:
            builder.close()
    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(*outputs)


def export_linked(path: Path) -> None:
    built = build_candidate(KERNELS["libm"][0], TARGET, None)
    built.export_library(str(path), fcompile=link_shared)


def test_the_linker_alone_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the driver is not needed")

    monkeypatch.setattr(compiling, "create_shared", refuse)
    path = tmp_path / "alone.so"
    export_linked(path)
    assert tvm.runtime.load_module(str(path))["main"] is not None


def test_without_a_linker_the_driver_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    path = tmp_path / "driver.so"
    export_linked(path)
    assert tvm.runtime.load_module(str(path))["main"] is not None


def test_sources_and_what_the_linker_refuses_go_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def driver(output: str, objects: list[str], options: Any = None) -> None:
        asked.append(objects)

    monkeypatch.setattr(compiling, "create_shared", driver)
    broken = tmp_path / "broken.o"
    broken.write_text("no object")
    link_shared(str(tmp_path / "a.so"), [str(tmp_path / "lib.c")])
    link_shared(str(tmp_path / "b.so"), str(broken))
    assert asked == [[str(tmp_path / "lib.c")], [str(broken)]]


def test_an_object_that_nobody_can_link_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.o"
    broken.write_text("no object")
    with pytest.raises((RuntimeError, subprocess.SubprocessError)):
        link_shared(str(tmp_path / "b.so"), [str(broken)])
