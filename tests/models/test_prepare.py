from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx, topi

from tests.models.conftest import constant_only_calls
from tvm_adaptive._tvm import IRModule, anchor_of, is_reshape, relax, tensor
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import (
    Network,
    call_counts,
    compile_network,
    extract,
    outputs_agree,
    prepare,
    resnet18,
    run_network,
)
from tvm_adaptive.tuning.target import resolve_target

LAYOUTS_OF_CALLS = {"keep": 23, "NHWC": 24, "prepack": 24}


@pytest.mark.parametrize("way", LAYOUTS_OF_CALLS)
def test_nothing_that_depends_on_constants_alone_is_left(case, way):
    assert constant_only_calls(case.prepared[way].mod) == []


def test_work_on_constants_would_be_seen():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        weight = builder.emit(relax.op.permute_dims(relax.const(np.ones((8, 4), "float32"))))
        builder.emit_func_output(builder.emit(relax.op.add(x, weight)))
    mod = relax.transform.LegalizeOps()(builder.get())
    assert constant_only_calls(mod) == ["transpose"]
    assert call_counts(mod) == {"transpose": 1, "add": 1}


@pytest.mark.parametrize(("way", "n_calls"), LAYOUTS_OF_CALLS.items())
def test_only_the_entry_is_transposed(case, way, n_calls):
    counts = call_counts(case.prepared[way].mod)
    assert counts.total() == n_calls
    # Channels last: the image on its way in.
    assert sum("transpose" in name for name in counts) == (0 if way == "keep" else 1)
    # The stem, two shortcuts or none per stage, and the blocks' convolutions.
    assert sum("conv2d" in name for name in counts) == 15


def test_cpus_convert_and_gpus_keep(case):
    assert prepare(case.network, case.target).layout == "NHWC"
    gpu = resolve_target("nvidia/geforce-rtx-3090")
    assert prepare(case.network, gpu).layout == "keep"


@pytest.mark.parametrize("layout", ["NCHW", "nhwc", "", None])
def test_unknown_layouts_are_refused(case, layout):
    with pytest.raises(InvalidOptionError, match="layout must be one of auto, keep, NHWC but got"):
        prepare(case.network, case.target, layout)


def test_weights_are_not_packed_for_gpus(case):
    gpu = resolve_target("nvidia/geforce-rtx-3090")
    with pytest.raises(InvalidOptionError, match="prepack must be False for target cuda"):
        prepare(case.network, gpu, prepack=True)


def normalised_convolution() -> Network:
    """Convolution, batch normalisation, ReLU, written with Relax operators."""
    rng = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 8, 8), "float32"))
    weight = relax.const(rng.standard_normal((4, 3, 3, 3)).astype("float32"))
    moments = [
        relax.const(value.astype("float32"))
        for value in (
            rng.uniform(0.5, 2, 4),
            rng.standard_normal(4),
            rng.standard_normal(4),
            rng.uniform(0.5, 2, 4),
        )
    ]
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, weight, padding=1))
            y = builder.emit(relax.op.nn.batch_norm(y, *moments, axis=1))
            y = builder.emit(relax.TupleGetItem(y, 0))
            y = builder.emit_output(relax.op.nn.relu(y))
        builder.emit_func_output(y)
    return Network("normalised", builder.get(), {}, {"x": (1, 3, 8, 8)}, {"x": "float32"})


@pytest.mark.parametrize("layout", ["keep", "NHWC"])
def test_batch_normalisation_costs_nothing(case, layout):
    network = normalised_convolution()
    prepared = prepare(network, case.target, layout)
    assert constant_only_calls(prepared.mod) == []
    convolutions = [name for name in call_counts(prepared.mod) if "conv2d" in name]
    assert len(convolutions) == 1
    assert not any("sqrt" in name or "divide" in name for name in call_counts(prepared.mod))


def test_layout_does_not_change_batch_normalisation(case):
    network = normalised_convolution()
    inputs = network.random_inputs()
    kept, converted = (
        run_network(compile_network(prepare(network, case.target, way), None, case.target), inputs)
        for way in ("keep", "NHWC")
    )
    assert outputs_agree(converted, kept)


SIGNAL = (2, 12, 33)


def convolved_signal(groups):
    """Return two one-dimensional convolutions; the first has groups."""
    rng = np.random.default_rng(3)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SIGNAL, "float32"))
    kernels = [
        rng.normal(size=shape).astype("float32") for shape in ((24, 12 // groups, 5), (8, 24, 3))
    ]
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            y = relax.op.nn.conv1d(
                x, relax.const(kernels[0]), strides=2, padding=(2, 1), dilation=2, groups=groups
            )
            y = builder.emit(relax.op.nn.gelu(builder.emit(y)))
            y = builder.emit_output(relax.op.nn.conv1d(y, relax.const(kernels[1])))
        builder.emit_func_output(y)
    return Network("signal", builder.get(), {}, {"x": SIGNAL}, {"x": "float32"})


@pytest.mark.parametrize(
    ("groups", "layouts"),
    [(1, ["NWC", "NWC"]), (12, ["NWC", "NWC"]), (3, ["NWC", "NWC"])],  # 12: depthwise
)
def test_one_dimensional_convolutions_have_channels_last(case, groups, layouts):
    network = convolved_signal(groups)
    inputs = network.random_inputs()
    prepared = [prepare(network, case.target, way) for way in ("keep", "NHWC")]
    kept, converted = (
        run_network(compile_network(each, None, case.target), inputs) for each in prepared
    )
    assert outputs_agree(converted, kept)
    tasks = extract(prepared[1], case.target)
    anchors = [anchor_of(each.dispatched[0]) for each in tasks]
    assert sorted(name[-3:].upper() for name in anchors if "conv1d" in name) == layouts


def test_parameters_may_be_bound_before(case):
    network = case.network
    bound = relax.transform.BindParams("main", network.params)(network.mod)
    prepared = prepare(
        Network("bound", bound, {}, network.input_shapes, network.input_dtypes), case.target
    )
    compiled = compile_network(prepared, None, case.target)
    assert outputs_agree(run_network(compiled, case.inputs), case.reference)


def test_a_network_without_convolutions_is_prepared(case):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 4), "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(y)
    weight = np.arange(32, dtype="float32").reshape(8, 4)
    network = Network(
        "dense",
        IRModule(builder.get().functions),
        {"w": tensor(weight)},
        {"x": (2, 8)},
        {"x": "float32"},
    )
    compiled = compile_network(prepare(network, case.target), None, case.target)
    inputs = network.random_inputs()
    assert outputs_agree(run_network(compiled, inputs), [inputs[0] @ weight])


@pytest.mark.slow
def test_the_full_network_has_the_same_structure_as_the_small_one(case):
    full = call_counts(prepare(resnet18(), case.target).mod)
    assert full.total() == LAYOUTS_OF_CALLS["NHWC"]
    assert len(full) == len(call_counts(case.prepared["NHWC"].mod))


def test_what_only_reshapes_is_no_task_as_it_is_a_view():
    x, y = te.placeholder((2, 8), name="x"), te.placeholder((2, 8), name="y")
    flat = te.create_prim_func([x, topi.reshape(x, (16,))])
    total = te.create_prim_func([x, y, topi.add(x, y)])
    assert is_reshape(flat)
    assert not is_reshape(total)
    assert not is_reshape(total.with_body(tirx.Evaluate(0)))
