"""Compile networks and operators with the best schedules of a database.

``export_module`` and ``export_function`` do it in a worker, which can be killed when it
takes too long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Database, IRModule, PassContext, PrimFunc, Sequential, Target
from tvm_adaptive._tvm.default_schedules import with_default_schedules
from tvm_adaptive.errors import InvalidOptionError, machine_failure, summary_line
from tvm_adaptive.models.object_files import ObjectFiles, write_objects
from tvm_adaptive.models.packing import name_before_packing, pack
from tvm_adaptive.models.prefetch import follow_hints
from tvm_adaptive.models.prepare import (
    Prepared,
    fastest_forms_of,
    in_forms,
    tunable_counts,
)
from tvm_adaptive.models.weights import load_weighted_module
from tvm_adaptive.workers.cores import n_build_workers, usable_physical_cores

logger = logging.getLogger(__name__)

# LLVM's default of 3 unrolls the plain loops of functions without a record into thousands
# of instructions in a row, which take minutes to compile: 88 s for DenseNet-121, at 2 a tenth.
_UNTUNED_OPT_LEVEL = 2
# For a network that is only compared with: without LLVM's optimizations, small functions compile
# some 3 x as fast (2.2 to 3.5 x, four networks of 52 to 136 functions), which saves some 30 ms of
# each on two cores. They run 3 to 4 x slower, 0.25 s longer for 10^9 operations, and run twice.
_QUICK_OPT_LEVEL = 0
# To estimate what the same takes with optimizations; of the range, nearer to its lower end.
_QUICK_MARGIN = 2.5
_MOST_QUICK_FLOPS = 5e7

# An identifier of a library is a hash of all its weights, which takes longer than the rest of
# linking; only debuggers use it.
_LINKING = {"options": ["-Wl,--build-id=none"]}


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Which functions run with a tuned schedule."""

    tuned: dict[str, int]  # functions with a record, and how often one inference calls each
    fallback: dict[str, int]  # functions without one, which run with default schedules
    failed: dict[str, str]  # those of ``fallback`` whose record could not be applied, and why

    @property
    def functions(self) -> frozenset[str]:
        """The names of all functions."""
        return frozenset(self.tuned) | frozenset(self.fallback)

    def summary(self) -> str:
        """Return one line, e.g. ``"21 of 23 functions tuned (28 of 30 calls)"``."""
        n_functions = len(self.tuned) + len(self.fallback)
        if not n_functions:
            return "no function has schedules to choose from"
        n_tuned, n_other = sum(self.tuned.values()), sum(self.fallback.values())
        text = (
            f"{len(self.tuned)} of {n_functions} functions tuned "
            f"({n_tuned} of {n_tuned + n_other} calls)"
        )
        if self.failed:
            text += f"; could not be applied: {', '.join(sorted(self.failed))}"
        return text


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A network that can run."""

    executable: Any
    coverage: Coverage
    device_kind: str  # where it runs: ``"cpu"``, ``"cuda"``, ..


class Exported(NamedTuple):
    """What became of a network to be written to a library."""

    compile_sec: float  # without reading and writing weights; NaN without a library
    refused: dict[str, str]  # the functions that the compiler refuses, and why

    @classmethod
    def without(cls, refused: Mapping[str, str]) -> Exported:
        """Say which functions there is no library for."""
        return cls(math.nan, {name_before_packing(name): why for name, why in refused.items()})


def compile_network(prepared: Prepared, database: Database | None, target: Target) -> Compiled:
    """Compile a prepared network, by the same passes with and without a database."""
    mod, coverage = schedule_network(prepared, database, target)
    with target, PassContext(opt_level=3):
        executable = _tvm.link_network(*_network_code(mod, target, _untuned_targets(mod, target)))
    return Compiled(executable, coverage, device_kind(target))


def schedule_network(
    prepared: Prepared,
    database: Database | None,
    target: Target,
    *,
    refused: Mapping[str, str] = MappingProxyType({}),
    check: Callable[[], None] | None = None,
) -> tuple[IRModule, Coverage]:
    """Give the functions of a prepared network their best schedules, without compiling.

    ``refused`` names functions whose schedules cannot be compiled, and why; they get none.
    """
    if database is not None:
        prepared = in_forms(prepared, fastest_forms_of(prepared, database, target))
    mod, tuned, failed = _apply(prepared.mod, database, target, refused, check)
    calls = sorted(tunable_counts(prepared.mod).items())
    coverage = Coverage(
        tuned={name: n for name, n in calls if name in tuned},
        fallback={name: n for name, n in calls if name not in tuned},
        failed=failed,
    )
    return mod, coverage


def compile_tir(mod: IRModule, target: Target, database: Database | None = None) -> _tvm.Module:
    """Compile an operator with its best schedule, or without one."""
    return _build_tir(schedule_tir(mod, target, database)[0], target)


def schedule_tir(mod: IRModule, target: Target, database: Database | None) -> tuple[IRModule, bool]:
    """Give an operator its best schedule without compiling; say whether there was one."""
    scheduled, tuned, _ = _apply(mod, database, target, {})
    return scheduled, bool(tuned)


def export(compiled: Compiled, path: str | os.PathLike[str]) -> None:
    """Write a compiled network with its weights to a shared library, or to its object files."""
    name = os.fspath(path)
    if not name.endswith((".so", ".tar")):
        raise InvalidOptionError(f"path must end in .so or .tar but got {name!r}.")
    with _silent_stderr():
        compiled.executable.export_library(name)


def export_module(
    folder: str,
    target_json: str,
    path: str,
    objects_folder: str | None = None,
    *,
    quick: bool = False,
) -> Exported:
    """Compile what :func:`~tvm_adaptive.models.weights.save_module` wrote.

    Functions that were compiled to ``objects_folder`` before are not compiled again. ``quick``
    compiles functions without a schedule without optimizations where that saves more time than
    two inferences then take longer; what it has saved is added to the seconds.
    """
    mod, target = load_weighted_module(Path(folder)), _tvm.load_own_json(target_json)
    n_processes = n_build_workers(usable_physical_cores())
    with _silent_stderr(), target, PassContext(opt_level=3):
        start_sec = time.perf_counter()
        others = _untuned_targets(mod, target, quick=quick)
        code, parts = _network_code(mod, target, others)
        parts_sec = time.perf_counter()
        objects = ObjectFiles([], parts, {})
        # One process gains nothing but what is kept: ResNet-18 takes a second longer.
        if n_processes > 1 or objects_folder is not None:
            objects = write_objects(parts, objects_folder or folder, n_processes)
        objects_sec = time.perf_counter() - parts_sec
        if objects.refused:
            return Exported.without(objects.refused)
        try:
            executable = _tvm.link_network(code, objects.rest)
        except Exception as error:
            names = [str(v.name_hint) for mod, _ in objects.rest for v in mod.functions]
            if len(names) != 1 or machine_failure(error):
                raise
            return Exported.without({names[0]: summary_line(error)})
        compile_sec = time.perf_counter() - start_sec
        # In that folder, because a killed worker leaves its files.
        own = {"addons": objects.paths, "workspace_dir": folder}
        executable.export_library(path, **own, **_LINKING if path.endswith(".so") else {})
    n_quick = sum(each.attrs["opt-level"] == _QUICK_OPT_LEVEL for each in others.values())
    saved_sec = objects_sec * (_QUICK_MARGIN - 1.0) * n_quick / max(len(others), 1)
    return Exported(compile_sec + saved_sec, {})


def export_function(mod_json: str, target_json: str, path: str) -> None:
    """Compile a tensor function that has its schedule."""
    mod, target = _tvm.load_own_json(mod_json), _tvm.load_own_json(target_json)
    _build_tir(mod, target).export_library(path)


def device_kind(target: Target) -> str:
    """Return the name of the device that runs a target's code."""
    return "cpu" if target.kind.name in ("llvm", "c") else str(target.kind.name)


