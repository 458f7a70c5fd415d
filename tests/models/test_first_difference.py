"""Which function of two builds of a network is the first to compute something else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import te

from tvm_adaptive._tvm import IRModule, PrimFunc, without_bodies
from tvm_adaptive.models import compile_network, export
from tvm_adaptive.models import first_difference as its_file
from tvm_adaptive.models.first_difference import first_difference
from tvm_adaptive.models.prepare import output_counts


@pytest.fixture(scope="module")
def builds(cases, tmp_path_factory):
    """A small encoder without tuning, tuned with packed weights, and with one wrong function."""
    case = cases["transformer"]
    folder = tmp_path_factory.mktemp("builds")
    mod = case.prepared["prepack"].mod
    names = list(output_counts(mod))  # in the order of their first calls
    idle = names[0]
    wrong = next(name for name in names[len(names) // 2 :] if keeps_shape(mod[name]))
    compiled = {
        "untuned": case.untuned["prepack"],
        "tuned": case.tuned["prepack"],
        "wrong": built(case, changed(mod, wrong, doubled)),
        "idle": built(case, changed(mod, idle, nothing)),
    }
    for name, each in compiled.items():
        export(each, folder / f"{name}.so")

    def compare(name):
        paths = (str(folder / "untuned.so"), str(folder / f"{name}.so"))
        return first_difference(paths, case.inputs, "cpu", output_counts(mod), 1e-3)

    return {"compare": compare, "wrong": wrong, "idle": idle}


def built(case, mod):
    prepared = dataclasses.replace(case.prepared["prepack"], mod=mod)
    return compile_network(prepared, None, case.target)


def changed(mod, name, change):
    functions = {
        variable: change(function).with_attr("global_symbol", name)
        if str(variable.name_hint) == name
        else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


def keeps_shape(function: PrimFunc) -> bool:
    shapes = [list(map(int, each.ty.shape)) for each in function.params]
    return shapes[0] == shapes[-1]


def doubled(function: PrimFunc) -> PrimFunc:
    """Return a function of the same arguments that doubles the first one."""
    inputs = [
        te.placeholder(tuple(map(int, each.ty.shape)), str(each.ty.dtype), f"x{place}")
        for place, each in enumerate(function.params[:-1])
    ]
    result = te.compute(inputs[0].shape, lambda *place: inputs[0](*place) * 2, "twice")
    return te.create_prim_func([*inputs, result])


def nothing(function: PrimFunc) -> PrimFunc:
    (idle,) = without_bodies(IRModule({"main": function})).functions.values()
    return idle


def test_builds_that_agree_have_none(builds):
    assert builds["compare"]("tuned") is None


@pytest.mark.parametrize("kept_bytes", [1, 10_000, 1 << 28])
def test_the_first_wrong_function_is_named(builds, monkeypatch, kept_bytes):
    monkeypatch.setattr(its_file, "_KEPT_BYTES", kept_bytes)
    found = builds["compare"]("wrong")
    assert found.function == builds["wrong"]
    assert "values are wrong, first at [0, 0" in found.problem


def test_a_function_that_writes_nothing_does_not_pass_by_old_numbers(builds):
    found = builds["compare"]("idle")
    assert found.function == builds["idle"]
    assert "is not finite, first at [0, 0" in found.problem


def test_outputs_are_the_last_arguments_of_a_call():
    class Buffer:
        def __init__(self, *values):
            self.values = np.array(values)

        def numpy(self):
            return self.values

    kept = its_file._Kept({"pair": 2}, start=1)
    for scale in (1, 2, 3):
        for is_before in (True, False):
            kept(None, "pair", is_before, None, Buffer(0.0), Buffer(scale), Buffer(-scale))
            kept(None, "vm.builtin.reshape", is_before, None, Buffer(7))
    assert [(name, [each.tolist() for each in found]) for name, found in kept.calls] == [
        ("pair", [[2], [-2]]),
        ("pair", [[3], [-3]]),
    ]
