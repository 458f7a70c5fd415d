"""Whole runs in which something takes longer than there is time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tvm_adaptive import tune_relax, tune_tir
from tvm_adaptive._tvm import load_module, nn, te_workload
from tvm_adaptive.models import Network, compile_network, prepare, run_exported, run_network
from tvm_adaptive.models.network import network_of_nn
from tvm_adaptive.runner import local
from tvm_adaptive.runner.playoff import verifier
from tvm_adaptive.tuning.checks import operators
from tvm_adaptive.tuning.config import DEFAULT, FinishConfig, MeasureConfig, SearchConfig
from tvm_adaptive.tuning.target import resolve_target

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUICK = DEFAULT.replace(
    search=SearchConfig(n_trials_per_round=4, population_size=16, genetic_num_iters=1),
    # Longer than the test may take: only the budget can end a run that hangs.
    measure=MeasureConfig(timeout_sec=900.0, build_timeout_sec=900.0, build_patience=None),
    finish=FinishConfig(top_k=1, n_qualifiers=0),
    store="none",
)
BUDGET_SEC = 30.0


def hang(*_args: Any, **_options: Any) -> None:
    time.sleep(900.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["candidates", "reference", "compiler"])
def test_a_run_ends_whatever_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "candidates":
        runner = local.AdaptiveRunner._cls
        measured = runner.__init__

        def make(self: Any, **options: Any) -> None:
            measured(self, **{**options, "measure": hang})

        monkeypatch.setattr(runner, "__init__", make)
    elif what == "reference":
        monkeypatch.setattr(verifier, "run_reference", hang)
    else:
        monkeypatch.setattr(operators, "export_function", hang)
    report = tune_tir(
        te_workload("GMM"), work_dir=tmp_path, budget_sec=BUDGET_SEC, seed=1, config=QUICK
    )
    assert report.elapsed_sec < 4 * BUDGET_SEC  # it ends, and does not hang
    (task,) = report.tasks
    if what == "candidates":
        assert (task.n_trials, task.n_errors) == (0, 0)
    if what in ("candidates", "reference"):
        assert not task.played_off
    if what == "compiler":
        assert report.comparison is None
        assert report.shortfall


class Chain(nn.Module):
    """A hundred convolutions and a hundred dense layers, each of another shape."""

    def __init__(self, n_layers: int = 100) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [nn.Conv2D(3 + i, 4 + i, 3, padding=1) for i in range(n_layers)]
        )
        widths = [3 + n_layers + 2 * i for i in range(n_layers + 1)]
        self.layers = nn.ModuleList([nn.Linear(widths[i], widths[i + 1]) for i in range(n_layers)])

    def forward(self, image: Any) -> Any:
        x = image
        for convolution in self.convolutions:
            x = nn.op.relu(convolution(x))
        x = nn.op.sum(x, axis=[2, 3])
        for layer in self.layers:
            x = nn.op.relu(layer(x))
        return x


def chain() -> Network:
    def draw(rng: np.random.Generator, _name: str, shape: tuple[int, ...]) -> Any:
        # Of a size that keeps two hundred layers from growing or vanishing.
        fan_in = max(1, int(np.prod(shape[1:])))
        return (rng.standard_normal(shape) * np.sqrt(2.0 / fan_in)).astype("float32")

    return network_of_nn("chain", Chain(), {"image": (1, 3, 12, 12)}, draw, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_minutes_for_two_hundred_tasks_end_with_a_correct_library(tmp_path: Path) -> None:
    network = chain()
    start_sec = time.monotonic()
    report = tune_relax(
        network.mod,
        network.params,
        work_dir=tmp_path,
        budget_sec=120.0,
        seed=1,
        config=DEFAULT.replace(store="none"),
        name="chain",
    )
    total_sec = time.monotonic() - start_sec
    assert len(report.tasks) > 200
    assert total_sec < 600.0  # 126 s where nothing else runs; it ends, and does not hang
    assert report.library is not None
    load_module(str(report.library))
    inputs = network.random_inputs(3)
    target = resolve_target("cpu")
    (found,) = run_exported(report.library, inputs)
    (expected,) = run_network(compile_network(prepare(network, target), None, target), inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())
