"""Convolutions in Winograd's forms compute what the direct ones do, for all that is offered."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from tests.models import networks
from tvm_adaptive._tvm import (
    Schedule,
    TuningRecord,
    Workload,
    args_info_of,
    block_names,
    memory_database,
    normalize_mod,
    relax,
)
from tvm_adaptive.models import compile_network, extract, outputs_agree, prepare, run_network
from tvm_adaptive.models.network import Network, network_of_relax
from tvm_adaptive.models.prepare import Prepared, fastest_forms_of, in_forms
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.forms import FormKey

FORMS = ("winograd-2x2", "winograd-4x4")


def network_of(
    build: Any, shape: tuple[int, ...] = (1, 16, 9, 10), n_filters: int = 16, **options: Any
) -> Network:
    """Return a convolution and what ``build`` makes of its result and its input."""
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((n_filters, shape[1], 3, 3)).astype("float32")
    bias = rng.standard_normal((1, n_filters, 1, 1)).astype("float32")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = relax.op.nn.conv2d(x, relax.const(kernel), **{"padding": 1, **options})
            y = builder.emit(relax.op.add(builder.emit(y), relax.const(bias)))
            result = builder.emit_output(builder.emit(build(builder, y, x)))
        builder.emit_func_output(result)
    return network_of_relax("conv", builder.get(), {})


def relu(_builder: Any, y: Any, _x: Any) -> Any:
    return relax.op.nn.relu(y)


def prepared_of(network: Network) -> Prepared:
    return prepare(network, resolve_target("cpu"), forms=True, prepack=True)


def outputs_in(prepared: Prepared, form: str, inputs: list[Any]) -> list[Any]:
    assert prepared.alternatives is not None
    groups = {key.group for key in prepared.alternatives.keys.values()}
    mod = prepared.alternatives.applied(prepared.mod, dict.fromkeys(groups, form))
    changed = dataclasses.replace(prepared, mod=mod, alternatives=None)
    compiled = compile_network(changed, None, resolve_target("cpu"))
    names = [name for name in compiled.coverage.fallback if name.startswith("winograd")]
    assert len(names) == (3 if form else 0)
    return [np.array(each) for each in run_network(compiled, inputs)]


CASES: dict[str, dict[str, Any]] = {
    "extents that tiles do not divide": {"build": relu},
    "a batch": {"build": relu, "shape": (2, 16, 8, 8)},
    "no padding": {"build": relu, "padding": 0},
    "more padding on one side": {"build": relu, "padding": (0, 2, 1, 0)},
    "an image smaller than a tile": {"build": relu, "shape": (1, 16, 2, 3)},
    "a sum with the input": {"build": lambda b, y, x: relax.op.add(y, x)},
    "no epilogue but the bias": {"build": lambda b, y, x: relax.op.nn.relu6(y)},
    "a sigmoid": {"build": lambda b, y, x: relax.op.multiply(y, b.emit(relax.op.sigmoid(y)))},
    "a mean": {"build": lambda b, y, x: relax.op.mean(b.emit(relax.op.nn.relu(y)), [2, 3])},
}


@pytest.mark.parametrize("case", CASES)
def test_all_forms_compute_the_same(case: str) -> None:
    network = network_of(**CASES[case])
    prepared, inputs = prepared_of(network), network.inputs(0)
    expected = outputs_in(prepared, "", inputs)
    for form in FORMS:
        found = outputs_in(prepared, form, inputs)
        assert outputs_agree(found, expected), form
        for one, other in zip(found, expected, strict=True):
            assert np.abs(one - other).max() < 2e-5 * np.abs(other).max()


def test_values_outside_of_the_data_are_not_touched() -> None:
    network = network_of(relu)
    prepared, (x,) = prepared_of(network), network.inputs(0)
    for value in (np.inf, np.nan):
        changed = np.array(x)
        changed[0, 0, 4, 4] = value
        (expected,) = outputs_in(prepared, "", [changed])
        far = np.isfinite(expected) & (np.abs(expected) > 0)
        far[:, :, :7, :7] = False  # a tile shares its inputs
        (found,) = outputs_in(prepared, FORMS[0], [changed])
        np.testing.assert_allclose(found[far], expected[far], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": 2},
        {"dilation": 2, "padding": 2},
        {"shape": (1, 8, 9, 10)},
        {"n_filters": 8},
    ],
    ids=str,
)
def test_other_convolutions_have_no_forms(options: dict[str, Any]) -> None:
    assert prepared_of(network_of(relu, **options)).alternatives is None


def test_a_kernel_that_is_computed_has_no_forms() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 16, 9, 10), "float32"))
    w = relax.Var("w", relax.TensorType((16, 16, 3, 3), "float32"))
    bias = np.random.default_rng(0).standard_normal((1, 16, 1, 1)).astype("float32")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, w, padding=1))
            result = builder.emit_output(relax.op.add(y, relax.const(bias)))
        builder.emit_func_output(result)
    assert prepared_of(network_of_relax("conv", builder.get(), {})).alternatives is None


def test_without_channels_last_there_are_none() -> None:
    target = resolve_target("cpu")
    assert prepare(network_of(relu), target, "keep", forms=True).alternatives is None
    assert prepare(network_of(relu), target).alternatives is None
    gpu = resolve_target("nvidia/geforce-rtx-3090")
    assert prepare(network_of(relu), gpu, "NHWC", forms=True).alternatives is None


def test_equal_outputs_of_two_groups_are_two_functions() -> None:
    """The second convolution has other input channels; what follows its products is the same."""
    rng = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 16, 8, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for n_in in (16, 32):
                kernel = rng.standard_normal((32, n_in, 3, 3)).astype("float32")
                y = builder.emit(relax.op.nn.conv2d(y, relax.const(kernel), padding=1))
                y = builder.emit(relax.op.nn.relu(y))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    alternatives = prepared_of(network_of_relax("two", builder.get(), {})).alternatives
    assert alternatives is not None
    groups = {key.group for key in alternatives.keys.values()}
    assert len(groups) == 2
    for group in groups:
        chosen = alternatives.steps(dict.fromkeys(groups, FORMS[0]) | {group: FORMS[1]})
        own = [steps for name, steps in chosen.items() if alternatives.keys[name].group == group]
        assert {alternatives.keys[step].group for steps in own for step in steps} == {group}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda _emit, y: relax.op.astype(y, "int32"), 55),
        (lambda _emit, y: relax.op.floor(y), 55.0),
        (lambda _emit, y: relax.op.equal(y, relax.const(55.0)), True),
        (lambda _emit, y: relax.op.greater_equal(y, relax.const(55.0)), True),
        (
            lambda emit, y: relax.op.astype(
                emit(relax.op.greater_equal(y, relax.const(55.0))), "float32"
            ),
            1.0,
        ),
        (
            lambda emit, y: relax.op.where(
                emit(relax.op.not_equal(y, relax.const(55.0))), relax.const(1.0), relax.const(2.0)
            ),
            2.0,
        ),
    ],
    ids=["cast", "floor", "equal", "not-less", "number", "unequal"],
)
def test_sums_of_whole_numbers_stay_exact_where_a_digit_decides(build: Any, expected: Any) -> None:
    """Transforms of tiles of four have thirds: 54.999996 would become 54."""
    weights = np.zeros((16, 16, 3, 3), "float32")
    weights[:, 0, 1, 2] = 5.0
    x = np.zeros((1, 16, 8, 8), "float32")
    x[0, 0, 0, 4] = 11.0

    def convolved(emit: Any, data: Any) -> Any:
        return build(emit, emit(relax.op.nn.conv2d(data, relax.const(weights), padding=1)))

    prepared = prepared_of(networks.network_of({"x": x.shape}, convolved))
    assert prepared.alternatives is not None
    forms = {key.form for key in prepared.alternatives.keys.values()}
    assert forms == {"", "winograd-2x2"}
    for form in forms:
        (found,) = outputs_in(prepared, form, [x])
        assert found[0, 0, 0, 3] == expected


def test_a_group_has_the_same_forms_of_all_its_convolutions() -> None:
    rng = np.random.default_rng(0)
    first, second = (relax.const(rng.standard_normal((16, 16, 3, 3), "float32")) for _ in range(2))

    def layers(emit: Any, x: Any) -> Any:
        y = emit(relax.op.nn.relu(emit(relax.op.nn.conv2d(x, first, padding=1))))
        return relax.op.floor(emit(relax.op.nn.conv2d(y, second, padding=1)))

    prepared = prepared_of(networks.network_of({"x": (1, 16, 9, 10)}, layers))
    assert prepared.alternatives is not None
    keys = prepared.alternatives.keys.values()
    offered = {group: {key.form for key in keys if key.group == group} for group, _ in keys}
    assert sorted(map(len, offered.values())) == [2, 3]
    for group, forms in offered.items():
        for form in forms:
            assert prepared.alternatives.steps({group: form}) or form == ""


@pytest.mark.parametrize(
    "build", [relax.op.nn.leakyrelu, relax.op.exp, relax.op.tanh, relax.op.sigmoid]
)
def test_what_no_digit_decides_has_all_forms(build: Any) -> None:
    prepared = prepared_of(network_of(lambda _builder, y, _x: build(y)))
    assert prepared.alternatives is not None
    assert {key.form for key in prepared.alternatives.keys.values()} == {"", *FORMS}


def test_a_convolution_of_an_open_batch_has_no_forms() -> None:
    """As the masks of objects, of which there are as many as were found."""
    assert prepared_of(with_rows(lambda _emit, y: relax.op.nn.relu(y))).alternatives is None


def with_rows(build: Any) -> Network:
    """Return a network that convolves the rows that a mask chooses."""
    kernel = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype("float32")
    n, builder = tirx.Var("n", "int64"), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((6, 16, 8, 8), "float32"))
    mask = relax.Var("mask", relax.TensorType((6,), "int64"))
    with builder.function("main", [x, mask]):
        with builder.dataflow():
            found = relax.op.nonzero(mask)
            places = builder.match_cast(found, relax.TensorType((1, n), "int64"))
            rows = builder.emit(
                relax.op.take(x, builder.emit(relax.op.squeeze(places, [0])), axis=0)
            )
            y = builder.emit(relax.op.nn.conv2d(rows, relax.const(kernel), padding=1))
            y = builder.emit(build(builder.emit, y))
            result = builder.emit_output(relax.op.mean(y, [0]))
        builder.emit_func_output(result)
    return network_of_relax("rows", builder.get(), {})


def test_tasks_have_names_calls_and_forms() -> None:
    prepared = prepared_of(network_of(relu))
    tasks = extract(prepared, resolve_target("cpu"))
    assert prepared.alternatives is not None
    keys = prepared.alternatives.keys
    group = "3x3 of 1x9x10x16"
    assert {keys[str(each.task_name)] for each in tasks if str(each.task_name) in keys} == {
        FormKey(group, form) for form in ("", *FORMS)
    }
    assert sum(str(each.task_name).startswith("winograd") for each in tasks) == 6
    assert {int(each.weight) for each in tasks} == {1}


@pytest.mark.parametrize(
    ("direct_sec", "product_sec", "n_steps"), [(3.0, 0.5, 3), (1.0, 2.0, 0), (1.0, None, 0)]
)
def test_a_network_takes_the_fastest_form_of_a_database(
    direct_sec: float, product_sec: float | None, n_steps: int
) -> None:
    target, prepared = resolve_target("cpu"), prepared_of(network_of(relu))
    database, alternatives = memory_database(), prepared.alternatives
    assert alternatives is not None
    for name, key in alternatives.keys.items():
        seconds = direct_sec if not key.form else 0.1
        if "product" in name:
            if product_sec is None:  # one step was never measured
                continue
            seconds = product_sec
        function = alternatives.functions.get(name) or prepared.mod[name]
        workload = database.commit_workload(normalize_mod(function))
        database.commit_tuning_record(_record(workload, seconds, target))
    forms = fastest_forms_of(prepared, database, target)
    assert all(len(steps) == 3 for steps in alternatives.steps(forms).values())
    assert bool(alternatives.steps(forms)) == bool(n_steps)
    found = in_forms(prepared, forms)
    names = [str(variable.name_hint) for variable in found.mod.functions]
    assert sum(name.startswith("winograd") for name in names) == n_steps


def test_transformed_weights_are_larger() -> None:
    alternatives = prepared_of(network_of(relu)).alternatives
    assert alternatives is not None
    kernel_bytes = 16 * 16 * 9 * 4
    found = {name.split("_product")[0]: n for name, n in alternatives.weight_bytes.items()}
    assert found["winograd_2x2"] == 16 * kernel_bytes // 9
    assert found["winograd_4x4"] == 4 * kernel_bytes


def _record(workload: Workload, seconds: float, target: Any) -> TuningRecord:
    schedule = Schedule(workload.mod)
    # A database gives out no record that does nothing.
    schedule.parallel(schedule.get_loops(block_names(workload.mod)[-1])[0])
    return TuningRecord(schedule.trace, workload, [seconds], target, args_info_of(workload.mod))
