from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import te_workload, tensor
from tvm_adaptive.errors import OtherModelError
from tvm_adaptive.models import TIRWorkload
from tvm_adaptive.models.content import check_same_model, content_of, named_source, python_source
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.session import RunOptions

ONNX = """
import numpy as np, onnx, sys
from onnx import TensorProto, helper, numpy_helper
value = np.full((4, 4), float(sys.argv[2]), dtype="float32")
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "net",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
    [numpy_helper.from_array(value, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
onnx.save(model, sys.argv[1], save_as_external_data=True, location="weights.bin", size_threshold=0)
"""


def saved(path: Path, value: float) -> None:
    (path.parent / "weights.bin").unlink(missing_ok=True)  # it would be continued
    subprocess.run([sys.executable, "-c", ONNX, str(path), str(value)], check=True)


def test_weights_outside_an_onnx_file_are_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    saved(path, 1.0)
    first = named_source(str(path), load(str(path)), None)
    assert first.content.startswith("sha256:")
    assert check_same_model(first.as_fields(), first, tmp_path)
    text = path.read_bytes()
    saved(path, 2.0)
    assert path.read_bytes() == text
    second = named_source(str(path), load(str(path)), None)
    with pytest.raises(OtherModelError, match=f"{path}.*the file's content changed"):
        check_same_model(first.as_fields(), second, tmp_path)


def test_a_file_of_inputs_is_part_of_the_source(tmp_path: Path) -> None:
    mod = te_workload("GMM")
    workload = TIRWorkload("net", mod)
    assert named_source("te:GMM", workload, None).inputs is None
    found = named_source("te:GMM", workload, None, "sample.npz")
    assert found.as_fields()["inputs"] == "sample.npz"


@pytest.mark.parametrize(
    ("inputs", "file"),
    [
        (None, None),
        ({"x": np.zeros((2, 3))}, "inputs.npz"),
        ("run/inputs.npz", "inputs.npz"),
        ("other.npz", "{}/other.npz"),
    ],
)
def test_a_run_that_is_moved_finds_the_inputs_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Any, file: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    options = RunOptions(what="te:GMM", work_dir="run", trials=1, inputs=inputs)
    assert options.inputs_file == (file and file.format(tmp_path))


def test_other_input_shapes_make_another_model(tmp_path: Path) -> None:
    mod = te_workload("GMM")
    first, second = python_source(mod, {"x": (1, 4)}), python_source(mod, {"x": (2, 4)})
    with pytest.raises(OtherModelError, match="its input shapes changed"):
        check_same_model(first.as_fields(), second, tmp_path)


def test_the_weights_values_do_not_count_but_their_shapes_do() -> None:
    network = load("squeezenet1_1")
    name, value = next(iter(network.params.items()))  # type: ignore[union-attr]
    shape = tuple(int(extent) for extent in value.shape)

    def with_weight(weight: np.ndarray) -> object:
        params = {**network.params, name: tensor(weight)}  # type: ignore[union-attr]
        return dataclasses.replace(network, params=params)  # type: ignore[type-var]

    known = content_of(network)
    assert known == content_of(with_weight(np.ones(shape, dtype="float32")))
    assert known != content_of(with_weight(np.ones(shape, dtype="float16")))


def test_what_cannot_be_computed_is_not_compared(tmp_path: Path) -> None:
    now = python_source(te_workload("GMM"))
    assert not check_same_model({}, now, tmp_path)
    assert not check_same_model({"content": "structure, TVM 0.1:abc"}, now, tmp_path)
    assert content_of("no module").startswith("structure")


def test_shapes_that_arrays_give_are_compared_where_both_attempts_have_them(tmp_path: Path) -> None:
    now = dataclasses.replace(python_source(te_workload("GMM")), input_shapes={"x": [4, 4]})
    for known in ({}, {"x": [4, 4]}, {"x": [4, 4], "y": [1]}):
        assert check_same_model(now.as_fields() | {"input_shapes": known}, now, tmp_path)
    for known in ({"x": [2, 4]}, {"z": [4, 4]}):
        with pytest.raises(OtherModelError, match="its input shapes"):
            check_same_model(now.as_fields() | {"input_shapes": known}, now, tmp_path)
