"""Damaged and hostile model files: each costs a message, none the tuner."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import sys
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tvm.ir import save_json
from tvm.relax.transform import BindParams

from tvm_adaptive._tvm import IRModule, relax, structural_hash
from tvm_adaptive._tvm.onnx_frontend import onnx_converters, relax_of_onnx
from tvm_adaptive.errors import InvalidOptionError, MachineError, WorkerError
from tvm_adaptive.models import transformer
from tvm_adaptive.models.frontend import load
from tvm_adaptive.models.frontend.onnx_file import ONNX
from tvm_adaptive.models.frontend.reader import FileFormat, ModelReader, limits_of
from tvm_adaptive.models.weights import MODULE_FILE, load_weighted_module, save_module

READER = "tvm_adaptive.models.frontend.reader"
# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def model_file(request: Any, tmp_path: Path) -> Path:
    """Write a small model of each kind."""
    kind: str = request.param
    path = tmp_path / f"net{kind}"
    if kind == ".onnx":
        onnx = pytest.importorskip("onnx")
        models = request.getfixturevalue("onnx_models")
        onnx.save(models["resnet"](onnx), str(path))
    elif kind == ".pt2":
        torch = request.getfixturevalue("torch")
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        torch.export.save(torch.export.export(module, (torch.ones(2, 8),)), str(path))
    else:
        network = transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
        weights = {name: value.numpy() for name, value in network.params.items()}
        path.write_text(save_json(BindParams("main", weights)(network.mod)))
    return path


def refusal_of(path: Path) -> str:
    """Return why a file cannot be used; empty if it can."""
    try:
        load(str(path))
    except InvalidOptionError as error:
        return str(error)
    return ""


def check_damage(path: Path, n: int, seed: int) -> None:
    """Cut and change a file at random places; each is read, or refused in one line."""
    rng = np.random.default_rng(seed)
    whole = path.read_bytes()
    for number in range(2 * n):
        damaged = bytearray(whole)
        if number % 2:
            damaged = damaged[: int(rng.integers(len(whole)))]
        else:
            damaged[int(rng.integers(len(whole)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        refusal = refusal_of(path)
        assert refusal.isprintable()
        assert len(refusal.splitlines()) <= 1


KINDS = pytest.mark.parametrize("model_file", [".onnx", ".pt2", ".json"], indirect=True)


@KINDS
def test_damage_costs_a_line(model_file: Path) -> None:
    check_damage(model_file, 4, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@KINDS
def test_much_damage_costs_a_line_each(model_file: Path) -> None:
    check_damage(model_file, 30, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_much_damage_to_published_models(name: str, onnx: Any, tmp_path: Path) -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    source = folder / f"light_{name}.onnx"
    if not source.is_file():
        pytest.skip("this version of onnx comes without models")
    path = tmp_path / "net.onnx"
    path.write_bytes(source.read_bytes())
    check_damage(path, 30, seed=2)


def graph_file(onnx: Any, path: Path, nodes: list[Any], weights: dict[str, Any]) -> Path:
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        nodes,
        "net",
        [make.make_tensor_value_info("x", kind, [4])],
        [make.make_tensor_value_info("y", kind, [4])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(path))
    return path


def test_a_small_file_of_huge_constants_is_refused(onnx: Any, tmp_path: Path) -> None:
    node = onnx.helper.make_node
    nodes = [
        node("ConstantOfShape", ["shape"], ["c"]),
        node("ReduceSum", ["c"], ["r"], keepdims=0),
        node("Add", ["x", "r"], ["y"]),
    ]
    shape = np.array([100, 1000, 1000, 1000])
    path = graph_file(onnx, tmp_path / "net.onnx", nodes, {"shape": shape})
    with pytest.raises(InvalidOptionError, match=r"needs more than .* GiB of memory"):
        load(str(path))


def test_constants_are_computed_when_a_file_is_read(onnx: Any, tmp_path: Path) -> None:
    node = onnx.helper.make_node
    nodes = [node("Exp", ["w"], ["e"]), node("Add", ["x", "e"], ["y"])]
    path = graph_file(onnx, tmp_path / "net.onnx", nodes, {"w": np.zeros(4, "float32")})
    network: Any = load(str(path))
    (block,) = network.mod["main"].body.blocks
    assert [str(each.value.op.name) for each in block.bindings if hasattr(each.value, "op")] == [
        "relax.add"
    ]


def named_by_its_file(path: Path, shapes: Any) -> IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var(path.read_text(), relax.TensorType(ndim=2, dtype="float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    return builder.get()


def refuse(path: Path, shapes: Any) -> IRModule:
    raise InvalidOptionError(f"{path} is odd: {path.read_text()}")


@pytest.mark.parametrize("read", [named_by_its_file, refuse])
def test_a_refusal_is_printable_and_one_line(
    read: Any, shared_reader: ModelReader, tmp_path: Path
) -> None:
    path = tmp_path / "net.bin"
    path.write_text("\x08\x1b[31mred\n\u2028\u202eé")
    with pytest.raises(InvalidOptionError) as caught:
        shared_reader.read(FileFormat(read, "is odd"), path, "net", {})
    assert r"\x08\x1b[31mred\n\u2028\u202eé" in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_names_in_an_onnx_file_are_printable(onnx: Any, tmp_path: Path) -> None:
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    name = "\x08\x07\x12\x04\n\x02"
    graph = make.make_graph(
        [make.make_node("Relu", [name], ["y"])],
        "net",
        [make.make_tensor_value_info(name, kind, None)],
        [make.make_tensor_value_info("y", kind, None)],
    )
    path = tmp_path / "net.onnx"
    onnx.save(make.make_model(graph), str(path))
    assert refusal_of(path)
    assert refusal_of(path).isprintable()


def crash(path: Path, shapes: Any) -> IRModule:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def hang(path: Path, shapes: Any) -> IRModule:
    time.sleep(1000.0)
    raise AssertionError("unreachable")


def test_a_reader_that_crashes_or_hangs_is_a_message(
    shared_reader: ModelReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.bin"
    path.write_bytes(b"x")
    with pytest.raises(InvalidOptionError, match=r"net.bin is odd: .* killed by SIGSEGV"):
        shared_reader.read(FileFormat(crash, "is odd"), path, "net", {})
    monkeypatch.setattr(f"{READER}._READ_SEC", 0.5)
    with pytest.raises(InvalidOptionError, match=r"Reading .*net.bin took longer than"):
        shared_reader.read(FileFormat(hang, "is odd"), path, "net", {})


def fill_the_disk(path: Path, shapes: Any) -> IRModule:
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse_on_a_full_disk(path: Path, shapes: Any) -> IRModule:
    try:
        return fill_the_disk(path, shapes)
    except OSError as error:
        raise InvalidOptionError(f"{path} is odd: {error}") from error


def fill_the_memory(path: Path, shapes: Any) -> IRModule:
    raise RuntimeError("std::bad_alloc")


@pytest.mark.parametrize("read", [fill_the_disk, refuse_on_a_full_disk])
def test_a_machine_that_fails_says_nothing_of_the_file(
    read: Any, shared_reader: ModelReader, tmp_path: Path
) -> None:
    path = tmp_path / "net.bin"
    path.write_bytes(b"x")
    with pytest.raises(MachineError, match="No space left on device") as caught:
        shared_reader.read(FileFormat(read, "is odd"), path, "net", {})
    assert "is odd" not in str(caught.value)


def test_a_reader_without_memory_is_no_failure_of_the_machine(
    shared_reader: ModelReader, tmp_path: Path
) -> None:
    path = tmp_path / "net.bin"
    path.write_bytes(b"x")
    with pytest.raises(InvalidOptionError, match=r"needs more than .* GiB of memory"):
        shared_reader.read(FileFormat(fill_the_memory, "is odd"), path, "net", {})


def test_a_file_larger_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"x" * 1000)
    assert limits_of(path, ONNX).memory_bytes > 1 << 30
    monkeypatch.setattr(f"{READER}.memory_limit", lambda: 1 << 29)  # of a container
    assert limits_of(path, ONNX).memory_bytes == 1 << 29
    monkeypatch.setattr(f"{READER}.memory_limit", lambda: 999)
    with pytest.raises(InvalidOptionError, match=r"or its container, .* read it on a larger one"):
        limits_of(path, ONNX)
    monkeypatch.setattr(f"{READER}.memory_limit", lambda: None)
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(total=999))
    with pytest.raises(InvalidOptionError, match="read it on a larger one"):
        limits_of(path, ONNX)


class Trap:
    """Leave a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("record", ["sample_inputs/model.pt", "constants/opaque_obj_0"])
