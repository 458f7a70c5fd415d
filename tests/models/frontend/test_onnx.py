from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvm_adaptive.cli import main
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.resume import read_settings

ARCHITECTURES = ["resnet", "mobilenet", "encoder"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_imported_network_computes_what_onnx_runtime_computes(name, onnx_file, check_import):
    network = load(str(onnx_file(name)))
    assert network.name == name
    assert network.original.framework.startswith("ONNX Runtime")
    check_import(network)


def test_inputs_keep_their_names_and_types(onnx_file):
    assert load(str(onnx_file("encoder"))).input_dtypes == {"ids": "int64"}
    assert load(str(onnx_file("resnet"))).input_shapes == {"image": (1, 3, 32, 32)}


@pytest.mark.parametrize(("name", "key"), [("resnet", "image"), ("mobilenet", "")])
def test_a_dynamic_shape_is_fixed_by_an_option(name, key, onnx_file, check_import):
    path = str(onnx_file(name, batch="n"))
    with pytest.raises(InvalidOptionError, match="--input-shape image=1x3x32x32"):
        load(path)
    network = load(path, {key: (2, 3, 32, 32)})
    assert network.input_shapes == {"image": (2, 3, 32, 32)}
    check_import(network)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"picture": (1, 3, 32, 32)}, "no input picture: the inputs of .* are image"),
        ({"image": (1, 0, 32, 32)}, "must be positive"),
        ({"image": (1, 32)}, "has 4 extents"),
        ({"image": (1, 4, 32, 32)}, "has the shape nx3x32x32, where 3 is not 4"),
    ],
)
def test_shapes_that_do_not_fit(shapes, text, onnx_file):
    with pytest.raises(InvalidOptionError, match=text):
        load(str(onnx_file("resnet", batch="n")), shapes)


def test_an_operator_that_tvm_does_not_know_is_named(onnx, tmp_path):
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [make.make_node("Det", ["x"], ["y"])],
        "net",
        [make.make_tensor_value_info("x", kind, [4, 4])],
        [make.make_tensor_value_info("y", kind, [])],
    )
    path = tmp_path / "det.onnx"
    onnx.save(make.make_model(graph), str(path))
    with pytest.raises(
        InvalidOptionError, match=r"TVM cannot import .*: Det \(1 node, first 'y', opset"
    ):
        load(str(path))


@pytest.mark.parametrize("text", [b"", b"not a model", b"\x00" * 64])
def test_what_is_no_model(text, tmp_path, onnx):
    path = tmp_path / "net.onnx"
    path.write_bytes(text)
    with pytest.raises(InvalidOptionError, match="is no ONNX model, or a damaged one"):
        load(str(path))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data, onnx, onnx_models, tmp_path_factory):
    whole = bytearray(onnx_models["resnet"](onnx).SerializeToString())
    # Weights are most of the file; its structure is at both ends.
    place = st.one_of(st.integers(0, 600), st.integers(len(whole) - 600, len(whole) - 1))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(place)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "net.onnx"
    path.write_bytes(whole[: data.draw(place)] if data.draw(st.booleans()) else whole)
    with contextlib.suppress(InvalidOptionError):
        assert load(str(path)).name == "net"


def test_without_onnx_the_message_says_what_to_install(onnx_file, monkeypatch):
    path = onnx_file("resnet")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match=r"pip install 'tvm-adaptive\[onnx\]'"):
        load(str(path))


def test_the_command_tunes_a_file(onnx, tmp_path, capsys):
    data = Path(onnx.__file__).parent / "backend/test/data/pytorch-converted/test_Conv2d"
    model = onnx.load(str(data / "model.onnx"))
    (image,) = (each for each in model.graph.input if each.name == "0")
    image.type.tensor_type.shape.dim[0].dim_param = "n"
    path = tmp_path / "convolution.onnx"
    onnx.save(model, str(path))
    shape = [each.dim_value or 1 for each in image.type.tensor_type.shape.dim]
    np.savez(tmp_path / "sample.npz", **{"0": np.ones(shape, "float32")})
    (tmp_path / "quick.toml").write_text("[finish]\ntop_k = 1\nmax_task_sec = 0.5\n")
    command = ["tune", str(path), "--trials", "6", "--config", str(tmp_path / "quick.toml")]
    command += ["--inputs", str(tmp_path / "sample.npz"), "--work-dir", str(tmp_path / "run")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "outputs agree with ONNX Runtime" in printed.err
    assert "outputs       agree with ONNX Runtime" in printed.out
    assert re.search(r"(faster than|slower than|as fast as) ONNX Runtime .* ms, was", printed.out)
    assert (tmp_path / "run" / "convolution.so").exists()
    assert read_settings(tmp_path / "run")[0].inputs == str(tmp_path / "sample.npz")
