"""From a network to the functions that are tuned, once and for all.

What is tuned is looked up by its structure when the network is compiled. So there is one
prepared module: tasks are extracted from it and it is compiled, and nothing is fused a
second time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tvm_adaptive._tvm import (
    ExtractedTask,
    IRModule,
    PassContext,
    Sequential,
    Target,
    extract_tasks,
    relax,
    relax_backend,
    relax_transform,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.folding import fold
from tvm_adaptive.models.network import Network
from tvm_adaptive.models.rewrites import split_clips
from tvm_adaptive.models.vector_math import legalizations

logger = logging.getLogger(__name__)

# The class of a constant tensor has another name in each version of TVM.
_CONSTANT = type(relax.const(0.0))

_CALL = "relax.call_tir"
LAYOUTS = ("auto", "keep", "NHWC")
# Channels last on both sides: vector loads run along output channels, which are
# contiguous in weights and results.
_CHANNELS_LAST = {"relax.nn.conv2d": ["NHWC", "HWIO"]}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A network lowered to fused functions, with its weights as constants."""

    name: str
    mod: IRModule  # ``main`` calls tensor functions only; its inputs are those of the network
    layout: str  # layout of the convolutions: ``"NHWC"``, or ``"keep"`` for that of the network
    prepack: bool  # whether a schedule may choose the layout of the weights
    n_main_calls: int  # calls of tensor functions per inference


def prepare(
    network: Network,
    target: Target,
    layout: str = "auto",
    *,
    prepack: bool | None = False,
    vector_math: bool | None = None,
) -> Prepared:
    """Lower a network to the functions that are tuned and run.

    Weights become constants, and whatever depends on constants alone (folded batch
    normalisation, transposed weights, reshaped biases) is computed here, not per
    inference. The network's own inputs and outputs keep their layout.
    """
    chosen = _choose_layout(layout, target)
    if prepack is None:
        prepack = not is_gpu(target)
    if vector_math is None:
        vector_math = not is_gpu(target)
    if prepack and is_gpu(target):
        raise InvalidOptionError(
            f"prepack must be False for target {target.kind.name}: weights are packed for "
            "CPUs only. Leave it out."
        )
    lower = functools.partial(
        _lower, _bind(network), target, prepack=prepack, vector_math=vector_math
    )
    try:
        mod = lower(chosen)
    except Exception:
        if chosen == "keep" or layout == "NHWC":
            raise
        logger.warning("%s: convolutions stay as they are", network.name, exc_info=True)
        chosen = "keep"
        mod = lower(chosen)
    return Prepared(network.name, mod, chosen, prepack, call_counts(mod).total())


def extract(prepared: Prepared, target: Target) -> list[ExtractedTask]:
    """Return the distinct functions of a prepared network as tuning tasks."""
    tasks: list[ExtractedTask] = list(extract_tasks(prepared.mod, target))
    # The order of a hash table would change with every process.
    return sorted(tasks, key=lambda task: str(task.task_name))


def call_counts(mod: IRModule) -> Counter[str]:
    """Count the calls of each tensor function in the Relax functions of a module."""
    return Counter(name for name, _ in _tensor_calls(mod))


def constant_only_calls(mod: IRModule) -> list[str]:
    """Name the tensor functions that are called with nothing but constants.

    Each of them computes the same at every inference.
    """
    return [
        name
        for name, arguments in _tensor_calls(mod)
        if arguments and all(isinstance(argument, _CONSTANT) for argument in arguments)
    ]


def is_gpu(target: Target) -> bool:
    """Say whether a target's functions need thread bindings."""
    return "gpu" in [str(key) for key in target.keys]


def check_layout(layout: str) -> None:
    """Raise InvalidOptionError unless ``layout`` is one that :func:`prepare` knows."""
    if layout not in LAYOUTS:
        raise InvalidOptionError(f"layout must be one of {', '.join(LAYOUTS)} but got {layout!r}.")


def _choose_layout(layout: str, target: Target) -> str:
    check_layout(layout)
    if layout == "auto":
        return "keep" if is_gpu(target) else "NHWC"
    return layout


def _bind(network: Network) -> IRModule:
    if not network.params:
        return network.mod
    return relax_transform.BindParams("main", network.params)(network.mod)


def _lower(
    mod: IRModule, target: Target, layout: str, *, prepack: bool, vector_math: bool
) -> IRModule:
    t = relax_transform
    cleaned = [t.FoldConstant(), t.DeadCodeElimination()]
    opened = [t.FoldBatchnormToConv2D(), t.DecomposeOpsForInference(), t.CanonicalizeBindings()]
    turned = [t.ConvertLayout(_CHANNELS_LAST), t.Normalize(), t.CanonicalizeBindings()]
    passes = [
        relax_backend.DispatchSampling(),
        relax_backend.DispatchSortScan(),
        t.LegalizeOps(legalizations() if vector_math else None),
        t.AnnotateTIROpPattern(),
        *cleaned,
        t.FuseOps(),
        t.FuseTIR(),
    ]
    if prepack:
        passes.append(t.AttachAttrLayoutFreeBuffers())
    if layout == "NHWC":
        mod = split_clips(mod)
    with target, PassContext(opt_level=3):
        # ConvertLayout ends the process when a weight is still an expression.
        mod = Sequential(cleaned)(fold(Sequential(opened)(mod)))
        if layout == "NHWC":
            mod = fold(Sequential(turned)(mod))
        return Sequential(passes)(mod)


def _tensor_calls(mod: IRModule) -> Iterator[tuple[str, list[Any]]]:
    for function in mod.functions.values():
        if not isinstance(function, relax.Function):
            continue
        for block in function.body.blocks:
            for binding in block.bindings:
                call = getattr(binding, "value", None)
                if isinstance(call, relax.Call) and getattr(call.op, "name", "") == _CALL:
                    yield str(call.args[0].name_hint), list(call.args[1].fields)
