"""Lower a network, once, to the functions that are tuned and compiled.

Tasks are extracted from the same prepared module that is compiled, because schedules are
found by the structure of a function: nothing is fused a second time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, PassContext, Sequential, Target, is_gpu, relax
from tvm_adaptive._tvm.inlining import partly_read
from tvm_adaptive._tvm.tensor_functions import (
    has_choices,
    with_fixed_layouts,
    with_rewritten_functions,
)
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.errors import InvalidOptionError, check_choices, summary_line
from tvm_adaptive.models.forms import Alternatives
from tvm_adaptive.models.network import Network, operator_of
from tvm_adaptive.models.rewrites.affine import fold_affine, with_numbers_as_data
from tvm_adaptive.models.rewrites.concatenated import with_parts_of_concatenations
from tvm_adaptive.models.rewrites.concatenation import with_runs
from tvm_adaptive.models.rewrites.folding import fold
from tvm_adaptive.models.rewrites.fusion import fused
from tvm_adaptive.models.rewrites.grouped import is_grouped
from tvm_adaptive.models.rewrites.in_place import with_products_in_place
from tvm_adaptive.models.rewrites.legalizations import legalizations
from tvm_adaptive.models.rewrites.pointwise import as_products
from tvm_adaptive.models.rewrites.simplification import (
    split_clips,
    without_equal_broadcasts,
    without_masked_rows,
)
from tvm_adaptive.models.rewrites.subnormals import without_subnormals
from tvm_adaptive.models.rewrites.views import without_repeated_moves
from tvm_adaptive.models.rewrites.wide_sums import with_wide_sums

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "keep", "NHWC")
# Channels last on both sides: vector loads run along output channels, which are
# contiguous in weights and results.
_CHANNELS_LAST = {"relax.nn.conv1d": ["NWC", "WIO"], "relax.nn.conv2d": ["NHWC", "HWIO"]}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A network lowered to fused functions, with its weights as constants."""

    name: str
    mod: IRModule  # ``main`` calls tensor functions only; its inputs are those of the network
    layout: str  # layout of the convolutions: ``"NHWC"``, or ``"keep"`` for that of the network
    prepack: bool  # whether a schedule may choose the layout of the weights
    # other ways to compute some of its functions; None without any
    alternatives: Alternatives | None = None


def prepare(
    network: Network,
    target: Target,
    layout: str = "auto",
    *,
    prepack: bool | None = False,
    vector_math: bool | None = None,
    forms: bool = False,
) -> Prepared:
    """Lower a network to the functions that are tuned and run.

    Weights become constants. Whatever depends on constants alone (folded batch
    normalisations, transposed weights, reshaped biases) is computed here, not per
    inference. The network's own inputs and outputs keep their layout. With ``forms``,
    convolutions on CPUs also get functions that compute them in fewer operations.
    """
    check_choices("layout", layout, LAYOUTS)
    on_gpu = is_gpu(target)
    chosen = ("keep" if on_gpu else "NHWC") if layout == "auto" else layout
    prepack = not on_gpu if prepack is None else prepack
    vector_math = not on_gpu if vector_math is None else vector_math
    if prepack and on_gpu:
        raise InvalidOptionError(
            f"prepack must be False for target {target.kind.name}: weights are packed for "
            "CPUs only. Leave it out."
        )
    mod = network.mod
    if network.params:
        mod = _tvm.relax_transform.BindParams("main", network.params)(mod)
    lower = functools.partial(_lower, mod, target, prepack=prepack, vector_math=vector_math)
    try:
        prepared = Prepared(network.name, lower(chosen), chosen, prepack)
    except Exception as error:
        if chosen == "keep" or layout == "NHWC":
            raise
        reason = summary_line(error)
        logger.warning("%s: convolutions keep their layout: %s", network.name, reason)
        logger.debug("the conversion of the layout failed", exc_info=True)
        prepared = Prepared(network.name, lower("keep"), "keep", prepack)
    return _with_forms(prepared) if forms and not on_gpu else prepared


def _with_forms(prepared: Prepared) -> Prepared:
    """Add the alternatives that there are for convolutions with channels last."""
    if prepared.layout != "NHWC":
        return prepared
    found = Alternatives(prepared.mod, packed=prepared.prepack)
    return dataclasses.replace(prepared, alternatives=found) if found else prepared


def fastest_forms_of(prepared: Prepared, database: _tvm.Database, target: Target) -> dict[str, str]:
    """Return the form of each part of a network that is the fastest by a database's times."""
    alternatives = prepared.alternatives
    if alternatives is None:
        return {}

    def seconds(function: _tvm.PrimFunc, name: str) -> float:
        mod = _tvm.normalize_mod(function)
        record = database.query_tuning_record(mod, target, name)
        times = [float(each) for each in record.run_secs or ()] if record is not None else []
        return math.fsum(times) / len(times) if times else math.inf

    known = {
        name: seconds(alternatives.functions.get(name) or prepared.mod[name], name)
        for name in alternatives.keys
    }
    return alternatives.chosen(prepared.mod, known)


def in_forms(prepared: Prepared, forms: Mapping[str, str]) -> Prepared:
    """Return a network that computes each of its parts in the form of that name."""
    if prepared.alternatives is None:
        return prepared
    mod = prepared.alternatives.applied(prepared.mod, forms)
    return dataclasses.replace(prepared, mod=mod, alternatives=None)


