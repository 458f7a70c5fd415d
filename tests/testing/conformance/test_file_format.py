import dataclasses
import os
import re
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from tvm_adaptive._tvm import relax, save_json
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend.load import FORMATS
from tvm_adaptive.models.frontend.reader import FileFormat, Inference
from tvm_adaptive.testing.conformance import check_file_format

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of_onnx(name):
    onnx = pytest.importorskip("onnx")
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / name
    if not path.is_file():
        pytest.skip("this version of onnx comes without it")
    return path


def test_onnx_files_conform():
    check_file_format(FORMATS[".onnx"], of_onnx("pytorch-converted/test_Conv2d/model.onnx"))


def test_programs_of_pytorch_conform(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "net.pt2"
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(
        torch.nn.Linear(4, 4), (torch.ones(2, 4),), dynamic_shapes=[batch]
    )
    torch.export.save(program, str(path))
    check_file_format(FORMATS[".pt2"], path, {"input": (3, 4)})


def test_saved_modules_conform(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(save_json(product("x", 2.0)))
    check_file_format(FORMATS[".json"], path)


def product(name, factor, *others):
    """Return a module that multiplies its first input by a number."""
    inputs = [relax.Var(each, relax.TensorType((4,), "float32")) for each in (name, *others)]
    return function_of(inputs, relax.op.multiply(inputs[0], relax.const(factor, "float32")))


def function_of(inputs, value):
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(value))
        builder.emit_func_output(result)
    return builder.get()


def factor_of(path):
    """Read a format of one number."""
    found = re.fullmatch(rb"factor ([\d.]+) end\n", path.read_bytes())
    if found is None:
        raise InvalidOptionError(f"{path} is no factor.")
    return float(found[1])


def read_factor(path, shapes):
    return product("x", factor_of(path))


def open_factor(path, inputs, n_threads):
    return Inference(lambda: inputs[0] * np.float32(factor_of(path)), lambda result: [result])


GOOD = FileFormat(read_factor, "is no factor", framework=("NumPy", "numpy"), open=open_factor)


@pytest.fixture
def factor_file(tmp_path):
    path = tmp_path / "net.factor"
    path.write_bytes(b"factor 2.5 end\n")
    return path


def test_a_small_form_conforms(factor_file):
    check_file_format(GOOD, str(factor_file))
    check_file_format(dataclasses.replace(GOOD, framework=None, open=None), factor_file)


def refuses_all(path, shapes):
    raise InvalidOptionError(f"{path} is no factor.")


def takes_all(path, shapes):
    return product("x", 2.5)


def takes_half(path, shapes):
    if path.read_bytes().startswith(b"factor"):
        return product("x", 2.5)
    return read_factor(path, shapes)


def lets_errors_pass(path, shapes):
    path.read_text(encoding="utf-8")  # random bytes are no text
    return read_factor(path, shapes)


def names_nothing(path, shapes):
    try:
        return read_factor(path, shapes)
    except InvalidOptionError as error:
        raise InvalidOptionError("This is no factor.") from error


def dies_of_archives(path, shapes):
    if path.read_bytes().startswith(b"PK"):
        os._exit(1)
    return read_factor(path, shapes)


def names_no_input(path, shapes):
    return product(" ", factor_of(path))


def names_twins(path, shapes):
    return product("x", factor_of(path), "x")


def draws(path, shapes):
    return product("x", float(np.random.default_rng().random()))


def names_by_the_clock(path, shapes):
    return product(f"x{time.time_ns()}", factor_of(path))


def calls_what_is_not_there(path, shapes):
    factor_of(path)
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    return function_of([x], relax.call_dps_packed("conformance.missing", (x,), x.ty))


def opens_another(path, inputs, n_threads):
    return Inference(lambda: inputs[0] * 3, lambda result: [result])


def opens_nothing(path, inputs, n_threads):
    raise RuntimeError("no such opset")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"read": refuses_all}, r"reading .*net\.factor raised InvalidOptionError"),
        ({"read": takes_all}, "an empty file must be refused but was read as a model"),
        ({"read": takes_half}, "the first half of the file must be refused but was read"),
        (
            {"read": lets_errors_pass},
            "random bytes made the format end with an error other than .*: .*UnicodeDecodeError",
        ),
        ({"read": dies_of_archives}, "a zip archive made the format end with an error other than"),
        ({"read": names_nothing}, "refused in words that do not name the file: This is no fac"),
        ({"read": names_no_input}, r"every input needs a name but they are \[' '\]"),
        ({"read": names_twins}, r"a name of its own but there are two of \{'x'\}"),
        ({"read": draws}, "to another module the second time"),
        ({"read": names_by_the_clock}, r"the input_shapes of a file were \{'x\d+'"),
        ({"read": calls_what_is_not_there}, "compiling and running the imported network raised"),
        ({"open": opens_another}, "computes other results than NumPy"),
        ({"open": opens_nothing}, "NumPy .*, which opens the file with its inputs, raised Worker"),
        ({"peer": "numpy"}, "peer must be one of ort, openvino, torch, inductor but is 'numpy'"),
        ({"peer": "ort"}, r"the peer is ort, but ONNX Runtime opens no \.factor files"),
    ],
)
def test_what_does_not_conform_is_named(changes, match, factor_file):
    with pytest.raises(AssertionError, match=match):
        check_file_format(dataclasses.replace(GOOD, **changes), factor_file)
