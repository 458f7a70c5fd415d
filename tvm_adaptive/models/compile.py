"""Build a prepared network or an operator with the best schedules of a database."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    Module,
    PassContext,
    PrimFunc,
    Sequential,
    Target,
    build_tir,
    relax,
    relax_transform,
    schedule_for_gpu,
)
from tvm_adaptive.models.prefetch import follow_hints
from tvm_adaptive.models.prepare import Prepared, call_counts, is_gpu

logger = logging.getLogger(__name__)

_SCHEDULED = "tirx.is_scheduled"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Which functions run with a tuned schedule."""

    # functions whose schedule came from the database, and how often one inference calls each
    tuned: dict[str, int]
    fallback: dict[str, int]  # functions without a record: they run as TVM builds them by default
    # those among ``fallback`` whose record was found and could not be applied, and the first line
    # of the reason
    failed: dict[str, str]

    def summary(self) -> str:
        """Return one line, e.g. ``"21 of 23 functions tuned (28 of 30 calls)"``."""
        n_functions = len(self.tuned) + len(self.fallback)
        n_tuned, n_calls = sum(self.tuned.values()), sum(self.fallback.values())
        text = (
            f"{len(self.tuned)} of {n_functions} functions tuned "
            f"({n_tuned} of {n_tuned + n_calls} calls)"
        )
        if self.failed:
            text += f"; could not be applied: {', '.join(sorted(self.failed))}"
        return text


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A network that can run."""

    name: str
    executable: Any
    coverage: Coverage
    device_kind: str  # where it runs: ``"cpu"``, ``"cuda"``, ..


def compile_network(prepared: Prepared, database: Database | None, target: Target) -> Compiled:
    """Compile a prepared network.

    With and without a database the same passes run, so two results differ in nothing
    but their schedules. A record that cannot be applied is logged and its function
    falls back; it never ends the compilation.
    """
    mod, coverage = schedule_network(prepared, database, target)
    return dataclasses.replace(build_network(mod, target), name=prepared.name, coverage=coverage)


def schedule_network(
    prepared: Prepared,
    database: Database | None,
    target: Target,
    *,
    check: Callable[[], None] | None = None,
) -> tuple[IRModule, Coverage]:
    """Give the functions of a prepared network their best schedules; nothing is compiled."""
    with target, PassContext(opt_level=3):
        mod, tuned, failed = _apply(prepared.mod, database, check)
    return mod, _coverage(prepared.mod, tuned, failed)


def build_network(mod: IRModule, target: Target) -> Compiled:
    """Compile what :func:`schedule_network` returns."""
    with target, PassContext(opt_level=3):
        mod = follow_hints(Sequential(_packing())(mod))
        if is_gpu(target):
            mod = schedule_for_gpu(mod)
        mod = Sequential(_lowering())(mod)
        executable = relax.build(mod, target=target, relax_pipeline=None)
    return Compiled("", executable, Coverage({}, {}, {}), device_kind(target))


def compile_tir(mod: IRModule, target: Target, database: Database | None = None) -> Module:
    """Compile an operator with its best schedule, or without one."""
    return build_scheduled(schedule_tir(mod, target, database), target)


def schedule_tir(mod: IRModule, target: Target, database: Database | None) -> IRModule:
    """Give an operator its best schedule, if there is one; nothing is compiled."""
    with target, PassContext(opt_level=3):
        mod, _, _ = _apply(mod, database)
    return mod


def build_scheduled(mod: IRModule, target: Target) -> Module:
    """Compile what :func:`schedule_tir` returns."""
    with target, PassContext(opt_level=3):
        if is_gpu(target):
            mod = schedule_for_gpu(mod)
        return build_tir(follow_hints(mod), target=target)


def device_kind(target: Target) -> str:
    """Return the name of the device that runs a target's code."""
    return "cpu" if target.kind.name in ("llvm", "c") else str(target.kind.name)


def _packing() -> list[Any]:
    """Return the passes that compute the weights' layouts, which schedules chose, once."""
    t = relax_transform
    return [
        t.SplitLayoutRewritePreproc(),
        t.FoldConstant(),
        t.CanonicalizeBindings(),  # a function that packs two arguments returns a tuple
        t.DeadCodeElimination(),
    ]


def _lowering() -> list[Any]:
    """Return the passes from calls of tensor functions to the virtual machine's code."""
    t = relax_transform
    return [
        t.RewriteDataflowReshape(),
        t.ToNonDataflow(),
        t.RemovePurityChecking(),
        t.CallTIRRewrite(),
        t.StaticPlanBlockMemory(),
        t.LowerAllocTensor(),
        t.KillAfterLastUse(),
        t.LowerRuntimeBuiltin(),
        t.ComputePrimValue(),
        t.VMShapeLower(),
        t.AttachGlobalSymbol(),
    ]


def _apply(
    mod: IRModule, database: Database | None, check: Callable[[], None] | None = None
) -> tuple[IRModule, set[str], dict[str, str]]:
    """Give each tensor function its best schedule; call it within the target."""
    tuned: set[str] = set()
    failed: dict[str, str] = {}
    if database is None:
        return mod, tuned, failed
    functions: dict[Any, Any] = {}
    for variable, function in mod.functions.items():
        functions[variable] = function
        if not isinstance(function, PrimFunc):
            continue
        if check is not None:
            check()
        name = str(variable.name_hint)
        # One function at a time: a record that cannot be applied costs only its own.
        try:
            with database:
                applied = _apply_one(IRModule({variable: function}))
        except Exception as error:
            failed[name] = (str(error).strip() or repr(error)).splitlines()[-1]
            logger.warning("%s: its record could not be applied: %s", name, failed[name])
            continue
        if applied is not None:
            functions[variable] = applied
            tuned.add(name)
    return IRModule(functions, attrs=mod.attrs), tuned, failed


def _apply_one(single: IRModule) -> PrimFunc | None:
    applied = relax_transform.MetaScheduleApplyDatabase()(single)
    (function,) = applied.functions.values()
    if not (function.attrs and function.attrs.get(_SCHEDULED)):
        return None
    relax_transform.SplitLayoutRewritePreproc()(applied)  # fails here, not for the whole network
    return function


def _coverage(mod: IRModule, tuned: set[str], failed: dict[str, str]) -> Coverage:
    calls = call_counts(mod)
    return Coverage(
        tuned={name: n for name, n in sorted(calls.items()) if name in tuned},
        fallback={name: n for name, n in sorted(calls.items()) if name not in tuned},
        failed=failed,
    )
