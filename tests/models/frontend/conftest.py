"""Real architectures with few channels and random weights, as ONNX graphs and in PyTorch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.frontend.reader import ModelReader
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.target import resolve_target


class SharedReader(ModelReader):
    """A worker that starts once for all tests: each start imports TVM."""

    def close(self):
        """Stay."""


@pytest.fixture(scope="session")
def shared_reader():
    reader = SharedReader()
    yield reader
    ModelReader.close(reader)


@pytest.fixture(autouse=True)
def _use_shared_reader(shared_reader, monkeypatch):
    # The package has a function of the module's name.
    module = sys.modules["tvm_adaptive.models.frontend.load"]
    monkeypatch.setattr(module, "ModelReader", lambda: shared_reader)


@pytest.fixture(scope="session")
def check_import():
    """Compile a network without tuning and compare it with its original."""

    def check(network, seed=0):
        target = resolve_target("cpu")
        compiled = compile_network(prepare(network, target), None, target)
        inputs = network.inputs(seed)
        outputs = run_network(compiled, inputs)
        assert network.original is not None
        expected = network.original.run(inputs)
        assert [each.shape for each in outputs] == [each.shape for each in expected]
        # Not exactly: where a sigmoid is next to zero, the framework's error is larger.
        assert network.problem_beside_framework(outputs, expected, DEFAULT.finish.rtol) is None
        assert all(np.abs(each).max() > 0 for each in expected)
        return outputs

    return check


class Graph:
    """An ONNX graph as it grows; a weight is drawn when it is first needed."""

    def __init__(self, onnx, seed=0):
        self._onnx = onnx
        self._rng = np.random.default_rng(seed)
        self._nodes, self._weights = [], []

    def weight(self, *shape, scale=None):
        fan = np.prod(shape[1:]) if len(shape) > 1 else 1
        value = self._rng.standard_normal(shape) * (fan**-0.5 if scale is None else scale)
        return self.constant(value.astype("float32"))

    def constant(self, value):
        name = f"w{len(self._weights)}"
        self._weights.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def __call__(self, operator, *inputs, **attributes):
        name = f"t{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [name], **attributes))
        return name

    def conv(self, x, c_in, c_out, size=3, stride=1, *, group=1):
        pads = [size // 2] * 4
        w = self.weight(c_out, c_in // group, size, size)
        x = self("Conv", x, w, pads=pads, strides=[stride] * 2, group=group)
        one = self.constant(np.ones(c_out, "float32"))
        mean = self.weight(c_out, scale=0.1)
        return self("BatchNormalization", x, one, mean, mean, one)

    def linear(self, x, n_in, n_out):
        # As PyTorch would write it: scaled like a matrix whose rows are outputs.
        w = self.constant((self._rng.standard_normal((n_in, n_out)) * n_in**-0.5).astype("float32"))
        return self("Add", self("MatMul", x, w), self.weight(n_out, scale=0.1))

    def model(self, inputs, outputs):
        make, kinds = self._onnx.helper, self._onnx.TensorProto
        infos = [
            make.make_tensor_value_info(name, getattr(kinds, kind), shape)
            for name, kind, shape in inputs
        ]
        results = [make.make_tensor_value_info(name, kinds.FLOAT, None) for name in outputs]
        graph = make.make_graph(self._nodes, "net", infos, results, self._weights)
        # Older runtimes read these.
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])
        model.ir_version = 9
        return model


def resnet(onnx, batch=1):
    g = Graph(onnx)
    x = g("Relu", g.conv("image", 3, 8, 7, 2))
    x = g("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 8
    for out, stride in ((8, 1), (16, 2), (32, 2)):
        short = x if stride == 1 else g.conv(x, width, out, 1, stride)
        y = g("Relu", g.conv(x, width, out, 3, stride))
        x = g("Relu", g("Add", g.conv(y, out, out), short))
        width = out
    x = g("Flatten", g("GlobalAveragePool", x))
    x = g("Gemm", x, g.weight(10, width), g.weight(10, scale=0.1), transB=1)
    return g.model([("image", "FLOAT", [batch, 3, 32, 32])], [x])


def mobilenet(onnx, batch=1):
    g = Graph(onnx)
    low, high = g.constant(np.float32(0)), g.constant(np.float32(6))

    def relu6(x):
        return g("Clip", x, low, high)

    x = relu6(g.conv("image", 3, 8, 3, 2))
    for width, out, stride in ((8, 8, 1), (8, 12, 2), (12, 12, 1)):
        y = relu6(g.conv(x, width, 6 * width, 1))
        y = relu6(g.conv(y, 6 * width, 6 * width, 3, stride, group=6 * width))
        y = g.conv(y, 6 * width, out, 1)
        x = g("Add", x, y) if (stride, width) == (1, out) else y
    x = g("Reshape", g("ReduceMean", x, axes=[2, 3]), g.constant(np.array([0, -1])))
    return g.model([("image", "FLOAT", [batch, 3, 32, 32])], [g.linear(x, 12, 10)])


def encoder(onnx, batch=1):
    hidden, heads, length, words = 32, 4, 16, 50
    g = Graph(onnx)

    def normed(x):
        ones = g.constant(np.ones(hidden, "float32"))
        return g("LayerNormalization", x, ones, g.weight(hidden, scale=0.1), axis=-1)

    def split(x, perm):
        shape = g.constant(np.array([0, length, heads, hidden // heads]))
        return g("Transpose", g("Reshape", x, shape), perm=perm)

    x = g("Add", g("Gather", g.weight(words, hidden, scale=1.0), "ids"), g.weight(length, hidden))
    for _ in range(2):
        query = split(g.linear(x, hidden, hidden), [0, 2, 1, 3])
        key = split(g.linear(x, hidden, hidden), [0, 2, 3, 1])
        value = split(g.linear(x, hidden, hidden), [0, 2, 1, 3])
        scores = g("Mul", g("MatMul", query, key), g.constant(np.float32(heads / hidden) ** 0.5))
        mixed = g("MatMul", g("Softmax", scores, axis=-1), value)
        mixed = g("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = g("Reshape", mixed, g.constant(np.array([0, length, hidden])))
        x = normed(g("Add", x, g.linear(mixed, hidden, hidden)))
        inner = g.linear(x, hidden, 4 * hidden)
        erf = g("Erf", g("Mul", inner, g.constant(np.float32(0.5**0.5))))
        gelu = g("Mul", g("Mul", inner, g.constant(np.float32(0.5))), g("Add", erf, one(g)))
        x = normed(g("Add", x, g.linear(gelu, 4 * hidden, hidden)))
    return g.model([("ids", "INT64", [batch, length])], [x])


def one(g):
    return g.constant(np.float32(1))


@pytest.fixture(scope="session")
def onnx_models():
    """The architectures by name; called with onnx and a batch they give a model."""
    return {"resnet": resnet, "mobilenet": mobilenet, "encoder": encoder}


@pytest.fixture(scope="session")
def onnx():
    return pytest.importorskip("onnx")


@pytest.fixture
def onnx_file(onnx, onnx_models, tmp_path):
    """Write one of the architectures to a file."""

    def write(name, batch=1) -> Path:
        path = tmp_path / f"{name}.onnx"
        onnx.save(onnx_models[name](onnx, batch), str(path))
        return path

    return write


@pytest.fixture
def only_basic_optimisations(monkeypatch):
    """Let ONNX Runtime fail where it is to apply more than its basic optimisations."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession

    def opened(model, options, **how):
        if options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_ENABLE_BASIC:
            raise RuntimeError("a name which does not exist: InsertedPrecisionFreeCast_x")
        return session(model, options, **how)

    monkeypatch.setattr(ort, "InferenceSession", opened)


