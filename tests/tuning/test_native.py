"""What is deployed runs where there is no Python, and computes what ONNX Runtime computes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tuning.observers import Notes
from tests.tuning.runs import QUICK
from tvm_adaptive import tune
from tvm_adaptive._tvm import Target
from tvm_adaptive._tvm.runtime_files import architecture_of, header_folder
from tvm_adaptive.models import Network, compile_network, export, prepare
from tvm_adaptive.models.frontend import ModelReader, load
from tvm_adaptive.tuning import deploy
from tvm_adaptive.tuning.deploy import apply
from tvm_adaptive.tuning.manifest import Interface, TensorInfo
from tvm_adaptive.tuning.native import _TEMPLATES, identifier_of, is_supported, model_header
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.cpu_features import CPU_FEATURES
from tvm_adaptive.workers.environment import processor_flags

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
HOST = Target({"kind": "llvm", "num-cores": 3})
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
# Of any program for Linux and of C++, as a bare Debian has them; ldd names the first two.
SYSTEM = {
    *("linux-vdso.so.1", "statically linked", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1"),
    "libstdc++.so.6",
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def compile_example(folder: Path) -> None:
    """Run the command at the head of the example."""
    text = (folder / "example.c").read_text().split("*/", 1)[0]
    (command,) = re.findall(r"^ \*   (cc .*\\)\n \*     (.*)$", text, re.MULTILINE)
    line = " ".join(command).replace("\\", "").replace("cc ", f"cc {' '.join(STRICT[1:])} ", 1)
    done = run("sh", "-c", line, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_names_in_c_are_names():
    assert identifier_of("cls.so") == "cls_model"
    assert identifier_of("perceptron-make.so") == "perceptron_make_model"
    assert identifier_of("3d.net.so") == "n3d_net_model"
    assert identifier_of("tvm_adaptive.so") == "ntvm_adaptive_model"  # the interface's own type


@pytest.mark.parametrize(
    ("triple", "condition"),
    [
        ("x86_64-linux-gnu", "defined(__x86_64__)"),
        ("aarch64-linux-gnu", "defined(__aarch64__)"),
        ("armv7l-linux-gnueabihf", "defined(__arm__)"),
        ("riscv64-linux-gnu", "defined(__riscv)"),
        ("powerpc64le-linux-gnu", "defined(__powerpc64__)"),
        ("s390x-linux-gnu", "1"),
    ],
)
def test_a_description_knows_its_architecture(triple, condition):
    target = Target({"kind": "llvm", "mtriple": triple, "num-cores": 4})
    assert f"#if !({condition})\n" in model_header("net.so", target, Interface(), {}, 1)


def test_a_description_compiles_in_c_and_cpp(tmp_path):
    interface = Interface(
        (TensorInfo("a", (), "bool"), TensorInfo('"\\ué??/*\n', (2, 3), "float16")),
        (TensorInfo("b", (0, 4), "int64"),),
    )
    architecture = architecture_of(HOST)
    features = CPU_FEATURES[architecture]
    (tmp_path / "net_model.h").write_text(model_header("net.so", HOST, interface, features, 3))
    (tmp_path / "plain_model.h").write_text(model_header("plain.so", HOST, Interface(), {}, 1))
    program = """
