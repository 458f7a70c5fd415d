"""Which functions of two builds of a network compute something else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from tvm import te

from benchmarks.faults.injection import without_bodies
from tests.models.frontend.converters.graphs import model_of
from tvm_adaptive._tvm import IRModule, PrimFunc
from tvm_adaptive.models import compare_calls as compare_calls_file
from tvm_adaptive.models import compile_network, export
from tvm_adaptive.models.compare_calls import call_problem, compare_calls, wrong_everywhere
from tvm_adaptive.models.frontend.onnx_import import relax_of_graph
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.models.prepare import call_counts, output_counts, prepare
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.agreement import numpy_dtype

NAN = float("nan")


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
        "both": built(case, changed(changed(mod, idle, nothing), wrong, doubled)),
        "rounded": built(case, changed(mod, wrong, rounded(0.0))),
        "otherwise-rounded": built(case, changed(mod, wrong, rounded(0.003))),
        "rounded-and-wrong": built(case, changed(mod, wrong, one_more)),
    }
    for name, each in compiled.items():
        export(each, folder / f"{name}.so")

    def compare(name, rtol=1e-3, reference="untuned", **options):
        paths = (str(folder / f"{reference}.so"), str(folder / f"{name}.so"))
        return compare_calls(paths, case.inputs, "cpu", output_counts(mod), rtol, **options)

    return {"compare": compare, "wrong": wrong, "idle": idle, "calls": call_counts(mod)}


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


def rounded(added: float):
    """Return a change to a function that rounds its first argument, scaled by 64 and a little."""

    def change(function: PrimFunc) -> PrimFunc:
        inputs = [
            te.placeholder(tuple(map(int, each.ty.shape)), str(each.ty.dtype), f"x{place}")
            for place, each in enumerate(function.params[:-1])
        ]

        def of(*place):
            return te.round(inputs[0](*place) * (64.0 + added)) / 64.0

        return te.create_prim_func([*inputs, te.compute(inputs[0].shape, of, "rounded")])

    return change


def one_more(function: PrimFunc) -> PrimFunc:
    """Return a function that rounds its first argument, and adds 1 to one value."""
    inputs = [
        te.placeholder(tuple(map(int, each.ty.shape)), str(each.ty.dtype), f"x{place}")
        for place, each in enumerate(function.params[:-1])
    ]

    def of(*place):
        is_first = te.all(*(index == 0 for index in place))
        return te.round(inputs[0](*place) * 64.0) / 64.0 + te.if_then_else(is_first, 1.0, 0.0)

    return te.create_prim_func([*inputs, te.compute(inputs[0].shape, of, "rounded")])


def nothing(function: PrimFunc) -> PrimFunc:
    (idle,) = without_bodies(IRModule({"main": function})).functions.values()
    return idle


def test_builds_that_agree_have_no_problem_and_every_call_is_compared(builds, tmp_path):
    found = builds["compare"]("tuned", progress_file=str(tmp_path / "progress"))
    assert found.problems == {}
    assert found.n_compared == builds["calls"]
    assert (tmp_path / "progress").read_text() == ""  # nothing runs any more


def test_a_wrong_function_does_not_make_others_wrong(builds):
    found = builds["compare"]("wrong")
    (problem,) = found.problems.items()
    assert problem[0] == builds["wrong"]
    assert "values are wrong, first at [0, 0" in problem[1]
    assert set(found.n_compared) == set(builds["calls"])


def test_a_function_that_writes_nothing_does_not_pass_by_old_numbers(builds):
    found = builds["compare"]("idle")
    assert list(found.problems) == [builds["idle"]]
    assert "is not finite, first at [0, 0" in found.problems[builds["idle"]]


def test_all_wrong_functions_are_found_at_once_in_the_order_of_their_calls(builds):
    assert list(builds["compare"]("both").problems) == [builds["idle"], builds["wrong"]]


def test_a_function_that_is_not_run_is_replaced_and_not_compared(builds):
    found = builds["compare"]("both", skipped=[builds["idle"]])
    assert list(found.problems) == [builds["wrong"]]
    assert set(builds["calls"]) - set(found.n_compared) == {builds["idle"]}


@pytest.mark.parametrize(
    ("name", "rounding_sec", "is_unclear"),
    [
        ("otherwise-rounded", 0.0, True),
        ("otherwise-rounded", 60.0, False),
        ("rounded-and-wrong", 60.0, True),
    ],
)
def test_what_the_reference_rounds_in_another_way_for_inputs_that_hardly_differ_is_no_problem(
    builds, name, rounding_sec, is_unclear
):
    found = builds["compare"](name, reference="rounded", rounding_sec=rounding_sec)
    assert found.problems == {}
    assert list(found.unclear) == [builds["wrong"]] * is_unclear
    assert found.n_compared == builds["calls"]


def test_a_failure_of_one_side_ends_both(builds):
    with pytest.raises(KeyError):
        builds["compare"]("tuned", rtol={})  # not a single function has a tolerance


def test_builds_that_call_different_numbers_of_functions_are_no_builds_of_one_network():
    turns = compare_calls_file._Turns()
    turns.wait(0)
    turns.pass_on(0)
    turns.wait(1)
    turns.end(0)
    turns.pass_on(1)
    with pytest.raises(ValueError, match="do not make the same calls"):
        turns.wait(1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int64", "bool"])
def test_what_a_kernel_leaves_as_it_was_is_wrong(dtype):
    kind = numpy_dtype(dtype)
    expected = np.arange(200).astype(kind)
    if kind.kind == "f":
        expected[3], expected[5] = np.nan, np.inf
    left = wrong_everywhere(expected)
    assert left.dtype == kind
    assert not (left == expected).any()
    assert call_problem([expected], [expected], 1e-3) is None
    for place in range(expected.size):
        found = expected.copy()
        found[place] = left[place]
        assert call_problem([found], [expected], 1e-3) is not None, place


class Buffer:
    """A tensor on a device."""

    dtype = "float32"

    def __init__(self):
        self.array = np.zeros(3, "float32")

    def numpy(self):
        return self.array

    def copyfrom(self, array):
        self.array = np.array(array)


class Machine:
    """A virtual machine whose functions add something to zeros: a and b 1, the others nothing."""

    def __init__(self, names, added=MappingProxyType({"a": 1.0, "b": 1.0})):
        self.names = names
        self.added = added

    def set_instrument(self, watch):
        self.watch = watch

    def __getitem__(self, _name):
        return self.main

    def main(self, *_inputs):
        value = np.zeros(3, "float32")
        for name in self.names:
            buffer = Buffer()
            if self.watch(None, name, True, None, buffer) == compare_calls_file._SKIP:
                continue
            buffer.copyfrom(value + np.array(self.added.get(name, 0.0), "float32"))
            self.watch(None, name, False, None, buffer)
            value = buffer.numpy()


@pytest.fixture
def compare_machines(monkeypatch):
    """Return a function that compares two virtual machines."""

    def compare(untuned, tuned):
        machines = {"untuned": untuned, "tuned": tuned}
        monkeypatch.setattr(compare_calls_file.device_session, "load_once", lambda path: path)
        monkeypatch.setattr(compare_calls_file, "VirtualMachine", lambda path, _: machines[path])
        names = dict.fromkeys(["a", "b", "view", "more"], 1)
        return compare_calls(("untuned", "tuned"), [], "cpu", names, 1e-3)

    return compare


@pytest.mark.parametrize(
    ("calls", "n_compared"),
    [
        (["a", "b", "b"], {"a": 1, "b": 2, "view": 0}),  # the other build has no call for a view
        (["a", "view", "b", "b"], {"a": 1, "b": 2, "view": 1}),
        (["more", "a", "view", "b", "b"], {"a": 1, "b": 2, "view": 1}),
        (["a", "view", "b"], {"a": 1, "view": 1}),  # which call is which is not known
    ],
)
def test_only_what_both_builds_call_as_often_is_compared(compare_machines, calls, n_compared):
    found = compare_machines(Machine(["a", "view", "b", "b"]), Machine(calls))
    assert found.n_compared == n_compared
    assert found.problems == {}


@pytest.mark.parametrize(("expected", "n_compared"), [([NAN, NAN, 1.0], 0), ([NAN, 1.0, 1.0], 1)])
def test_a_reference_that_is_mostly_undefined_shows_nothing(compare_machines, expected, n_compared):
    """Whatever the other build makes of the same inputs."""
    machines = [Machine("ab", {"a": added, "b": 1.0}) for added in (expected, [5.0, 5.0, 5.0])]
    found = compare_machines(*machines)
    assert found.n_compared.get("a", 0) == n_compared
    assert list(found.problems) == n_compared * ["a"]
    assert found.unclear == {}


def test_a_difference_that_a_rounding_may_explain_is_no_problem_yet(compare_machines):
    found = compare_machines(Machine("ab"), Machine("ab", {"a": [1.0, 1.0, 1.1], "b": 2.0}))
    assert list(found.unclear) == ["a"]
    assert list(found.problems) == ["b"]
    assert found.n_compared == {"a": 1, "b": 1}


def test_extents_that_depend_on_values_are_none_while_calls_are_counted(tmp_path):
    """Of boxes that are kept, as many are returned as there are."""
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])
    corners = np.random.default_rng(0).random((1, 12, 2)).astype("float32")
    inputs = {
        "boxes": np.concatenate([corners, corners + 0.1], 2),
        "scores": np.linspace(0.1, 0.9, 12, dtype="float32").reshape(1, 1, 12),
    }
    model = model_of([node], inputs, {"most": np.array([5])})
    shapes = {name: value.shape for name, value in inputs.items()}
    network = network_of_imported("net", relax_of_graph(Path("net.onnx"), model), shapes)
    target = resolve_target("cpu")
    prepared = prepare(network, target, "keep")
    path = tmp_path / "net.so"
    export(compile_network(prepared, None, target), path)
    n_outputs = output_counts(prepared.mod)
    arrays = [inputs[name] for name in network.input_shapes]
    for _ in range(3):  # what memory holds by chance is not what decides
        found = compare_calls((str(path), str(path)), arrays, "cpu", n_outputs, 1e-3)
        assert found.problems == {}
        assert sum(found.n_compared.values()) > 0
