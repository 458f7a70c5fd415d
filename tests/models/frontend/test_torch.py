from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import time
import zipfile

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import prepare
from tvm_adaptive.models.frontend import load, with_sample
from tvm_adaptive.models.frontend.torch_flat import flat_module, quiet
from tvm_adaptive.models.frontend.torch_program import (
    network_of_module,
    network_of_program,
    open_program,
)
from tvm_adaptive.models.network import shape_text
from tvm_adaptive.tuning import embedding
from tvm_adaptive.tuning.target import resolve_target

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
    with pytest.raises(InvalidOptionError, match="does not take the shapes input 9x3x32x32"):
        load(str(path), {"input": (9, 3, 32, 32)})


@pytest.fixture
def dynamic_file(torch, tmp_path):
    """A program of two inputs: y has one column more than twice those of x."""

    class Stepped(torch.nn.Module):
        def forward(self, x, y):
            first, second = y[:, 1:].view(y.shape[0], -1, 2).unbind(-1)
            return {"sum": x + first, "flat": (second * x.shape[1]).reshape(-1)}

    rows, columns = torch.export.Dim("rows"), torch.export.Dim("columns", min=2)
    program = torch.export.export(
        Stepped(),
        (torch.randn(3, 5), torch.randn(3, 11)),
        dynamic_shapes=({0: rows, 1: columns}, {0: rows, 1: 2 * columns + 1}),
    )
    path = tmp_path / "net.pt2"
    torch.export.save(program, str(path))
    return path


def test_all_open_extents_stand_in_one_message(dynamic_file):
    with pytest.raises(InvalidOptionError) as caught:
        load(str(dynamic_file))
    message = str(caught.value)
    assert "--input-shape x=1x5 --input-shape y=1x11" in message
    assert re.search(r"x is (s\d+)x(s\d+); y is \1x\(2\*\2 \+ 1\)", message)


def test_shapes_of_one_input_fix_those_that_depend_on_it(dynamic_file, check_import):
    network = load(str(dynamic_file), {"x": (4, 3)})
    assert network.input_shapes == {"x": (4, 3), "y": (4, 7)}
    check_import(network)


def test_a_sample_fixes_the_shapes(dynamic_file, check_import):
    sample = {"x": np.ones((1, 4), "float32"), "y": np.ones((1, 9), "float32")}
    network = load(str(dynamic_file), inputs=sample)
    np.testing.assert_array_equal(check_import(network)[0], np.full((1, 4), 2.0))
    with pytest.raises(InvalidOptionError, match="is 1x9 with the other shapes given, not 1x8"):
        load(str(dynamic_file), {"x": (1, 4), "y": (1, 8)})


def test_multiples_of_what_no_input_has(torch, tmp_path, check_import):
    class Eights(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0], -1, 8).sum(-1)

    eights = 8 * torch.export.Dim("n", min=2)
    ones = (torch.ones(2, 16),)
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Eights(), ones, dynamic_shapes=({1: eights},)), path)
    with pytest.raises(InvalidOptionError, match=r"--input-shape x=2x16 \("):
        load(str(path))
    network = load(str(path), {"x": (2, 24)})
    assert network.input_shapes == {"x": (2, 24)}
    check_import(network)
    sample = {"x": np.ones((2, 32), "float32")}
    assert load(str(path), inputs=sample).input_shapes == {"x": (2, 32)}
    with pytest.raises(InvalidOptionError, match=r"no whole number makes \(8\*s\d+\) 20"):
        load(str(path), {"x": (2, 20)})


@pytest.fixture
def stateful(torch):
    """A module that counts its calls, and takes and returns what is no tensor."""

    class Stateful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(2, 3), persistent=False)
            self.table = torch.arange(3.0)

        def forward(self, x, flag=None, *, scale=2, more):
            self.calls += 1
            self.last.copy_(x)
            x.mul_(2.0)
            y = x * scale + self.calls + self.table + more["b"] + more["a"][1]
            pair = (y.argmax(1), [y > 0.0, self.calls * 1])
            return {"y": y, "nothing": flag, "number": 3, "pair": pair}

    torch.manual_seed(0)
    more = {"b": torch.randn(2, 3), "a": (None, torch.randn(2, 1))}
    return Stateful(), (torch.randn(2, 3), None), {"scale": 3, "more": more}


