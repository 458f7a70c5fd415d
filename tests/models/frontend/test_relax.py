from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.ir import save_json

from tests.models.networks import module_of
from tests.tuning.observers import Notes
from tvm_adaptive.errors import ImportMismatchError, InvalidOptionError
from tvm_adaptive.models import prepare, transformer
from tvm_adaptive.models.frontend import load, network_of_imported, slug
from tvm_adaptive.models.frontend.shapes import by_name
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.checks.network import NetworkCheck
from tvm_adaptive.tuning.session import RunOptions, open_session


@pytest.fixture(scope="module")
def saved():
    network = transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
    weights = {name: value.numpy() for name, value in network.params.items()}
    return save_json(relax.transform.BindParams("main", weights)(network.mod))


def test_a_saved_module_is_read_with_its_weights(saved, tmp_path):
    path = tmp_path / "my net.json"
    path.write_text(saved)
    network = load(str(path))
    assert network.name == "my-net"
    assert network.input_shapes == {"embedded": (1, 16, 32)}
    assert network.params == {}


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, 0.999])
def test_damage_is_refused(cut, saved, tmp_path):
    path = tmp_path / "net.json"
    path.write_text(saved[: cut if isinstance(cut, int) else int(cut * len(saved))])
    with pytest.raises(InvalidOptionError, match=r"is no module that tvm.ir.save_json wrote"):
        load(str(path))


@pytest.mark.parametrize("text", ["{}", "[]", '{"root_index": 1, "nodes": []}', '{"nodes": 7}'])
def test_other_json_is_refused(text, tmp_path):
    path = tmp_path / "net.json"
    path.write_text(text)
    with pytest.raises(InvalidOptionError, match=r"is no module"):
        load(str(path))


def test_other_things_of_tvm_are_refused(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(save_json(relax.Var("x", relax.TensorType((2,), "float32"))))
    with pytest.raises(InvalidOptionError, match="it holds a Var"):
        load(str(path))


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2", "net.json", "net\0.onnx"])
def test_a_file_that_is_not_there(name, tmp_path):
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        load(str(tmp_path / name))


def test_a_directory_is_no_file(tmp_path):
    (tmp_path / "net.onnx").mkdir()
    with pytest.raises(InvalidOptionError, match="cannot be read: Is a directory"):
        load(str(tmp_path / "net.onnx"))


def test_shapes_of_built_in_networks_are_fixed():
    with pytest.raises(InvalidOptionError, match="shapes of resnet18 are fixed"):
        load("resnet18", {"": (1,)})


@pytest.mark.parametrize(
    ("text", "name"), [("a b/c", "a-b-c"), ("../x", "x"), ("", "model"), ("p.q:make", "p.q-make")]
)
def test_names_for_files(text, name):
    assert slug(text) == name


def dynamic():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    shapes = {"x": (n, m), "y": (m, n * 2)}
    return module_of(shapes, lambda emit, x, y: emit(relax.op.matmul(x, y)))


def test_one_symbol_fixes_every_input_that_has_it():
    network = network_of_imported("net", dynamic(), {"x": (3, 4)})
    assert network.input_shapes == {"x": (3, 4), "y": (4, 6)}


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"x": (3, 4), "y": (5, 6)}, "Input y has the shape .*, where 4 is not 5"),
        ({"y": (4, 6)}, "depends on others"),
        ({"x": (3,)}, "has 2 extents"),
        ({"z": (3,)}, "the inputs of net are x, y"),
        ({"": (3,)}, "needs the name of its input: the inputs of net are x, y"),
        ({"x": "3x4"}, "input_shapes must map names .* but has 'x': '3x4'"),
        ({"x": (None, 4)}, "input_shapes must map names"),
    ],
)
def test_shapes_that_contradict(shapes, text):
    with pytest.raises(InvalidOptionError, match=text):
        network_of_imported("net", dynamic(), shapes)


def test_the_empty_name_is_the_only_input():
    assert by_name({"": [2]}, ["x"], "net") == {"x": (2,)}


def judged(run, tmp_path, observer, small=None):
    from tvm_adaptive.tuning.config import DEFAULT

    small = small or transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
    network = network_of_imported(
        "net", small.mod, {}, params=small.params, original=Original("Framework 1.0", run)
    )
    options = RunOptions(
        what="net",
        work_dir=tmp_path,
        trials=1,
        seed=0,
        config=DEFAULT.replace(store="none"),
        observer=observer,
    )
    with open_session(options) as it:
        prepared = prepare(network, it.target)
        with NetworkCheck(it, network, prepared) as check:
            check.measure_untuned()
    return it


def test_a_model_that_was_imported_wrongly_is_not_tuned(tmp_path):
    with pytest.raises(ImportMismatchError, match=r"something else than Framework 1.0 .*rtol"):
        judged(lambda inputs: [inputs[0] * 0], tmp_path, Notes())


def test_an_original_may_be_wrong_by_a_rounding_next_to_zero(tmp_path):
    far = relax.const(17.0, "float32")
    mod = module_of({"x": (3, 4)}, lambda _, x: relax.op.sigmoid(relax.op.subtract(x, far)))
    faint = network_of_imported("net", mod, {})

    def run(inputs, error):
        return [1 / (1 + np.exp(17.0 - inputs[0])) + np.float32(error)]

    judged(lambda inputs: run(inputs, 2e-7), tmp_path / "near", Notes(), faint)
    with pytest.raises(ImportMismatchError):
        judged(lambda inputs: run(inputs, 2e-6), tmp_path / "far", Notes(), faint)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_a_network_that_rounds_may_choose_another_step(tmp_path, kind):
    eight = relax.const(8.0, "float32")

    def build(_, x):
        steps = relax.op.round(relax.op.multiply(x, eight))
        return relax.op.astype(relax.op.multiply(steps, eight), kind)

    rounded = network_of_imported("net", module_of({"x": (100_000,)}, build), {})
    assert rounded.rounds

    def run(inputs, error):
        # Of other kernels, of which some numbers round to another step.
        x = inputs[0] * np.float32(8.0 * (1.0 + 1e-5))
        return [(np.round(x) * 8.0 + error).astype(kind)]

    judged(lambda inputs: run(inputs, 0.0), tmp_path / "other", Notes(), rounded)
    with pytest.raises(ImportMismatchError):
        judged(lambda inputs: run(inputs, 32.0), tmp_path / "wrong", Notes(), rounded)


def test_small_outputs_of_their_own_scale_are_compared_in_that_scale(tmp_path):
    small = relax.const(1e-8, "float32")
    mod = module_of({"x": (3, 4)}, lambda _, x: relax.op.multiply(x, small))
    faint = network_of_imported("net", mod, {})
    judged(lambda inputs: [inputs[0] * np.float32(1e-8)], tmp_path / "same", Notes(), faint)
    with pytest.raises(ImportMismatchError, match=r"output 0: \d+ of 12 values are wrong"):
        judged(lambda inputs: [inputs[0] * np.float32(2e-8)], tmp_path / "twice", Notes(), faint)


def test_an_original_that_fails_is_told_and_forgiven(tmp_path):
    def run(inputs):
        raise RuntimeError("no such kernel\nmore")

    observer = Notes()
    judged(run, tmp_path, observer)
    told = "outputs are not checked: Framework 1.0 could not run it: no such kernel"
    assert told in observer.notes
