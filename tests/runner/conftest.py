"""A kernel to measure, and a farm of TVM's own servers to measure it on."""

from __future__ import annotations

import pytest
import tvm
from tvm import te
from tvm.s_tir.meta_schedule.arg_info import TensorInfo
from tvm.s_tir.meta_schedule.runner import RunnerInput
from tvm.support.tar import tar

from benchmarks.loopback_farm import LoopbackFarm, free_port

N = 64


@pytest.fixture(scope="session")
def matmul(tmp_path_factory):
    a, b = (te.placeholder((N, N), name=name) for name in "AB")
    k = te.reduce_axis((0, N))
    c = te.compute((N, N), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, c])})
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    path = tmp_path_factory.mktemp("artifact") / "matmul.tar"
    tvm.driver.build(mod, target=target).export_library(str(path), fcompile=tar)
    return RunnerInput(str(path), "cpu", [TensorInfo("float32", (N, N))] * 3)


@pytest.fixture
def make_farm():
    farms = []

    def make(n_servers, **options):
        farms.append(LoopbackFarm(n_servers, **options))
        return farms[-1]

    yield make
    for farm in farms:
        farm.close()


@pytest.fixture(scope="module")
def _farm():
    with LoopbackFarm(2) as farm:
        yield farm


@pytest.fixture
def farm(_farm):
    # One test's server that ended must not fail the tests after it.
    _farm.restart_ended()
    return _farm


@pytest.fixture
def unused_port():
    return free_port()