def test_containers_constants_and_state(torch, stateful, tmp_path, check_import):
    module, args, named = stateful
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, args, named), str(path))
    network = load(str(path))
    assert list(network.input_shapes) == ["x", "more_b", "more_a_1"]
    inputs = network.inputs()
    kept = [each.copy() for each in inputs]
    outputs = check_import(network)
    assert [str(each.dtype) for each in outputs] == ["float32", "int64", "bool", "float32"]
    np.testing.assert_array_equal(outputs[3], [1.0])
    # The state of the first call is that of every call.
    again = network.original.run(inputs)
    np.testing.assert_array_equal(again[3], [1.0])
    assert all(np.array_equal(a, b) for a, b in zip(inputs, kept, strict=True))
    inference = open_program(path, inputs, None)
    for _ in range(3):
        found = inference.outputs(inference.run())
        assert all(np.array_equal(a, b) for a, b in zip(found, outputs, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32", "uint8"])
def test_types_of_numbers(torch, dtype, check_import):
    class Mixed(torch.nn.Module):
        def forward(self, x, keep):
            y = x.to(getattr(torch, dtype))
            return y + y, torch.where(keep, y, y * y) * 2, keep ^ True

    inputs = (torch.tensor([[3.0, 1.0], [2.0, 5.0]]), torch.tensor([[True], [False]]))
    program = torch.export.export(Mixed(), inputs)
    network = network_of_program(program, "net", {}, "net")
    sample = {"x": inputs[0].numpy(), "keep": inputs[1].numpy()}
    outputs = check_import(with_sample(network, sample, "inputs"))
    assert [each.dtype.name for each in outputs] == [dtype, dtype, "bool"]


def test_containers_of_packages_that_are_not_there(torch, tmp_path, check_import):
    class Outputs:
        def __init__(self, values):
            self.values = values

    torch.utils._pytree.register_pytree_node(
        Outputs,
        lambda each: (list(each.values), None),
        lambda values, _: Outputs(list(values)),
        serialized_type_name="nowhere.Outputs",
    )

    class Packed(torch.nn.Module):
        def forward(self, x):
            return Outputs([x + 1.0, {"half": x / 2.0}])

    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Packed(), (torch.ones(2),)), str(path))
    outputs = check_import(load(str(path)))
    assert [each.shape for each in outputs] == [(2,), (2,)]


@pytest.mark.parametrize("cut", [0, 10, 0.5, 0.99])
def test_a_truncated_file(cut, pt2_file):
    path = pt2_file("resnet")
    whole = path.read_bytes()
    path.write_bytes(whole[: cut if isinstance(cut, int) else int(cut * len(whole))])
    with pytest.raises(InvalidOptionError, match=r"is no program of torch.export.save"):
        load(str(path))


def test_a_program_of_an_older_pytorch_is_not_called_damaged(torch, tmp_path):
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.7")
        archive.writestr("serialized_exported_program.json", "{}")
    text = r"PyTorch 2\.7 or older\. .*torch\.export\.load"
    with pytest.raises(InvalidOptionError, match=text) as caught:
        load(str(path))
    assert "damaged" not in str(caught.value)


def test_a_program_may_have_any_name(torch, tmp_path):
    package = pytest.importorskip("torch.export.pt2_archive._package").package_pt2
    linear = torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),))
    path = tmp_path / "net.pt2"
    package(str(path), exported_programs={"encoder": linear})
    assert load(str(path)).input_shapes == {"input": (2, 4)}
    several = tmp_path / "several.pt2"
    package(str(several), exported_programs={"encoder": linear, "decoder": linear})
    with pytest.raises(InvalidOptionError, match="holds several programs: decoder, encoder"):
        load(str(several))


def test_without_pytorch_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidOptionError, match=r"package torch: pip install 'tvm-adaptive\[torch\]'"
    ):
        load(str(path))