@dataclasses.dataclass(frozen=True)
class TorchModel:
    module: object
    inputs: tuple


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


@pytest.fixture
def torch_models(torch):
    """The same architectures as PyTorch has them, with example inputs."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, c_in, c_out, stride):
            super().__init__()
            self.one = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
            self.norm = nn.BatchNorm2d(c_out)
            self.two = nn.Conv2d(c_out, c_out, 3, 1, 1)
            self.short = nn.Conv2d(c_in, c_out, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            y = torch.relu(self.norm(self.one(x)))
            return torch.relu(self.two(y) + self.short(x))

    class Inverted(nn.Module):
        def __init__(self, width):
            super().__init__()
            inner = 6 * width
            self.body = nn.Sequential(
                nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6(),
                nn.Conv2d(inner, inner, 3, 1, 1, groups=inner), nn.ReLU6(),
                nn.Conv2d(inner, width, 1),
            )  # fmt: skip

        def forward(self, x):
            return x + self.body(x)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids, scale):
            hidden = self.layers(self.words(ids)) * scale
            return {"hidden": hidden, "pooled": hidden.mean(1)}

    torch.manual_seed(0)
    image = torch.randn(1, 3, 32, 32)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return {
        "resnet": TorchModel(
            nn.Sequential(
                nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2), *pool, nn.Linear(32, 10),
            ),
            (image,),
        ),
        "mobilenet": TorchModel(
            nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), Inverted(8), Inverted(8), *pool,
                nn.Linear(8, 10),
            ),
            (image,),
        ),
        "encoder": TorchModel(
            Encoder(), (torch.randint(0, 50, (1, 16)), torch.full((1, 1, 1), 0.5))
        ),
    }  # fmt: skip
