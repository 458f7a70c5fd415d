"""What TVM's converters misread in programs of PyTorch: all is as PyTorch computes it."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.frontend import torch_import
from tvm_adaptive.models.frontend.torch_program import network_of_module
from tvm_adaptive.tuning.target import resolve_target


def places(torch, x):
    picked = x[:, torch.tensor([-1, 0, -2])]
    return x[:, -1], x.select(-1, -2), picked, x[:, :, torch.tensor([1, -1])]


def scaled_sums(torch, x):
    y = torch.add(x, x.sin(), alpha=0.25) - torch.sub(x, 2.0, alpha=3)
    whole = torch.arange(5) + 1
    return (y + 1).add_(x, alpha=-0.5), torch.add(x, whole, alpha=0.5)


def scaled_exponentials(torch, x):
    f = torch.nn.functional
    return f.selu(x), f.celu(x, alpha=0.5), f.elu(x, alpha=2.0)


def nearest_of_a_size(torch, x):
    return torch.nn.functional.interpolate(x, size=(7, 5), mode="nearest")


def every_second(torch, x):
    return torch.nn.functional.interpolate(x, scale_factor=0.5, mode="nearest")


def by_a_factor(torch, x):
    return torch.nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear")


def corner_to_corner(torch, x):
    resize = torch.nn.functional.interpolate
    return resize(x, scale_factor=1.5, mode="bilinear", align_corners=True)


def smoothed_images(torch, x):
    return torch.nn.functional.interpolate(x, size=(3, 3), mode="bilinear", antialias=True)


def sums_of_windows(torch, x):
    pool = torch.nn.functional.avg_pool2d
    return pool(x, 2, divisor_override=1), pool(x, (3, 2), 1, 1, False, False, 5)


def lengths(torch, x):
    whole = (4 * x).long()
    narrow = whole.int()
    by_tensors = whole.clamp(min=torch.tensor(1)), whole.clamp(torch.tensor(-1), torch.tensor(2))
    by_tensors += narrow.clamp(max=torch.tensor(2, dtype=torch.int32)), x.clamp(x * x, x + 1)
    by_tensors += (x[0, 0, 0].clamp(x[0, 0, 0] - 1, x[0, 0]),)
    numbers = whole.clamp(min=1), narrow.clamp(max=2), whole.clamp_min(-1), narrow.clamp(-3, 2)
    return *numbers, *by_tensors


def places_of_a_grid(torch, x):
    return x[:, :, torch.tensor([[4], [0], [2]]), torch.tensor([[1, 3]])]


def places_in_pairs(torch, x):
    i, j = torch.tensor([[0, 1, 2]]), torch.tensor([[4], [0], [2]])
    return x[:, i, j], x[:, torch.tensor([0, 2]), torch.tensor([1, 4])]


def aligned_regions(torch, x):
    ops = pytest.importorskip("torchvision").ops
    regions = torch.tensor([[0.0, 1.0, 2.0, 30.0, 40.0], [1.0, 5.0, 0.0, 60.0, 50.0]])
    return ops.roi_align(x, regions, (3, 3), 1 / 16, 2, aligned=True)


def normal_by_the_batch(torch, x):
    return torch.nn.functional.batch_norm(x, None, None, training=True)


def normal_by_image(torch, x):
    return torch.nn.functional.instance_norm(x)


def fractions(torch, x):
    whole = (4 * x).long()
    less = whole < 0.5, whole <= -0.5, whole > 0.5, whole >= 0.5, whole == 0.5, whole != 0.5
    never = (whole == torch.nan) | ((x > 0) == 2) | ((x > 0) > 1.5)
    less = *less[:4], less[4] | less[5]
    tenth = torch.full((5,), 0.1) == torch.tensor(0.1, dtype=torch.float64)
    return (*less, whole < 2.0, whole < float("inf"), ~never, (x > 0) < 2, tenth & (x < 9))


def nearest_by_a_factor(torch, x):
    resize = torch.nn.functional.interpolate
    return [resize(x, scale_factor=factor, mode="nearest") for factor in (2.1, 3.1, (1.7, 2.1))]


def written_numbers(torch, x):
    i, j = torch.tensor([0, 1, 0]), torch.tensor([0, 2, 1])
    one, row, twice = x.clone(), x.clone(), x.clone()
    one[i, j] = 0.0
    row[i, :, torch.tensor([1, 4, 2])] = x[0, :, :3].permute(1, 0, 2)
    return one, row, twice.index_put((i, torch.tensor([0, 2, 0])), x[0, 0], accumulate=True)


def written_alike(torch, x):
    x = x.clone()
    i, j = torch.tensor([0, 1]), torch.tensor([2, 0])
    x[i, j, torch.tensor([[1], [3]]), 2 * j] = x[0, 0, :2, :2] + 9
    return x


def scattered(torch, x):
    index = torch.tensor([[[[1], [0]], [[2], [5]]]])  # 1 x 2 x 2 x 1
    return x.scatter(2, index, x[:1, :2, :2, :1]), x.scatter(2, index, 7.0)


def scattered_alike(torch, x):
    index = torch.arange(60).reshape(2, 3, 2, 5) % 6
    return x.scatter(2, index, x[:, :, :2]), x.scatter(2, index, 7.0)


def long_sums(torch, x):
    many = torch.ones(200, dtype=torch.int8) + (x[0, 0, 0, 0] > 99).to(torch.int8)
    sums = many.cumsum(0), many.sum(), many.sum(0, keepdim=True), many[:3].cumprod(0)
    return *sums, torch.ones(4096, dtype=torch.float16).cumsum(0, dtype=torch.float16)


def long_products(torch, x):
    return (2 * (x[0, 0, 0, 0] < 99).int()).expand(40).prod()


def norms_of_halves(torch, x):
    half = (x.sign() * torch.tensor([300.0, 4e-4, 20.0, 1.0, 60.0])).half()
    columns = half.expand(200, 2, 3, 6, 5).permute(1, 2, 3, 4, 0)
    unit = torch.nn.functional.normalize(columns, dim=-1)
    return columns.norm(dim=-1), unit, half.norm(p=1), half.norm(dim=1, dtype=torch.float32)


def truth_values(torch, x):
    m, n = x > 0, x < 1
    pairs = m * n, m + n, m == n, m != n, m <= n, torch.maximum(m, n), torch.minimum(m, n)
    return *pairs, m * True, m + False, m > 0, m == 0, m != True, m.max(), (x < 99).min()  # noqa: E712


def sorted_numbers(torch, x):
    whole = (8 * x.abs()).to(torch.uint8)
    largest = x.bfloat16().topk(2, -1).values, whole.topk(2, 1).values, (x > 0).max(1).values
    return *largest, whole.sort(-1).values, whole.to(torch.int16).max(2).values


def whole_powers(torch, x):
    return 2 ** (4 * x).long().clamp(0, 8)


def a_single_place(torch, x):
    resize = torch.nn.functional.interpolate
    return resize(x, size=(1, 5), mode="bilinear", align_corners=True)


def rows_of_memory(torch, x):
    return torch.as_strided(x, (6, 30), (30, 1)).cos()


def windows_of_columns(torch, x):
    return x[0, 0].t().unfold(0, 5, 5).cos()


def refuse(*_arguments, **_options):
    raise NotImplementedError("not needed")


BY_TVM = [places, scaled_sums, normal_by_image, sums_of_windows, corner_to_corner, lengths]
BY_TVM += [places_of_a_grid, fractions, written_alike, scattered_alike, nearest_by_a_factor]
BY_TVM += [long_sums, long_products, rows_of_memory, norms_of_halves]
BY_TVM += [truth_values, sorted_numbers]
BY_ANY = [scaled_exponentials, nearest_of_a_size, every_second, by_a_factor, smoothed_images]
BY_ANY += [places_in_pairs, aligned_regions, written_numbers, scattered]
BY_ANY += [whole_powers, a_single_place, windows_of_columns]


@pytest.mark.parametrize("compute", [*BY_TVM, *BY_ANY, normal_by_the_batch])
def test_the_results_are_those_of_pytorch(torch, compute, check_import, monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, x):
            return compute(torch, x)

    if compute in BY_TVM:
        monkeypatch.setattr(torch_import, "_by_onnx", refuse)
    shape = (2, 3, 6, 5) if compute is not normal_by_image else (1, 3, 6, 5)
    torch.manual_seed(0)
    inputs = (torch.randn(shape),)
    check_import(network_of_module(Model().eval(), inputs, {}, name="net", shapes={}, source="net"))


def near_zero(torch, x):
    softplus = torch.nn.functional.softplus
    small = torch.tensor([-110.0, -40.0, -20.0, -5.0, -1e-8, 0.0, 1e-30, 1e-8, 2e-3, 1.5, 60.0])
    many = torch.cat([small, torch.arange(-50.0, 51.0) / 50.0]) * x
    extreme = torch.tensor([torch.inf, -torch.inf, torch.nan, -1.0, 1e38]) * x
    inverse = torch.log(-torch.expm1(-many.abs() - 1e-8))
    logarithms = torch.log1p(many.abs()), torch.log1p(extreme), torch.log1p(many.half())
    powers = torch.expm1(many), torch.expm1(extreme), torch.expm1((3 * many).long())
    tangent = torch.atanh(many.abs() / 200 + 1e-8).log()
    ends = torch.atanh(torch.tensor([1.0, -1.0, 2.0, 0.0]) * x)
    return softplus(many).log(), inverse, tangent, ends, *logarithms, *powers


def without_numbers(torch, x):
    v = torch.tensor([torch.nan, -2.0, 0.5, 3.0]) * x
    f, bound = torch.nn.functional, 0.0 * torch.tensor([1.0, 2.0, 3.0, 4.0]) * x
    clipped = v.clamp(0, 1), v.clamp(min=0.0), v.clamp(bound, bound + 1), f.hardtanh(v)
    return *clipped, torch.where(v != v, 0.0, v), v == v  # noqa: PLR0124


def infinite_extremes(torch, x):
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * x
    y, half = y.masked_fill(y > 2.5, -torch.inf), (y + 9).masked_fill(y > -9, -torch.inf).half()
    return (y - torch.inf).max(), (torch.inf - y).min(), half.max(), y.max(), y.double().min()


def exact_multiples(torch, x):
    tenths = torch.tensor([1.0, 2.0, -1.0, 0.3, -0.3, 0.0, 7.7, 1e6, -1e6, 123.4]) * x
    steps = torch.tensor([0.1, -0.1, 0.25, -3.0, 0.1, 0.2, 7.7, 3.0, 0.7, -0.2]) * x
    floor = {"rounding_mode": "floor"}
    floors = torch.div(tenths, 0.1, **floor), tenths // -0.1, torch.div(tenths, steps, **floor)
    floors += tenths // steps, tenths // (0.0 * steps), torch.div(tenths, 0.1)
    rests = tenths.remainder(0.1), tenths % -0.3, tenths % steps, tenths % torch.inf
    whole = tenths.long()
    return *floors, *rests, whole % 0.3, whole // 0.3, whole % 3, whole // -3


@pytest.mark.parametrize(
    "compute", [near_zero, exact_multiples, without_numbers, infinite_extremes]
)
def test_nothing_is_lost_to_rounding(torch, compute, monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, x):
            return compute(torch, x)

    monkeypatch.setattr(torch_import, "_by_onnx", refuse)
    x, target = torch.ones(1), resolve_target("cpu")
    network = network_of_module(Model(), (x,), {}, name="net", shapes={}, source="net")
    found = run_network(compile_network(prepare(network, target), None, target), [x.numpy()])
    for number, (each, expected) in enumerate(zip(found, Model()(x), strict=True)):
        rtol = 1e-3 if expected.dtype == torch.float16 else 2e-6
        # The first three are logarithms of what may be lost.
        atol = 1e-6 if compute is near_zero and number < 3 else 0.0
        np.testing.assert_allclose(each, expected, rtol, atol, err_msg=f"output {number}")


def test_whole_factors_need_no_other_way(torch, check_import, monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, x):
            resize = torch.nn.functional.interpolate
            return resize(x, scale_factor=3, mode="nearest"), resize(x, (12, 5), mode="bilinear")

    monkeypatch.setattr(torch_import, "_by_onnx", refuse)
    inputs = (torch.randn(1, 3, 6, 5),)
    check_import(network_of_module(Model().eval(), inputs, {}, name="net", shapes={}, source="net"))


def test_double_precision_is_kept(torch):
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.mm(x, x.t())

    x = torch.randn((3, 4), dtype=torch.float64)
    network = network_of_module(Model(), (x,), {}, name="net", shapes={}, source="net")
    target = resolve_target("cpu")
    compiled = compile_network(prepare(network, target), None, target)
    (found,) = run_network(compiled, [x.numpy()])
    np.testing.assert_allclose(found, (x @ x.t()).numpy(), rtol=1e-13)


@pytest.mark.parametrize("case", ["argument", "part"])
def test_views_of_memory_in_another_order_are_refused(torch, case):
    class Model(torch.nn.Module):
        def forward(self, x):
            if case == "part":
                return torch.as_strided(x[2:], (4, 8), (8, 1), 0).cos()
            return torch.as_strided(x, (4, 8), (8, 1)).cos()

    x = torch.randn(8, 4) if case == "part" else torch.randn(4, 8).t()
    with pytest.raises(InvalidOptionError, match=r"calls torch\.as_strided"):
        network_of_module(Model(), (x,), {}, name="net", shapes={}, source="net")


@pytest.mark.parametrize("name", ["randn_like", "bernoulli"])
def test_random_numbers_are_refused(torch, name):
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + (torch.randn_like(x) if name == "randn_like" else torch.bernoulli(x, 0.5))

    with pytest.raises(InvalidOptionError, match="random"):
        network_of_module(Model(), (torch.rand(3),), {}, name="net", shapes={}, source="net")


def test_a_model_on_another_device_is_refused(torch):
    model = torch.nn.Linear(3, 3, device="meta")
    x = torch.rand((2, 3), device="meta")
    with pytest.raises(InvalidOptionError, match=r"is on meta.*\.cpu\(\)"):
        network_of_module(model, (x,), {}, name="net", shapes={}, source="net")
