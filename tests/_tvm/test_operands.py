"""Which operators share their operands among results: TVM's own and those of networks."""

from __future__ import annotations

import pytest
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from benchmarks.starter.workloads import WORKLOADS
from tests._tvm.test_reduction_rule import module_of
from tvm_adaptive._tvm import IRModule
from tvm_adaptive._tvm.operands import batch_axes, reads_with_gaps, shares_operands


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
