from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from tests.models.conftest import constant_only_calls
from tvm_adaptive._tvm import args_info_of, workload_key
from tvm_adaptive.cli import main
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import (
    BUILTIN,
    Network,
    TIRWorkload,
    call_counts,
    extract,
    load_workload,
    outputs_agree,
    run_network,
    tunable_counts,
)

COMMANDS = (Path(__file__).parents[3] / "tvm_adaptive/docs/commands.md").read_text()
WAYS = ["NHWC", "prepack"]
each_network = pytest.mark.parametrize("name", sorted(BUILTIN))
# Those whose weights take seconds to draw are of the same families as smaller ones.
LARGE = ("bert_base", "resnet34", "resnet50", "vgg16")
# One with convolutions, one without. The others are built from the same layers.
ALWAYS = ("resnet18", "transformer")
two_or_each_network = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow)
        for name in sorted(BUILTIN)
    ],
)
# Without convolutions, whose inputs are transposed.
ENCODERS = ("transformer", "bert_base")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
        for name in sorted(BUILTIN)
    ],
)
def test_builtin_networks_load_by_name(name):
    network = load_workload(name)
    assert isinstance(network, Network)
    assert network.name == name
    assert [value.shape for value in network.random_inputs()] == list(network.input_shapes.values())


@each_network
def test_builtin_networks_are_named_where_users_look(name, capsys):
    row = next(line for line in COMMANDS.splitlines() if line.startswith("| `WHAT` |"))
    assert f"`{name}`" in row
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    assert name in capsys.readouterr().out
    with pytest.raises(InvalidOptionError, match=f"workload must be one of .*{name}.* but got"):
        load_workload("nothing")


def test_an_operator_that_tvm_cannot_make_is_named():
    with pytest.raises(InvalidOptionError, match=r"cannot build its own workload te:C2D_WIN_NHWC"):
        load_workload("te:C2D_WIN_NHWC")


@each_network
def test_seeds_decide_the_weights(name, small):
    first, again, other = (small(name, seed=seed).params for seed in (0, 0, 1))
    for key, value in first.items():
        np.testing.assert_array_equal(value.numpy(), again[key].numpy())
        assert not np.allclose(value.numpy(), other[key].numpy())


@each_network
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_sizes_must_be_positive_integers(name, value, small):
    sizes = inspect.signature(BUILTIN[name]).parameters.keys() - {"seed"}
    for size in sizes:
        with pytest.raises(InvalidOptionError, match=f"{size} must be a positive integer but got"):
            small(name, **{size: value})


@two_or_each_network
def test_outputs_are_finite_and_tell_inputs_apart(name, cases):
    case = cases[name]
    compiled = case.untuned["keep"]
    outputs = np.array([run_network(compiled, case.network.random_inputs(k))[0] for k in range(4)])
    assert np.isfinite(outputs).all()
    assert 1e-2 < outputs.std() < 1e2
    # Between inputs an output moves by at least a tenth of what it moves in all.
    assert outputs.std(axis=0).mean() > 0.1 * outputs.std()
    assert np.mean(outputs == 0) < 0.5


@two_or_each_network
@pytest.mark.parametrize("way", WAYS)
def test_layouts_do_not_change_the_outputs(name, way, cases):
    case = cases[name]
    untuned = case.untuned[way]
    assert untuned.coverage.tuned == {}
    assert outputs_agree(run_network(untuned, case.inputs), case.reference)


@two_or_each_network
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_computed_or_transposed_in_vain(name, way, cases):
    prepared = cases[name].prepared[way]
    assert constant_only_calls(prepared.mod) == []
    transposes = sum(
        n for function, n in call_counts(prepared.mod).items() if "transpose" in function
    )
    assert transposes == (0 if name in ENCODERS else 1)


@two_or_each_network
@pytest.mark.parametrize("way", ["keep", *WAYS])
def test_tasks_cover_every_call_of_an_inference(name, way, cases):
    case = cases[name]
    tasks = extract(case.prepared[way], case.target)
    mod = case.prepared[way].mod
    assert {task.task_name: task.weight for task in tasks} == tunable_counts(mod)
    # What has loops of its own has nothing to tune.
    others = {name.rstrip("0123456789") for name in call_counts(mod) - tunable_counts(mod)}
    is_encoder = name in ENCODERS
    assert others == ({"attention", "layer_norm"} if is_encoder else set())


@pytest.mark.parametrize(
    "name",
    [
        # One of them is quick; BERT's encoder is the same functions in other sizes.
        pytest.param(name, marks=() if name == "transformer" else pytest.mark.slow)
        for name in sorted(BUILTIN)
    ],
)
def test_every_function_can_be_tuned(name, cases):
    case = cases[name]
    tuned = case.tuned["prepack"]
    assert tuned.coverage.tuned == tunable_counts(case.prepared["prepack"].mod)
    assert outputs_agree(run_network(tuned, case.inputs), case.reference)


@pytest.mark.parametrize("name", ["C2D", "GMM", "SFM"])
def test_operators_load_by_name(name):
    workload = load_workload(f"te:{name}")
    assert isinstance(workload, TIRWorkload)
    assert [variable.name_hint for variable in workload.mod.get_global_vars()] == ["main"]


def test_operators_have_several_sizes():
    first, default, third = (load_workload(f"te:GMM{size}").mod for size in (":0", "", ":2"))
    assert workload_key(first) == workload_key(default) != workload_key(third)
    assert [int(n) for n in args_info_of(third)[0].shape] == [1, 512, 512]
    for size in ("9", "-1", "", "x"):
        with pytest.raises(
            InvalidOptionError, match=f"te:GMM has no size '{size}'; sizes are numbers from 0 on"
        ):
            load_workload(f"te:GMM:{size}")


@pytest.mark.parametrize("name", ["resnet19", "te:", "te:nothing", "C2D", ""])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(InvalidOptionError, match=r"one of resnet18, .*te:C2D.*te:GMM") as caught:
        load_workload(name)
    assert repr(name) in str(caught.value)
