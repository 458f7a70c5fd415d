from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tvm_adaptive._tvm import IRModule
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network
from tvm_adaptive.models.frontend.sample import (
    read_sample,
    shapes_of_sample,
    with_sample,
    write_sample,
)
from tvm_adaptive.values.agreement import numpy_dtype


def first_input() -> IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4), "float32"))
    n = relax.Var("n", relax.TensorType((), "int64"))
    with builder.function("main", [x, n]):
        builder.emit_func_output(x)
    return builder.get()


NETWORK = Network("net", first_input(), {}, {"x": (1, 4), "n": ()}, {"x": "float32", "n": "int64"})
GOOD = {"n": np.array(3), "x": np.ones((1, 4), "float32")}


@pytest.mark.parametrize("sample", [[np.ones(3)], np.ones(3), 7])
def test_what_has_no_names_is_refused(sample: Any) -> None:
    with pytest.raises(InvalidOptionError, match="must map the names of inputs to arrays"):
        read_sample(sample)


def test_what_is_no_array_is_refused() -> None:
    class Broken:
        def __array__(self, *_arguments: Any, **_options: Any) -> Any:
            raise RuntimeError("on another device")

    with pytest.raises(InvalidOptionError, match=r"Input x cannot be read: .*another device"):
        read_sample({"x": Broken()})  # type: ignore[dict-item]


def test_tensors_of_pytorch_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (found,) = read_sample({"x": numbers}).values()
    assert found.dtype == numpy_dtype("bfloat16")
    assert found.astype("float32").tolist() == [1.0, 1.0]
    (found,) = read_sample({"x": torch.arange(3)}).values()
    assert found.tolist() == [0, 1, 2]


def test_a_sample_is_what_checks_use_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "sample.npz", **GOOD)
    network = with_sample(NETWORK, read_sample(tmp_path / "sample.npz"), "sample.npz")
    x, n = network.inputs(seed=7)
    assert np.array_equal(x, GOOD["x"])
    assert n == 3
    assert not np.array_equal(network.random_inputs(7)[0], x)
    assert len(dataclasses.replace(network, sample=None).inputs()) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n": None}, r"lacks inputs of net: n \(int64, a single value\)"),
        ({"z": np.zeros(3)}, "has z, but the inputs of net are x, n"),
        ({"x": np.ones((4,), "float32")}, "has the shape 4, but the input of net has 1x4"),
        ({"x": np.ones((1, 5), "float32")}, "has the shape 1x5"),
        ({"x": np.ones((1, 4))}, r"x in s.npz is of float64, .*convert it with .astype\('float32"),
    ],
)
def test_a_sample_that_does_not_fit(change, text) -> None:
    arrays = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(InvalidOptionError, match=text):
        with_sample(NETWORK, arrays, "s.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY\x01\x00", b"text"])
def test_a_file_that_is_no_sample(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidOptionError, match=r"s\.npz is no file of numpy\.savez"):
        read_sample(path)


def test_an_array_without_a_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", GOOD["x"])
    with pytest.raises(InvalidOptionError, match="it holds one array without a name"):
        read_sample(tmp_path / "s.npy")


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.array([{}], dtype=object))
    with pytest.raises(InvalidOptionError, match="Object arrays cannot be loaded"):
        read_sample(tmp_path / "s.npz")
    with pytest.raises(InvalidOptionError, match=r"none\.npz cannot be read: No such file"):
        read_sample(tmp_path / "none.npz")


def test_shapes_of_a_sample() -> None:
    assert shapes_of_sample({"x": GOOD["x"]}, {"": (1, 4), "y": (3,)}, "s") == {
        "x": (1, 4),
        "y": (3,),
    }
    with pytest.raises(InvalidOptionError, match="leave --input-shape out"):
        shapes_of_sample(GOOD, {"x": (2, 4)}, "s.npz")


@pytest.mark.parametrize("by_numpy", [False, True])
def test_numbers_of_brain_floats_survive_a_file(tmp_path: Path, by_numpy: bool) -> None:
    wanted = np.array([1.5, -3.0]).astype(numpy_dtype("bfloat16"))
    path = tmp_path / "sample.npz"
    if by_numpy:
        np.savez(path, x=wanted)
    else:
        write_sample({"x": wanted}, path)
    network = Network("net", first_input(), {}, {"x": (2,)}, {"x": "bfloat16"})
    (found,) = with_sample(network, read_sample(path), "sample.npz").inputs()
    assert found.dtype == wanted.dtype
    assert np.array_equal(found, wanted)


def test_inputs_may_have_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "allow_pickle": np.ones(2), "a/b:0": np.zeros(())}
    write_sample(arrays, tmp_path / "inputs.npz")
    found = read_sample(tmp_path / "inputs.npz")
    assert list(found) == list(arrays)
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
