"""Which operators share their operands among results: TVM's own and those of networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from benchmarks.starter.workloads import WORKLOADS
from tests._tvm.test_reduction_rule import module_of
from tvm_adaptive._tvm import IRModule, te
from tvm_adaptive._tvm.operands import batch_axes, reads_windows, reads_with_gaps, shares_operands


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("C1D", True),
        ("C2D", True),
        ("C3D", True),
        ("CAP", True),
        ("DEP", False),
        ("DIL", True),
        ("GMM", True),
        ("GRP", True),
        ("T2D", True),
        ("CBR", True),
        ("TBG", True),
        ("NRM", False),
        ("SFM", False),
    ],
)
def test_tvms_testing_workloads(name: str, expected: bool) -> None:
    mod = IRModule({"main": create_te_workload(name, 0)})
    assert shares_operands(mod) == expected
    assert reads_with_gaps(mod) == (name == "T2D")


def test_axes_of_a_batch_are_those_of_all_operands() -> None:
    def axes_of(name: str) -> list[bool]:
        return batch_axes(IRModule({"main": create_te_workload(name, 0)}))

    assert axes_of("GMM") == [True, False, False]
    assert axes_of("TBG") == [True, True, False, False]
    assert not any(axes_of("C2D")[:-1])
    # A place of a depthwise convolution's channel has a filter of its own.
    assert axes_of("DEP") == [False, False, False, True]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("conv-1x1", True),
        ("depthwise-3x3", False),
        ("max-pool", False),
        ("global-pool", False),
        ("dense-1-", False),
    ],
)
def test_operators_of_networks(prefix: str, expected: bool) -> None:
    assert any(each.name.startswith(prefix) for each in WORKLOADS)
    assert shares_operands(module_of(prefix)) == expected


def computed(
    shapes: list[tuple[int, ...]], reduced: list[int], shape: tuple[int, ...], terms: Any
) -> IRModule:
    """Return a function of sums over axes; ``terms`` takes two operands, these axes and a place."""
    operands = [te.placeholder(each, name=name) for each, name in zip(shapes, "ab", strict=True)]
    axes = [te.reduce_axis((0, n), name=f"r{i}") for i, n in enumerate(reduced)]
    result = te.compute(shape, lambda *at: te.sum(terms(*operands, *axes, *at), axis=axes))
    return IRModule({"main": te.create_prim_func([*operands, result])})


def vectors_of_a_batch() -> IRModule:
    shapes = [(12, 1, 64), (12, 64, 128)]
    return computed(shapes, [64], (12, 1, 128), lambda a, b, k, n, i, j: a[n, i, k] * b[n, k, j])


def product_with_a_column() -> IRModule:
    return computed(
        [(128, 512), (512, 1)], [512], (128, 1), lambda a, b, k, i, j: a[i, k] * b[k, j]
    )


def conv_to_one_channel() -> IRModule:
    return computed(
        [(1, 14, 14, 64), (1, 1, 64, 1)],
        [1, 1, 64],
        (1, 14, 14, 1),
        lambda a, b, y, x, c, n, i, j, o: a[n, i + y, j + x, c] * b[y, x, c, o],
    )


def depthwise_of_packed_channels() -> IRModule:
    return computed(
        [(1, 4, 16, 16, 8), (4, 3, 3, 8)],
        [3, 3],
        (1, 4, 14, 14, 8),
        lambda a, b, y, x, n, p, i, j, c: a[n, p, i + y, j + x, c] * b[p, y, x, c],
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: IRModule({"main": create_te_workload("DEP", 0)}), True),
        (lambda: module_of("depthwise-3x3"), True),
        (lambda: module_of("max-pool"), True),
        (depthwise_of_packed_channels, True),
        (vectors_of_a_batch, False),
        (product_with_a_column, False),
        (conv_to_one_channel, False),
    ],
)
def test_results_with_elements_of_their_own_have_them_in_windows_or_not(
    made: Callable[[], IRModule], expected: bool
) -> None:
    mod = made()
    assert not shares_operands(mod)
    assert reads_windows(mod) == expected
