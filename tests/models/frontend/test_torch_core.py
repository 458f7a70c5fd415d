"""Convolutional programs of PyTorch are put in core operators without tracing them anew."""

from __future__ import annotations

import pytest

from tvm_adaptive.models.frontend import torch_import
from tvm_adaptive.models.frontend.torch_core import core_of_plain
from tvm_adaptive.models.frontend.torch_program import network_of_module


@pytest.fixture
def block(torch):
    """A module with what convolutional networks consist of."""
    nn, f = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(8)
            self.inner = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
                nn.BatchNorm2d(8, affine=False, eps=0.1),
                nn.Hardswish(inplace=True),
            )
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
            self.rows = nn.Sequential(nn.LayerNorm(8, eps=0.01), nn.Linear(8, 4), nn.GELU())
            self.last = nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Linear(16, 5))

        def forward(self, image):
            x = f.relu(self.norm(self.first(image)), inplace=True)
            x = f.max_pool2d(x, 3, 2, 1)
            y = self.inner(x)
            y += x
            y = f.silu(y) * self.gate(y)
            z = f.relu6(f.avg_pool2d(y, 2, ceil_mode=True))
            pooled = torch.cat([y.mean((2, 3)), z.mean((2, 3))], 1)
            return self.last(torch.flatten(pooled, 1)), self.rows(y.permute(0, 2, 3, 1))

    torch.manual_seed(0)
    module = Block()
    module.norm.running_mean.uniform_(-1, 1)
    module.norm.running_var.uniform_(0.5, 2)
    return module.eval()


@pytest.fixture
def image(torch):
    return torch.randn(1, 3, 30, 30)


def test_what_networks_consist_of_needs_no_trace(torch, block, image, check_import, monkeypatch):
    program = torch.export.export(block, (image,))
    names = [node.target for node in program.graph.nodes]
    core = core_of_plain(program)
    assert core is not None
    assert [node.target for node in program.graph.nodes] == names  # is left as it is
    found = {getattr(node.target, "__name__", "") for node in core.graph.nodes}
    assert not {name for name in found if "_." in name}
    assert {"conv2d.default", "_native_batch_norm_legit_no_training.default"} <= found

    def never(_program):
        raise AssertionError("traced")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", never)
    check_import(network_of_module(block, (image,), {}, name="net", shapes={}, source="net"))


def test_both_ways_compute_the_same(torch, block, image, check_import, monkeypatch):
    quick = check_import(
        network_of_module(block, (image,), {}, name="net", shapes={}, source="net")
    )
    monkeypatch.setattr(torch_import, "core_of_plain", lambda _program: None)
    traced = check_import(
        network_of_module(block, (image,), {}, name="net", shapes={}, source="net")
    )
    for ours, theirs in zip(quick, traced, strict=True):
        assert abs(ours - theirs).max() < 1e-5


def refused(torch, function, *inputs):
    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return core_of_plain(torch.export.export(Module(), inputs)) is None


@pytest.mark.parametrize(
    "case", ["read again", "a view of it", "an input", "another operator", "training", "a size"]
)
def test_what_is_not_plain_is_left_to_pytorch(torch, case):
    f, x = torch.nn.functional, torch.randn(2, 4, 6, 6)
    functions = {
        "read again": lambda x: (y := x + 1.0) * 2.0 + f.relu(y, inplace=True),
        "a view of it": lambda x: f.relu((x + 1.0).flatten(1), inplace=True),
        "an input": lambda x: f.relu(x, inplace=True),
        "another operator": lambda x: torch.fft.rfft(x).real,
        "training": lambda x: f.dropout(x, 0.5, training=True),
        "a size": lambda x: f.adaptive_avg_pool2d(x, 2),
    }
    assert refused(torch, functions[case], x)


def test_batch_normalisation_in_training_is_left_to_pytorch(torch):
    program = torch.export.export(torch.nn.BatchNorm2d(4), (torch.randn(2, 4, 6, 6),))
    assert core_of_plain(program) is None