def test_an_older_pytorch_is_named_and_not_the_file(torch, tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"x")
    reader = "tvm_adaptive.models.frontend.reader"
    monkeypatch.setattr(f"{reader}.installed_version", lambda _: "2.6.0+cpu")
    text = r"net.* needs torch 2\.13 or newer, but 2\.6\.0\+cpu is installed: pip install"
    with pytest.raises(InvalidOptionError, match=text):
        load(str(path))
    linear, ones = torch.nn.Linear(4, 3), (torch.ones(2, 4),)
    with pytest.raises(InvalidOptionError, match=text):
        network_of_module(linear, ones, {}, name="net", shapes={}, source="net")
    monkeypatch.setattr(f"{reader}.installed_version", lambda _: None)  # of a build of one's own
    assert network_of_module(linear, ones, {}, name="net", shapes={}, source="net")


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

    def unnamed():
        from tvm import IRModule
        return IRModule({}), [1]

    def fails():
        raise RuntimeError("no weights here")

    def branches():
        class Branch(torch.nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x
        return Branch(), torch.ones(2)

    def both():
        class Both(torch.nn.Module):
            def forward(self, x, *, shift):
                return x * 2 + shift
        return Both(), torch.ones(2), {"shift": torch.ones(1)}

    def layers():
        return torch.nn.LSTM(4, 6, num_layers=2), torch.ones(3, 1, 4)

    def masks():
        class Masks(torch.nn.Module):
            def forward(self, x):
                return (x > 0).cumsum(-1)
        return Masks(), torch.ones(2, 3)

    def numpy():
        class Numpy(torch.nn.Module):
            def forward(self, x, more):
                if type(x) is not torch.Tensor:
                    raise TypeError("no tensor of " + type(x).__name__)
                return torch.relu(x) * 2, {"sum": x + more["y"]}
        return Numpy(), (torch.ones(2, 3), {"y": torch.ones(3)})

    def inverse():
        class Inverse(torch.nn.Module):
            def forward(self, x):
                y = torch.linalg.inv(x) @ torch.linalg.inv(x.t())
                return torch.special.bessel_j0(y)
        return Inverse(), torch.eye(3)

    def no_inputs():
        return torch.nn.Linear(8, 4), ()
"""


@pytest.fixture
def in_factory_dir(torch, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_models", None)


@pytest.mark.parametrize("name", ["make", "by_keyword", "both"])
def test_a_factory_of_a_pytorch_module(name, in_factory_dir, check_import):
    path = list(sys.path)
    network = load(f"my_models:{name}")
    assert network.name == f"my_models-{name}"
    check_import(network)
    assert sys.path == path


def test_a_module_of_an_exported_program(torch, check_import):
    exported = torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),)).module()
    check_import(
        network_of_module(exported, (torch.ones(2, 4),), {}, name="net", shapes={}, source="net")
    )


def test_axes_may_count_from_the_last(torch, tmp_path, check_import):
    """Images with channels last, of a batch that a reshape would do for, and of a larger one."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = self.conv(x.permute(0, -1, 1, 2)).relu()
            return y.mean((-2, -1), keepdim=True).squeeze(-1).exp()

    for n_images in (1, 2):
        exported = torch.export.export(Net().eval(), (torch.randn(n_images, 6, 7, 3),))
        path = tmp_path / f"net{n_images}.pt2"
        torch.export.save(exported, str(path))
        network = load(str(path))
        check_import(network)
        assert prepare(network, resolve_target("cpu")).layout == "NHWC"


@pytest.mark.parametrize("name", ["relax", "network"])
def test_a_factory_of_a_relax_module(name, in_factory_dir):
    network = load(f"my_models:{name}")
    assert network.input_shapes == {"embedded": (1, 16, 32)}
    with pytest.raises(InvalidOptionError, match="no input x"):
        load(f"my_models:{name}", {"x": (1,)})
    assert load(f"my_models:{name}", {"embedded": [1, 16, 32]}).input_shapes == network.input_shapes
    with pytest.raises(InvalidOptionError, match=r"embedded has .* 1x16x32, where 32 is not 31"):
        load(f"my_models:{name}", {"embedded": [1, 16, 31]})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("my_models:nothing", "my_models has no function nothing"),
        ("no_such_module:make", "no_such_module of .* cannot be imported: ModuleNotFoundError"),
        ("broken:make", "broken of broken:make cannot be imported: ModuleNotFoundError"),
        ("my_models:torch", "has no function torch"),
        ("my_models:wrong", "returned Linear"),
        ("my_models:wronger", "returned a tuple with str"),
        ("my_models:unnamed", "returned weights of the type list; map the names"),
        ("my_models:fails", "my_models:fails failed: RuntimeError: no weights here"),
        (
            "my_models:branches",
            r"torch.export: .*torch.onnx.export: .*depends on data \(",
        ),
        ("my_models:inverse", r"linalg_inv_ex.default \(2 calls: no converter\).*bessel_j0"),
        ("my_models:no_inputs", "does not run with its example inputs: TypeError"),
    ],
)
def test_factories_that_do_not_work(what, text, in_factory_dir):
    with pytest.raises(InvalidOptionError, match=text) as caught:
        load(what)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.usefixtures("in_factory_dir")
@pytest.mark.parametrize(
    ("what", "package", "name", "outputs"),
    [
        ("layers", "onnx", "input", ["3x1x6 float32", "2x1x6 float32", "2x1x6 float32"]),
        ("masks", "onnxscript", "x", ["2x3 int64"]),  # TVM's importer counts in booleans
    ],
)
def test_what_tvm_cannot_import_goes_through_onnx(what, package, name, outputs, check_import):
    pytest.importorskip(package)
    network = load(f"my_models:{what}")
    assert list(network.input_shapes) == [name]
    found = check_import(network)
    assert [f"{shape_text(each.shape)} {each.dtype}" for each in found] == outputs


