from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import load
from tvm_adaptive.models.frontend.torch_program import network_of_program

ARCHITECTURES = ["resnet", "mobilenet", "encoder"]


@pytest.fixture
def program(torch, torch_models):
    def export(name, **options):
        model = torch_models[name]
        return torch.export.export(model.module.eval(), model.inputs, **options)

    return export


@pytest.fixture
def pt2_file(torch, program, tmp_path):
    def write(name, **options):
        path = tmp_path / f"{name}.pt2"
        torch.export.save(program(name, **options), str(path))
        return path

    return write


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_imported_network_computes_what_pytorch_computes(name, pt2_file, check_import):
    network = load(str(pt2_file(name)))
    assert network.original.framework.startswith("PyTorch")
    check_import(network)


def test_several_inputs_and_outputs_keep_their_order(program):
    network = network_of_program(program("encoder"), "net", {}, "net")
    assert network.input_shapes == {"ids": (1, 16), "scale": (1, 1, 1)}
    assert network.input_dtypes == {"ids": "int64", "scale": "float32"}
    ids, scale = network.random_inputs()
    assert ids.min() >= 0
    assert 1 < ids.max() < 50
    outputs = network.original.run([ids, scale])
    assert [each.shape for each in outputs] == [(1, 16, 32), (1, 32)]


def test_a_dynamic_shape_is_fixed_by_an_option(torch, torch_models, tmp_path, check_import):
    model = torch_models["resnet"]
    program = torch.export.export(
        model.module.eval(),
        (torch.randn(2, 3, 32, 32),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},),
    )
    path = tmp_path / "net.pt2"
    torch.export.save(program, str(path))
    with pytest.raises(InvalidOptionError, match="--input-shape input=1x3x32x32"):
        load(str(path))
    network = load(str(path), {"": (3, 3, 32, 32)})
    check_import(network)


@pytest.mark.parametrize("cut", [0, 10, 0.5, 0.99])
def test_a_truncated_file(cut, pt2_file):
    path = pt2_file("resnet")
    whole = path.read_bytes()
    path.write_bytes(whole[: cut if isinstance(cut, int) else int(cut * len(whole))])
    with pytest.raises(InvalidOptionError, match=r"is no program of torch.export.save"):
        load(str(path))


def test_without_pytorch_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match="needs the package torch: pip install torch"):
        load(str(path))


FACTORY = """
    import torch

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.ones(8, 64)

    def by_keyword():
        return torch.nn.Linear(8, 4), {"input": torch.ones(2, 8)}

    def relax():
        from tvm_adaptive.models import transformer
        network = transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
        return network.mod, network.params

    def network():
        from tvm_adaptive.models import transformer
        return transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)

    def wrong():
        return torch.nn.Linear(8, 4)

    def wronger():
        return "linear", None

    def fails():
        raise RuntimeError("no weights here")

    def branches():
        class Branch(torch.nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x
        return Branch(), torch.ones(2)
"""


@pytest.fixture
def in_factory_dir(torch, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_models", None)


@pytest.mark.parametrize("name", ["make", "by_keyword"])
def test_a_factory_of_a_pytorch_module(name, in_factory_dir, check_import):
    path = list(sys.path)
    network = load(f"my_models:{name}")
    assert network.name == f"my_models-{name}"
    check_import(network)
    assert sys.path == path


@pytest.mark.parametrize("name", ["relax", "network"])
def test_a_factory_of_a_relax_module(name, in_factory_dir):
    network = load(f"my_models:{name}")
    assert network.input_shapes == {"embedded": (1, 16, 32)}
    with pytest.raises(InvalidOptionError, match="no input x"):
        load(f"my_models:{name}", {"x": (1,)})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("my_models:nothing", "my_models has no function nothing"),
        ("no_such_module:make", "no_such_module of .* cannot be imported: ModuleNotFoundError"),
        ("broken:make", "broken of broken:make cannot be imported: ModuleNotFoundError"),
        ("my_models:torch", "has no function torch"),
        ("my_models:wrong", "returned Linear"),
        ("my_models:wronger", "returned a tuple with str"),
        ("my_models:fails", "my_models:fails failed: RuntimeError: no weights here"),
        ("my_models:branches", "torch.export cannot export my_models:branches"),
    ],
)
def test_factories_that_do_not_work(what, text, in_factory_dir):
    with pytest.raises(InvalidOptionError, match=text) as caught:
        load(what)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("torch_for_commands")
def test_the_command_tunes_a_factory(in_factory_dir):
    command = [sys.executable, "-m", "tvm_adaptive", "tune", "my_models:make", "--trials", "8"]
    result = subprocess.run(
        [*command, "--work-dir", "run"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "outputs agree with PyTorch" in result.stderr
    assert (in_factory_dir / "run" / "my_models-make.so").exists()