#include <stdio.h>
#include "net_model.h"
#include "plain_model.h"
int main(void) {
  const tvm_adaptive_description *all[] = {&net_model, &plain_model};
  for (int i = 0; i < 2; ++i)
    printf("%d %d %d\\n", all[i]->n_inputs, all[i]->n_threads, all[i]->n_cpu_features);
  printf("%d %zu %s", net_model.inputs[0].n_dims, net_model.inputs[1].n_bytes,
         net_model.inputs[1].name);
  return 0;
}
"""
    for compiler, name in ((["cc", *STRICT], "main.c"), (["c++", "-std=c++17"], "main.cc")):
        if shutil.which(compiler[0]) is None:
            continue
        (tmp_path / name).write_text(program)
        done = run(*compiler, f"-I{_TEMPLATES}", name, "-o", "main", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said = run("./main", cwd=tmp_path).stdout
        assert said == f'2 3 {len(features)}\n0 1 0\n0 12 "\\ué??/*\n'


def test_outputs_of_unknown_size_are_not_for_c():
    known = TensorInfo("a", (1, 2), "float32")
    assert is_supported(Interface((known,), (known,)))
    assert not is_supported(Interface((known,), None))
    assert not is_supported(Interface((known,), (TensorInfo("b", ("n", 2), "float32"),)))
    assert not is_supported(Interface((known,), (TensorInfo("b", (2,), "handle"),)))


def test_the_loader_finds_what_linux_finds_in_this_processor(tmp_path):
    """Linux lists the processor's instruction sets; the loader asks the processor itself."""
    architecture = architecture_of(HOST)
    table, flags = CPU_FEATURES.get(architecture, {}), processor_flags()
    if not table or not flags:
        pytest.skip("nothing is known of this processor")
    (tmp_path / "all_model.h").write_text(model_header("all.so", HOST, Interface(), table, 1))
    program = """
#include "tvm_adaptive.c"
#include "all_model.h"
int main(void) {
  tvm_adaptive_cpu_feature unsaved = all_model_cpu_features[0];
  unsaved.xcr0 = 1u << 31; /* registers of no processor */
  for (int i = 0; i < all_model.n_cpu_features; ++i)
    if (has_feature(&all_model_cpu_features[i])) puts(all_model_cpu_features[i].name);
  if (has_feature(&unsaved)) puts("unsaved");
  tvm_adaptive_load(&all_model, "./all.so", 0);
  puts(tvm_adaptive_error());
  return 0;
}
"""
    (tmp_path / "main.c").write_text(program)
    lib = header_folder().parent / "lib"
    options = [f"-I{_TEMPLATES}", f"-I{header_folder()}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    done = run("cc", *STRICT, "main.c", *options, "-ltvm_ffi", "-o", "main", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *said, error = run("./main", cwd=tmp_path).stdout.splitlines()
    unlisted = {name for name, each in table.items() if not each.flag}
    assert set(said) - unlisted == {name for name, each in table.items() if each.flag in flags}
    missing = set(table) - set(said)
    assert error.startswith("all.so cannot run on this processor, which lacks ")
    assert set(error.split("lacks ")[1].split(";")[0].split()) == missing


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="no cross compiler")
def test_the_loader_compiles_for_arm(tmp_path):
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 4})
    header = model_header("net.so", target, Interface(), CPU_FEATURES["aarch64"], 4)
    (tmp_path / "net_model.h").write_text(header)
    (tmp_path / "main.c").write_text('#include "tvm_adaptive.c"\n#include "net_model.h"\n')
    options = [f"-I{_TEMPLATES}", f"-I{header_folder()}", "-Wno-unused-variable", "-c"]
    done = run("aarch64-linux-gnu-gcc", *STRICT, *options, "main.c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def write_model(path: Path) -> None:
    """Write a classifier with two inputs, and three outputs of two types, one of them sorted."""
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    floats, ints = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    weights = {
        "kernel": rng.standard_normal((16, 3, 3, 3)).astype(np.float32),
        "matrix": rng.standard_normal((16, 10)).astype(np.float32),
        "count": np.array([3]),
    }
    nodes = [
        node("Conv", ["image", "kernel"], ["convolved"], pads=[1, 1, 1, 1]),
        node("Relu", ["convolved"], ["positive"]),
        node("GlobalAveragePool", ["positive"], ["pooled"]),
        node("Flatten", ["pooled"], ["flat"]),
        node("MatMul", ["flat", "matrix"], ["product"]),
        node("Add", ["product", "shift"], ["scores/all"]),
        node("TopK", ["scores/all", "count"], ["best", "places"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "classifier",
        [info("image", floats, [1, 3, 32, 32]), info("shift", floats, [1, 10])],
        [
            info("scores/all", floats, [1, 10]),
            info("best", floats, [1, 3]),
            info("places", ints, [1, 3]),
        ],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A folder with a compiled example, and the model that it was made from."""
    folder = tmp_path_factory.mktemp("native")
    write_model(folder / "net.onnx")
    tune(str(folder / "net.onnx"), work_dir=folder / "run", trials=8, seed=1, config=QUICK)
    applied = apply(str(folder / "run"), out_dir=folder / "deploy")
    assert applied.comparison is not None
    assert applied.comparison.agree
    compile_example(folder / "deploy")
    return folder / "deploy"


def test_networks_that_call_python_get_no_c_program(tmp_path):
    onnx = pytest.importorskip("onnx")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    floats = onnx.TensorProto.FLOAT
    weights = {
        "matrix": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32),
        "axes": np.array([1]),
    }
    graph = onnx.helper.make_graph(
        [
            node("MatMul", ["x", "matrix"], ["product"]),
            node("NonZero", ["product"], ["places"]),
            node("Cast", ["places"], ["numbers"], to=floats),
            node("ReduceSum", ["numbers", "axes"], ["sums"], keepdims=0),
        ],
        "places",
        [info("x", floats, [4, 4])],
        [info("sums", floats, [2])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    with contextlib.closing(ModelReader()) as reader:
        network = load(str(tmp_path / "net.onnx"), reader=reader)
    assert isinstance(network, Network)
    target, folder, observer = resolve_target("cpu"), tmp_path / "deploy", Notes()
    folder.mkdir()
    compiled = compile_network(prepare(network, target), None, target)
    export(compiled, folder / "net.so")
    context: Any = SimpleNamespace(target=target, farm=None, work_dir=folder, observer=observer)
    check: Any = SimpleNamespace(coverage="", covered=compiled.coverage, shortfall="")
    applied = deploy._written(context, network, check, folder / "net.so", None)
    assert [path.name for path in applied.examples] == ["example.py"]
    assert not list(folder.glob("*.[ch]*"))
    (note,) = [each for each in observer.notes if each.startswith("no C program is written: ")]
    assert note.endswith("has in Python only: relax.run.nonzero")


def write_inputs(folder: Path) -> list[np.ndarray]:
    """Write inputs to files beside the example; return ONNX Runtime's outputs."""
    import onnxruntime

    rng = np.random.default_rng(7)
    image = rng.standard_normal((1, 3, 32, 32)).astype(np.float32)
    shift = rng.standard_normal((1, 10)).astype(np.float32)
    image.tofile(folder / "image.bin")
    shift.tofile(folder / "shift.bin")
    model = str(folder.parent / "net.onnx")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"image": image, "shift": shift}))


def assert_written(folder: Path, expected: list[np.ndarray]) -> None:
    for place, value in enumerate(expected):
        written = np.fromfile(folder / f"output_{place}.bin", value.dtype)
        np.testing.assert_allclose(written.reshape(value.shape), value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_folder_has_all_that_it_needs_of_tvm(deployed):
    manifest = json.loads((deployed / "manifest.json").read_text())
    # Sorting is in a library of its own.
    libraries = ["libtvm_runtime.so", "libtvm_runtime_extra.so", "libtvm_ffi.so"]
    assert manifest["runtime_libraries"] == libraries
    for name in (*libraries, "example", manifest["library"]):
        for line in run("ldd", f"./{name}", cwd=deployed).stdout.splitlines():
            needed, _, found = line.strip().partition(" => ")
            library = Path(needed.split(" (")[0]).name
            assert library in SYSTEM or f"{deployed}/" in found, line
    assert [each["name"] for each in manifest["inputs"]] == ["image", "shift"]
    assert [(each["name"], each["dtype"]) for each in manifest["outputs"]] == [
        *(("scores/all", "float32"), ("best", "float32"), ("places", "int64"))
    ]


@pytest.mark.slow
def test_where_there_is_no_python_outputs_are_those_of_onnx_runtime(deployed, tmp_path):
    """A root with the system's libraries alone: no shell, no Python, nothing of this machine."""
    root = tmp_path / "root"
    alone = ["unshare", "-r", "-m", "-p", "-f", "-R", str(root), "--mount-proc=/proc"]
    (root / "proc").mkdir(parents=True)
    listed = run("ldd", "./example", cwd=deployed).stdout
    for path in map(Path, re.findall(r"(/\S+) \(0x", listed)):
        if deployed not in path.parents:
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
    expected = write_inputs(deployed)
    shutil.copytree(deployed, root / "deploy", ignore=shutil.ignore_patterns("*.py", "output_*"))
    assert not [path for path in root.rglob("*") if "python" in path.name]
    if shutil.which("unshare") is None or run("unshare", "-rmpf", "true", cwd=root).returncode:
        pytest.skip("the kernel allows no namespaces to this user")
    command = ["-w", "/deploy", "./example", "image.bin", "shift.bin"]
    done = run(*alone, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scores/all float32 1 10" in done.stdout
    assert_written(root / "deploy", expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_cmake_builds_both_examples_and_the_folder_can_be_moved(deployed, tmp_path):
    (tmp_path / "first").mkdir()
    folder = tmp_path / "first" / "deploy"
    shutil.copytree(deployed, folder, ignore=shutil.ignore_patterns("example", "output_*"))
    for command in (["cmake", "-B", "build"], ["cmake", "--build", "build"]):
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    expected = write_inputs(deployed)
    for name in ("image.bin", "shift.bin"):
        shutil.copy(deployed / name, folder)
    moved = (tmp_path / "first").rename(tmp_path / "second") / "deploy"
    done = run("./example", "image.bin", "shift.bin", cwd=moved)
    assert done.returncode == 0, done.stderr
    assert_written(moved, expected)
    said = run("./example_cc", cwd=moved)
    assert said.stdout == "scores/all 40 bytes\nbest 12 bytes\nplaces 24 bytes\n", said.stderr


@pytest.mark.slow
def test_failures_have_a_text_and_free_what_was_made(deployed, tmp_path):
    """Checked for leaks and bad accesses by the compiler's sanitizers, where it has them."""
    program = """
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "net_model.h"
int main(void) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  static float image[3 * 32 * 32 + 1], shift[10], scores[10], best[3];
  static int64_t places[3];
  const void *inputs[] = {(char *)image + 1, shift}; /* of no alignment */
  void *outputs[] = {scores, best, places};
  tvm_adaptive_free(NULL);
  if (tvm_adaptive_load(&net_model, "./none.so", 1) != NULL) return 1;
  puts(tvm_adaptive_error());
  if (tvm_adaptive_load(&net_model, "./libtvm_ffi.so", 1) != NULL) return 2;
  puts(tvm_adaptive_error());
  tvm_adaptive_description fewer = net_model;
  fewer.n_outputs = 1;
  tvm_adaptive_model *other = tvm_adaptive_load(&fewer, "./net.so", 0);
  if (other == NULL || tvm_adaptive_run(other, inputs, outputs) == 0) return 3;
  puts(tvm_adaptive_error());
  tvm_adaptive_free(other);
  tvm_adaptive_model *first = tvm_adaptive_load(&net_model, "./net.so", 0);
  other = tvm_adaptive_load(&net_model, "./net.so", 0);
  if (first == NULL || other == NULL) return 9;
  tvm_adaptive_free(other); /* Nothing of it has run: the first one's kernels look up TopK now. */
  if (tvm_adaptive_run(first, inputs, outputs) != 0) return 10;
  if (rename("other.so", "net.so") != 0) return 11;
  if (tvm_adaptive_load(&net_model, "./net.so", 0) != NULL) return 12;
  puts(tvm_adaptive_error());
  tvm_adaptive_free(first);
  other = tvm_adaptive_load(&net_model, "net.so", 0); /* of this folder, without a slash */
  if (other == NULL || tvm_adaptive_run(other, inputs, outputs) != 0) return 13;
  tvm_adaptive_free(other);
  for (int round = 0; round < 3; ++round) {
    tvm_adaptive_model *model = tvm_adaptive_load(&net_model, "./net.so", 0);
    if (model == NULL) return 4;
    for (int i = 0; i < 3; ++i)
      if (tvm_adaptive_run(model, inputs, outputs) != 0) return 5;
    printf("%d threads\\n", tvm_adaptive_n_threads(model));
    tvm_adaptive_free(model);
  }
  sched_getaffinity(0, sizeof after, &after);
  if (!CPU_EQUAL(&before, &after)) return 6;
  fflush(stdout);
  if (fork() == 0) {
    if (tvm_adaptive_load(&net_model, "./net.so", 0) != NULL) _exit(1);
    puts(tvm_adaptive_error());
    fflush(stdout);
    _exit(0);
  }
  wait(NULL);
  return 0;
}
"""
    (deployed / "failures.c").write_text(program)
    shutil.copyfile(deployed / "net.so", deployed / "other.so")
    options = ["-Iinclude", "failures.c", "tvm_adaptive.c", "-o", "failures", "-L.", "-g"]
    options += ["-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_runtime_extra", "-ltvm_ffi"]
    options += ["-Wl,-rpath,$ORIGIN", "-fsanitize=address,undefined"]
    done = run("cc", *STRICT, *options, cwd=deployed)
    if done.returncode != 0 and "sanitize" not in done.stderr and "asan" not in done.stderr:
        pytest.fail(done.stderr)
    if done.returncode != 0:
        pytest.skip("this compiler has no sanitizers")
    done = run("./failures", cwd=deployed)
    assert done.returncode == 0, done.stdout + done.stderr
    none, wrong, fewer, replaced, *threads, forked = done.stdout.strip().splitlines()
    assert none == "./none.so: No such file or directory"
    assert replaced.startswith("./net.so was replaced while a network of it is loaded")
    assert "has no function vm_load_executable" in wrong
    assert fewer == "The library has 3 outputs instead of 1"
    # The first call in a thread decides.
    assert threads == ["1 threads"] * 3
    assert forked.startswith("This process was forked from one that had loaded a network")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.skipif(architecture_of(HOST) != "x86_64", reason="needs a library for x86")
def test_a_processor_without_the_instructions_is_refused_before_anything_runs(deployed):
    done = run("qemu-x86_64", "-cpu", "Nehalem", "./example", cwd=deployed)
    assert done.returncode == 1  # a signal would be negative
    (line,) = [line for line in done.stderr.splitlines() if "TCG" not in line]
    assert line.startswith("net.so cannot run on this processor, which lacks ")
    assert " avx2 " in line
