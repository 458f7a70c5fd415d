"""Transforms of tiles have vectors that registers hold, and compute what they do without."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests._tvm.test_reduction_rule import context_of, drawn
from tests.models.forms.test_alternatives import network_of, prepared_of, relu
from tvm_adaptive._tvm import IRModule, args_info_of, build_tir, device, tensor
from tvm_adaptive._tvm.default_schedules import with_default_schedules
from tvm_adaptive.models import extract
from tvm_adaptive.tuning.target import resolve_target

TARGET = resolve_target("cpu")


def transforms_of(n_channels: int, height: int = 9, width: int = 10) -> dict[str, IRModule]:
    network = network_of(relu, shape=(1, n_channels, height, width), n_filters=n_channels)
    tasks = extract(prepared_of(network), TARGET)
    mods = {str(each.task_name): each.dispatched[0] for each in tasks}
    return {name: mod for name, mod in mods.items() if "_input_" in name or "_output_" in name}


def outputs_of(mod: IRModule) -> Any:
    """Return the last argument of a function after a call with random ones."""
    rng, where = np.random.default_rng(0), device("cpu")
    arguments = [
        tensor(rng.random([int(extent) for extent in info.shape], np.float32), where)
        for info in args_info_of(mod)
    ]
    build_tir(mod, target=TARGET)["main"](*arguments)
    return arguments[-1].numpy()


@pytest.mark.parametrize(("n_channels", "choices"), [(16, (4, 8, 16)), (64, (8, 16, 32))])
def test_trials_choose_the_columns_of_a_transform(
    n_channels: int, choices: tuple[int, ...]
) -> None:
    mods = transforms_of(n_channels)
    assert len(mods) == 4  # inputs and outputs of two sizes of tiles
    for mod in mods.values():
        (space,) = context_of(mod, reductions=True).generate_design_space()
        (inst,) = [i for i in space.trace.insts if i in space.trace.decisions]
        assert tuple(map(int, inst.attrs[0])) == choices
        (stock,) = context_of(mod, reductions=False).generate_design_space()
        assert not len(stock.trace.decisions)


@pytest.mark.parametrize("shape", [(1, 96, 20, 20), (1, 48, 13, 13), (1, 64, 56, 56)])
def test_vectors_stay_as_long_as_they_were_chosen(shape: tuple[int, ...]) -> None:
    for mod in transforms_of(*shape[1:]).values():
        context = context_of(mod, reductions=True)
        (space,) = context.generate_design_space()
        schedule = drawn(context, mod, space, 1)
        assert _vectors(schedule.mod) == [_chosen(schedule)]
        assert "T.parallel" in str(schedule.mod)


def _chosen(schedule: Any) -> int:
    """Return the columns of the only decision."""
    ((inst, decision),) = schedule.trace.decisions.items()
    return int(inst.attrs[0][int(decision)])


def _vectors(mod: IRModule) -> list[int]:
    """Return the lengths of the vectors of a function."""
    return [int(each) for each in re.findall(r"T\.vectorized\((?:T\.int64\()?(\d+)", str(mod))]


@pytest.mark.parametrize("n_channels", [20, 64])
def test_transforms_compute_the_same(n_channels: int) -> None:
    for name, mod in transforms_of(n_channels).items():
        expected = outputs_of(with_default_schedules(mod, TARGET))
        context = context_of(mod, reductions=True)
        (space,) = context.generate_design_space()
        found = {
            str(schedule.trace): outputs_of(schedule.mod)
            for schedule in (drawn(context, mod, space, seed) for seed in (1, 2, 3, 4))
        }
        assert n_channels == 20 or len(found) > 1, name
        for each in found.values():
            np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-5)
