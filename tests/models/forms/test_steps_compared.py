"""The steps of other forms are judged by what the direct convolution computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.forms.test_alternatives import network_of, prepared_of
from tests.models.test_compare_calls import changed, nothing
from tvm_adaptive._tvm import relax
from tvm_adaptive.models import compile_network, export
from tvm_adaptive.models.compare_calls import ComparedCalls, compare_calls
from tvm_adaptive.tuning.checks.functions import compared_outputs
from tvm_adaptive.tuning.target import resolve_target

Compare = Callable[..., ComparedCalls]
STEPS = ("input", "product", "output")


def again(builder: Any, y: Any, _x: Any) -> Any:
    """Convolve the activated result with other weights, and sum it up."""
    kernel = np.random.default_rng(1).standard_normal((16, 16, 3, 3)).astype("float32")
    active = builder.emit(relax.op.nn.relu(y))
    second = builder.emit(relax.op.nn.conv2d(active, relax.const(kernel), padding=1))
    return relax.op.mean(builder.emit(relax.op.nn.relu(second)), [2, 3])


@pytest.fixture(scope="module", params=["winograd-2x2", "winograd-4x4"])
def compare(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Compare a network in another form, of which the functions of a step may be changed."""
    target, network = resolve_target("cpu"), network_of(again)
    prepared, folder = prepared_of(network), tmp_path_factory.mktemp("builds")
    alternatives = prepared.alternatives
    assert alternatives is not None
    forms = {key.group: request.param for key in alternatives.keys.values()}
    steps = alternatives.steps(forms)
    assert len(steps) == 2
    mod = alternatives.applied(prepared.mod, forms)
    export(compile_network(prepared, None, target), folder / "direct.so")

    def compared(idle_step: str = "none", **options: Any) -> ComparedCalls:
        other, path = mod, folder / f"{idle_step}.so"
        for name in {each for those in steps.values() for each in those if idle_step in each}:
            other = changed(other, name, nothing)
        if not path.exists():
            built = dataclasses.replace(prepared, mod=other, alternatives=None)
            export(compile_network(built, None, target), path)
        return compare_calls(
            (str(folder / "direct.so"), str(path)),
            network.inputs(0),
            "cpu",
            compared_outputs(prepared.mod, steps),
            1e-3,
            steps=steps,
            **options,
        )

    return compared


def test_all_steps_are_compared_and_timed(compare: Compare) -> None:
    found = compare()
    assert found.problems == {}
    for step in STEPS:
        names = [name for name in found.n_compared if step in name]
        assert names
        assert all(found.n_compared[name] >= 1 for name in names)
        assert all(found.seconds[name] > 0.0 for name in names)


@pytest.mark.parametrize("idle_step", STEPS)
def test_a_step_that_writes_nothing_is_a_problem_of_its_form_alone(
    compare: Compare, idle_step: str
) -> None:
    found = compare(idle_step)
    # What follows gets the right values.
    assert all("winograd" in name for name in found.problems)
    assert {step for step in STEPS for name in found.problems if step in name} == set(STEPS)


def test_a_step_that_is_not_run_makes_its_form_wrong(compare: Compare, tmp_path: Path) -> None:
    progress = tmp_path / "function"
    whole = compare(progress_file=str(progress))
    assert progress.read_text() == ""
    (product,) = (name for name in whole.n_compared if "product" in name)
    found = compare(skipped=(product,))
    assert product in found.problems
    assert product not in found.seconds