def extract(prepared: Prepared, target: Target) -> list[_tvm.ExtractedTask]:
    """Return the distinct functions of a prepared network, in all forms, as tuning tasks."""
    found: list[_tvm.ExtractedTask] = []
    for task in _tvm.extract_tasks(prepared.mod, target):
        (function,) = task.dispatched[0].functions.values()
        # Others have no schedules, or are views as long as they have none.
        if _tvm.has_blocks(function) and has_choices(function) and not _tvm.is_reshape(function):
            found.append(task)
    # The order of a hash table would change with every process.
    found.sort(key=lambda task: str(task.task_name))
    if prepared.alternatives is not None:
        found += prepared.alternatives.tasks(target)
    return found


def _layouts_of(call: relax.Call) -> dict[str, list[str]]:
    """Return the layouts that a convolution is to have; none if it is to keep its own.

    Those in groups that we cannot lower ourselves would gather the inputs of output channels.
    """
    name = str(call.op.name)
    if name not in _CHANNELS_LAST:
        return {}
    if name == "relax.nn.conv1d" and int(call.attrs.groups) > 1:
        _, n_inputs, _ = call.args[1].ty.shape
        if int(n_inputs) > 1 and not is_grouped(call):
            return {}
    return {name: _CHANNELS_LAST[name]}


def _has_convolutions(mod: IRModule) -> bool:
    """Say whether a network has convolutions whose layout can be converted."""
    return any(operator_of(each.value) in _CHANNELS_LAST for each in _tvm.bindings_of(mod["main"]))


def call_counts(mod: IRModule) -> Counter[str]:
    """Count the calls of tensor functions in a module's Relax functions; views are none."""
    names = Counter(str(call.args[0].name_hint) for call in tensor_calls(mod))
    return Counter({name: n for name, n in names.items() if not _tvm.is_reshape(mod[name])})


def tunable_counts(mod: IRModule) -> Counter[str]:
    """Count the calls of the functions that a schedule can change, see :func:`call_counts`."""
    calls = call_counts(mod)
    return Counter({name: n for name, n in calls.items() if has_choices(mod[name])})


def output_counts(mod: IRModule) -> dict[str, int]:
    """Return how many outputs each tensor function has that Relax functions call; but for views."""
    found = {
        str(call.args[0].name_hint): len(getattr(call.ty, "fields", (None,)))
        for call in tensor_calls(mod)
    }
    return {name: n for name, n in found.items() if not _tvm.is_reshape(mod[name])}


def tensor_calls(mod: IRModule) -> Iterator[relax.Call]:
    """Yield the calls of tensor functions in the Relax functions of a module."""
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            for binding in _tvm.bindings_of(function):
                call = _tvm.tensor_call_of(binding)
                if call is not None:
                    yield call


def _lower(
    mod: IRModule, target: Target, layout: str, *, prepack: bool, vector_math: bool
) -> IRModule:
    t = _tvm.relax_transform
    unit = None if is_gpu(target) else vector_unit_of(target)
    merge = functools.partial(without_repeated_moves, channels_last=layout == "NHWC")
    decompose = [t.DecomposeOpsForInference(), t.CanonicalizeBindings()]
    convert = [
        t.ConvertLayout({}, layout_cb=_layouts_of),
        t.Normalize(),
        t.CanonicalizeBindings(),
    ]
    lower = [
        _tvm.relax_backend.DispatchSampling(),
        _tvm.relax_backend.DispatchSortScan(),
        t.LegalizeOps(legalizations(vector_math=vector_math, unit=unit)),
        t.CanonicalizeBindings(),  # a second name for a value would keep it out of fusion
        t.AnnotateTIROpPattern(),
        t.FoldConstant(),  # what took several steps
        t.DeadCodeElimination(),
    ]
    if layout == "NHWC":
        mod = split_clips(mod)
    mod = with_wide_sums(without_equal_broadcasts(mod), keeps_operands=unit is None)
    if vector_math and unit is not None:
        mod = without_masked_rows(mod)
    with target, PassContext(opt_level=3):
        mod = with_numbers_as_data(fold_affine(fold(merge(mod))))
        # ConvertLayout ends the process when a weight is still an expression.
        mod = fold(Sequential(decompose)(mod))
        # Its time grows with the square of the network: an LSTM of 1,000 steps took two minutes.
        if layout == "NHWC" and _has_convolutions(mod):
            mod = fold(Sequential(convert)(mod))
        # While weights are those of operators.
        mod = without_subnormals(mod)
        if layout == "NHWC" and unit is not None:
            mod = as_products(with_parts_of_concatenations(mod), unit)
        mod = merge(mod)
        if unit is not None:
            mod = merge(with_products_in_place(mod, unit, computes_softmax=vector_math))
        mod = with_runs(fused(Sequential(lower)(mod)))
        return _with_free_layouts(mod) if prepack else mod


def _with_free_layouts(mod: IRModule) -> IRModule:
    """Let schedules choose the layouts of constants, but of those that a block reads in part.

    TVM's rule keeps only the part that one block reads, also where others read another.
    """
    mod = _tvm.relax_transform.AttachAttrLayoutFreeBuffers()(mod)
    return with_rewritten_functions(
        mod, lambda function: with_fixed_layouts(function, partly_read(function))
    )