@pytest.mark.parametrize("model_file", [".pt2"], indirect=True)
def test_nothing_is_unpickled(record: str, model_file: Path, torch: Any, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "hostile.pt2"
    with zipfile.ZipFile(model_file) as source, zipfile.ZipFile(path, "w") as target:
        names = source.namelist()
        (root,) = {name.partition("/")[0] for name in names}
        for name in names:
            if not name.endswith(record):
                target.writestr(name, source.read(name))
        part = tmp_path / "part"
        torch.save({"x": Trap(mark)}, str(part))
        payload = part.read_bytes() if record.endswith(".pt") else pickle.dumps(Trap(mark))
        target.writestr(f"{root}/data/{record}", payload)
    with pytest.raises(InvalidOptionError, match="holds pickled objects or compiled code"):
        load(str(path))
    assert not mark.exists()


def test_weights_come_back_as_they_were(onnx: Any, onnx_models: Any, tmp_path: Path) -> None:
    mod = relax_of_onnx(onnx_models["encoder"](onnx), onnx_converters())
    save_module(mod, tmp_path)
    saved = json.loads((tmp_path / MODULE_FILE).read_text())
    assert len(saved["weights"]) > 10
    assert len(saved["module"]) < 0.5 * len(save_json(mod))
    assert structural_hash(load_weighted_module(tmp_path)) == structural_hash(mod)


def test_a_weight_of_many_steps_is_written_once(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    weight, state = relax.const(np.eye(64), "float32"), relax.const(np.ones((1, 64)), "float32")
    with builder.function("main", []):
        with builder.dataflow():
            for _ in range(5):
                state = builder.emit(relax.op.matmul(state, weight))
            result = builder.emit_output(state)
        builder.emit_func_output(result)
    mod = builder.get()
    save_module(mod, tmp_path)
    assert len(json.loads((tmp_path / MODULE_FILE).read_text())["weights"]) == 1
    assert structural_hash(load_weighted_module(tmp_path)) == structural_hash(mod)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "bool"])