PUBLISHED = """
    import torch

    def encoder():
        from transformers import BertConfig, BertModel
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        model = BertModel(BertConfig(**sizes, intermediate_size=64, vocab_size=100))
        ones = torch.ones(1, 16, dtype=torch.int64)
        return model, {"input_ids": ones, "attention_mask": ones}

    def decoder():
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.cache_utils import DynamicCache
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        config = LlamaConfig(**sizes, intermediate_size=64, vocab_size=100)

        class Decoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = LlamaForCausalLM(config)

            def forward(self, ids, mask, past):
                cache = DynamicCache()
                for layer, (keys, values) in enumerate(past):
                    cache.update(keys, values, layer)
                found = self.model(ids, attention_mask=mask, past_key_values=cache)
                return found.logits, [(each.keys, each.values) for each in cache.layers]

        past = [tuple(torch.randn(2, 1, 4, 7, 8)) for _ in range(2)]
        integers = torch.int64
        ids, mask = torch.ones(1, 1, dtype=integers), torch.ones(1, 8, dtype=integers)
        return Decoder(), {"ids": ids, "mask": mask, "past": past}

    def backbone():
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
        model = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
        return model, torch.randn(1, 3, 64, 64)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "counts"),
    [
        ("encoder", "transformers", (2, 2)),
        ("decoder", "transformers", (6, 5)),
        ("backbone", "torchvision", (1, 5)),
    ],
)
def test_published_models(name, package, counts, in_factory_dir, check_import):
    pytest.importorskip(package)
    (in_factory_dir / "my_models.py").write_text(textwrap.dedent(PUBLISHED))
    network = load(f"my_models:{name}")
    assert (len(network.input_shapes), len(check_import(network))) == counts


@pytest.mark.usefixtures("in_factory_dir")
def test_what_cannot_be_exported_is_traced(check_import):
    network = load("my_models:numpy")
    assert list(network.input_shapes) == ["x", "more_y"]
    check_import(network)


def test_a_traced_module_is_compared_as_in_evaluation(torch, check_import):
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x):
            if type(x) is not torch.Tensor:
                raise TypeError("no tensor of " + type(x).__name__)
            return self.dropout(x) + 1

    module = Dropping().train()
    network = embedding.network_of(module, torch.ones(2, 64))
    check_import(network)
    assert module.training
    assert module.dropout.training


@pytest.mark.parametrize("is_file", [False, True])
def test_a_buffer_may_be_expanded(torch, tmp_path, check_import, is_file):
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("row", torch.arange(3.0).expand(2, 3))

        def forward(self, x):
            return x + self.row + 1

    if is_file:
        program = torch.export.export(Shifted(), (torch.ones(2, 3),))
        torch.export.save(program, str(tmp_path / "net.pt2"))
        check_import(load(str(tmp_path / "net.pt2")))
    else:
        check_import(embedding.network_of(Shifted(), torch.ones(2, 3)))


def test_what_is_written_to_a_view_of_an_expanded_buffer_is_undone(torch):
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("row", torch.arange(3.0).expand(2, 3))

        def forward(self, x):
            self.row[0].add_(1)  # of both rows, which PyTorch allows
            return x + self.row

    module = Writing()
    flat = flat_module(module, (torch.ones(2, 3),), {})
    for _ in range(2):
        (found,) = flat.run([np.ones((2, 3), "float32")])
        assert found.tolist() == [[2, 3, 4]] * 2
        assert module.row.tolist() == [[0, 1, 2]] * 2


def test_a_module_that_raises_keeps_its_state(torch):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            if float(x.sum()) < 0:
                raise ValueError("a negative sum")
            return x * 2

    module = Counting()
    flat = flat_module(module, (torch.ones(2),), {})
    with pytest.raises(ValueError, match="a negative sum"):
        flat.run([np.full(2, -1, "float32")])
    assert module.calls.item() == 0
    (doubled,) = flat.run([np.ones(2, "float32")])
    assert doubled.tolist() == [2, 2]


def test_threads_that_are_quiet_at_once_give_the_streams_back():
    before = sys.stdout, sys.stderr
    may_end = [threading.Event(), threading.Event()]
    began = threading.Event()

    def be_quiet(event):
        with quiet():
            began.set()
            event.wait(10)

    threads = [threading.Thread(target=be_quiet, args=(each,)) for each in may_end]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    time.sleep(0.1)  # it may enter now, if nothing keeps it
    for event, thread in zip(may_end, threads, strict=True):
        event.set()
        thread.join(10)
    assert (sys.stdout, sys.stderr) == before


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
