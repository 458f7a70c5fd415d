"""A network whose product prefetches its weights computes the same as before."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.prefetch.conftest import (
    N_COLUMNS,
    N_ROWS,
    N_SUMMED,
    ROWS_INSIDE,
    record_of_schedule,
    tiled,
)
from tvm_adaptive._tvm import copy_record, memory_database, nn
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.models import Network, compile_network, extract, prepare, run_network
from tvm_adaptive.models.network import network_of_nn
from tvm_adaptive.models.prefetch import hinted
from tvm_adaptive.tuning.target import resolve_target


class _Product(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        self.linear = nn.Linear(N_SUMMED, N_COLUMNS, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.linear(x)


@pytest.fixture
def network() -> Network:
    return network_of_nn(
        "product",
        _Product(),
        {"x": (N_ROWS, N_SUMMED)},
        lambda rng, _, shape: rng.standard_normal(shape).astype("float32"),
        seed=0,
    )


def test_a_network_prefetches_as_its_database_says(network: Network) -> None:
    target = resolve_target("cpu")
    prepared = prepare(network, target, prepack=True)
    (task,) = extract(prepared, target)
    (mod,) = task.dispatched
    plain = record_of_schedule(tiled(mod, ROWS_INSIDE), mod)
    form = hinted(plain, weights_of(mod))[0]
    inputs = network.random_inputs(seed=1)
    outputs, has_prefetches = [], []
    for record in (plain, form):
        database = memory_database()
        copy_record(record, database)
        compiled = compile_network(prepared, database, target)
        assert compiled.coverage.fallback == {}
        outputs.append(run_network(compiled, inputs)[0])
        libraries = [compiled.executable.mod, *compiled.executable.mod.imports]
        text = "".join(each.inspect_source("asm") for each in libraries if each.kind == "llvm")
        has_prefetches.append("prefetch" in text or "prfm" in text)
    assert has_prefetches == [False, True]
    assert np.array_equal(outputs[0], outputs[1])
    weights = network.params["linear.weight"].numpy()
    np.testing.assert_allclose(outputs[0], inputs[0] @ weights.T, rtol=1e-4, atol=1e-4)
