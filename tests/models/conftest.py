from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest

from tvm_adaptive._tvm import Database, IRModule, Schedule, TuneContext, TuningRecord, ms, relax
from tvm_adaptive.models import (
    BUILTIN,
    Compiled,
    Network,
    Prepared,
    compile_network,
    extract,
    prepare,
    run_network,
)
from tvm_adaptive.tuning.target import resolve_target

# Random tilings of a convolution are valid more often than not, and half of them unroll
# little; fifty in a row never fail.
ATTEMPTS = 50
MAX_UNROLL = 16
SMALL_IMAGES: dict[str, Any] = {"image_size": 32, "width": 8, "classes": 10}
SMALL_ENCODER: dict[str, Any] = {
    "sequence": 16,
    "layers": 2,
    # Heads of 16 numbers: attention is one function whatever the vectors.
    "hidden": 64,
    "heads": 4,
    "inner": 128,
}
SMALL: dict[str, dict[str, Any]] = {
    "resnet18": SMALL_IMAGES,
    "resnet34": SMALL_IMAGES,
    "resnet50": SMALL_IMAGES,
    "squeezenet1_1": SMALL_IMAGES | {"image_size": 63, "width": 16},
    "mobilenet_v2": SMALL_IMAGES | {"image_size": 64},
    "vgg16": SMALL_IMAGES | {"hidden": 32},
    "transformer": SMALL_ENCODER,
    "bert_base": SMALL_ENCODER,
}
WAYS = {"keep": ("keep", False), "NHWC": ("NHWC", False), "prepack": ("NHWC", True)}


class Lazily(dict):
    """Values that are made when first asked for: preparing or building a network takes seconds."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        self[key] = self._make(key)
        return self[key]


@dataclasses.dataclass(frozen=True)
class Case:
    """A small network in every way it can be prepared, and what it computes."""

    target: Any
    network: Network
    inputs: list
    prepared: dict[str, Prepared]
    databases: dict[str, Any]
    untuned: dict[str, Compiled]
    tuned: dict[str, Compiled]

    @functools.cached_property
    def reference(self) -> list:
        """What the network computes in the layout that it came with."""
        return run_network(self.untuned["keep"], self.inputs)


@pytest.fixture(scope="session")
def case(cases) -> Case:
    return cases["resnet18"]


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """The built-in networks, small."""
    return Lazily(lambda name: case_of(small_network(name)))


@pytest.fixture(scope="session")
def small():
    return small_network


def small_network(name: str, **options: int) -> Network:
    return BUILTIN[name](**{**SMALL[name], **options})


def case_of(network: Network) -> Case:
    target = resolve_target("cpu")
    inputs = network.random_inputs(seed=3)

    def prepare_in(way: str) -> Prepared:
        layout, prepack = WAYS[way]
        return prepare(network, target, layout, prepack=prepack)

    prepared = Lazily(prepare_in)
    databases = Lazily(lambda way: random_records(extract(prepared[way], target), target))
    tuned = Lazily(lambda way: compile_network(prepared[way], databases[way], target))
    untuned = Lazily(lambda way: compile_network(prepared[way], None, target))
    return Case(target, network, inputs, prepared, databases, untuned, tuned)


def constant_only_calls(mod: IRModule) -> list[str]:
    """Name the tensor functions that are called with nothing but constants.

    Each of them computes the same at every inference.
    """
    calls = [
        binding.value
        for function in mod.functions.values()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(getattr(binding, "value", None), relax.Call)
        and getattr(binding.value.op, "name", "") == "relax.call_tir"
    ]
    constant = type(relax.const(0.0))
    return [
        str(call.args[0].name_hint)
        for call in calls
        if call.args[1].fields and all(isinstance(each, constant) for each in call.args[1].fields)
    ]


@pytest.fixture
def torch_params():
    """A function that gives a network's weights to torch."""
    torch = pytest.importorskip("torch")
    return lambda network: {
        name: torch.from_numpy(value.numpy()) for name, value in network.params.items()
    }


@pytest.fixture
def torch_encoder(torch_params):
    """A function that gives a network's weights to torch's own encoder layers."""
    return lambda network, **how: encoder_in_torch(torch_params(network), **how)


def encoder_in_torch(p, *, heads, activation, epsilon):
    torch = pytest.importorskip("torch")
    same = {"inner": "linear1", "outer": "linear2", "norm1": "norm1", "norm2": "norm2"}
    same["attention.output"] = "self_attn.out_proj"
    layers = []
    for index in range(sum(name.endswith("inner.weight") for name in p)):
        weights = {
            f"{theirs}.{kind}": p[f"layers.{index}.{ours}.{kind}"]
            for ours, theirs in same.items()
            for kind in ("weight", "bias")
        }
        for kind in ("weight", "bias"):
            weights[f"self_attn.in_proj_{kind}"] = torch.cat(
                [p[f"layers.{index}.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            )
        inner, hidden = weights["linear1.weight"].shape
        layer = torch.nn.TransformerEncoderLayer(
            hidden, heads, inner, 0.0, activation, epsilon, batch_first=True
        )
        layer.load_state_dict(weights)
        layers.append(layer.eval())
    network = torch.nn.Sequential(*layers)

    def run(inputs):
        with torch.no_grad():
            return [network(torch.from_numpy(inputs[0])).numpy()]

    return run


@pytest.fixture
def valid_schedule():
    return draw_schedule


def random_records(tasks, target, seed=0) -> Database:
    database = ms.database.MemoryDatabase()
    for index, task in enumerate(tasks):
        mod = task.dispatched[0]
        schedule = draw_schedule(mod, target, seed * 1000 + index + 1)
        workload = database.commit_workload(mod)
        database.commit_tuning_record(TuningRecord(schedule.trace, workload, [1e-3], target, None))
    return database


def draw_schedule(mod, target, seed) -> Schedule:
    context = TuneContext(
        mod=mod,
        target=target,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        task_name="task",
        rand_state=seed,
        num_threads=1,
    )
    for _ in range(ATTEMPTS):
        for schedule in context.generate_design_space():
            postprocs = context.space_generator.postprocs
            if all(each.apply(schedule) for each in postprocs) and not is_unrolled(schedule):
                return schedule
    raise AssertionError("no valid schedule was drawn")


def is_unrolled(schedule) -> bool:
    """Whether LLVM would spend seconds on long unrolled loops."""
    steps = re.findall(r'"pragma_auto_unroll_max_step": (?:T\.int\d+\()?(\d+)', str(schedule.mod))
    return any(int(step) > MAX_UNROLL for step in steps)