def test_weights_of_any_type_come_back(dtype: str, tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            result = builder.emit_output(relax.op.negative(relax.const(np.eye(64), dtype)))
        builder.emit_func_output(result)
    mod = builder.get()
    save_module(mod, tmp_path)
    saved = json.loads((tmp_path / MODULE_FILE).read_text())
    assert [kind for kind, _, _ in saved["weights"].values()] == [dtype]
    assert structural_hash(load_weighted_module(tmp_path)) == structural_hash(mod)


def test_weights_beside_an_onnx_file_are_read_and_run(
    onnx: Any, onnx_models: Any, tmp_path: Path, check_import: Any
) -> None:
    path = tmp_path / "net.onnx"
    options = {"save_as_external_data": True, "size_threshold": 0, "location": "net.bin"}
    onnx.save(onnx_models["resnet"](onnx), str(path), **options)
    assert (tmp_path / "net.bin").stat().st_size > path.stat().st_size
    check_import(load(str(path)))


def test_what_onnx_runtime_cannot_run_is_an_error_that_says_so(onnx_file: Any) -> None:
    path = onnx_file("resnet")
    network: Any = load(str(path))
    path.unlink()
    with pytest.raises(WorkerError, match=r"resnet\.onnx"):
        network.original.run(network.random_inputs())


def test_the_model_itself_counts_in_a_folder_of_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{READER}._MAX_ENTRIES", 5)
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(total=1 << 40))
    monkeypatch.setattr(f"{READER}.memory_limit", lambda: None)
    path, data = tmp_path / "net.onnx", tmp_path / "net.onnx.data"
    for each in (path, data):
        with open(each, "wb") as file:
            file.truncate(1 << 30)  # without blocks on the disk
    others = [tmp_path / f"{i}.jpg" for i in range(20)]
    for each in others:
        each.touch()
    # The order is the file system's: here, the model comes last.
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([*others, path, data]))
    assert limits_of(path, ONNX).memory_bytes == (4 + 8 * 2) << 30