def _network_code(
    mod: IRModule, target: Target, others: Mapping[str, Target]
) -> tuple[Any, list[_tvm.Part]]:
    """Lower what :func:`schedule_network` returns, within the target; compile all but functions.

    ``others`` is what :func:`_untuned_targets` returns.
    """
    t = _tvm.relax_transform
    # From calls of tensor functions to the virtual machine's code.
    lower = [
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
    mod = with_default_schedules(follow_hints(_without_blockless(mod, pack)), target)
    return _tvm.network_code(Sequential(lower)(mod), target, others)


def _untuned_targets(mod: IRModule, target: Target, *, quick: bool = False) -> dict[str, Target]:
    """Return the targets of functions without a schedule, by their names."""
    if target.kind.name != "llvm" or "opt-level" in target.attrs:
        return {}
    slow, fast = (
        Target({**target.export(), "opt-level": level})
        for level in (_UNTUNED_OPT_LEVEL, _QUICK_OPT_LEVEL)
    )
    return {
        str(variable.name_hint): fast if quick and _is_small(function) else slow
        for variable, function in mod.functions.items()
        if isinstance(function, PrimFunc) and not _tvm.is_scheduled(function)
    }


def _is_small(function: PrimFunc) -> bool:
    """Say whether compiling a function without optimizations saves more than it costs."""
    try:
        flops = _tvm.estimate_tir_flops(IRModule({"main": function}))
    except Exception:  # TVM does not count everything that it compiles
        return False
    return bool(flops <= _MOST_QUICK_FLOPS)


def _without_blockless(mod: IRModule, change: Callable[[IRModule], IRModule]) -> IRModule:
    """Change a module without its functions that have no blocks, which splitting refuses."""
    apart = {
        variable: function
        for variable, function in mod.functions.items()
        if isinstance(function, PrimFunc) and not _tvm.has_blocks(function)
    }
    rest = {key: each for key, each in mod.functions.items() if key not in apart}
    result = change(IRModule(rest, attrs=mod.attrs))
    return IRModule({**dict(result.functions.items()), **apart}, attrs=result.attrs)


def _build_tir(mod: IRModule, target: Target) -> _tvm.Module:
    """Compile what :func:`schedule_tir` returns."""
    with target, PassContext(opt_level=3):
        return _tvm.build_tir(with_default_schedules(follow_hints(mod), target), target=target)


def _apply(
    mod: IRModule,
    database: Database | None,
    target: Target,
    refused: Mapping[str, str],
    check: Callable[[], None] | None = None,
) -> tuple[IRModule, set[str], dict[str, str]]:
    """Give each tensor function its best schedule, without those that are refused."""
    tuned: set[str] = set()
    failed: dict[str, str] = {}
    if database is None:
        return mod, tuned, failed

    def apply_to(variable: Any) -> PrimFunc | None:
        if check is not None:
            check()
        name = str(variable.name_hint)
        if name in refused:
            failed[name] = refused[name]
            return None
        # One function at a time: a record that cannot be applied affects only its own.
        try:
            # Each thread has contexts of its own.
            with target, PassContext(opt_level=3), database:
                return _apply_one(IRModule({variable: mod[variable]}))
        except Exception as error:
            failed[name] = (str(error).strip() or repr(error)).splitlines()[-1]
            logger.warning("%s: its record could not be applied: %s", name, failed[name])
            return None

    functions = dict(mod.functions.items())
    variables = [each for each, function in functions.items() if isinstance(function, PrimFunc)]
    with ThreadPoolExecutor(usable_physical_cores()) as threads:
        for variable, applied in zip(variables, threads.map(apply_to, variables), strict=True):
            if applied is not None:
                functions[variable] = applied
                tuned.add(str(variable.name_hint))
    return IRModule(functions, attrs=mod.attrs), tuned, failed


def _apply_one(single: IRModule) -> PrimFunc | None:
    """Return the function of a module with its schedule, None if it has no record."""
    applied = _tvm.relax_transform.MetaScheduleApplyDatabase()(single)
    (function,) = applied.functions.values()
    if not _tvm.is_scheduled(function):
        return None
    _tvm.relax_transform.SplitLayoutRewritePreproc()(
        applied
    )  # fails here, not for the whole network
    return function


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C++ writes to stderr: TVM warns once for each buffer that it reuses."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
