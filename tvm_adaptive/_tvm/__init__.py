"""Names of TVM that the package uses. Only this folder imports TVM and changes with it.

The import first checks the installed versions: a bad pair of apache-tvm and apache-tvm-ffi
ends the process without an exception.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tvm_adaptive._tvm.intrinsics import backends_of, only_intrinsics
from tvm_adaptive._tvm.versions import check_versions, installed_version
from tvm_adaptive.values.hooks import (
    DatabaseHooks,
    ModelHooks,
    NoSearchHooks,
    RunnerHooks,
    SchedulerHooks,
    SearchHooks,
)

TVM_VERSION = installed_version("apache-tvm")
FFI_VERSION = installed_version("apache-tvm-ffi")
check_versions(TVM_VERSION, FFI_VERSION)

# mypy: implicit-reexport
# ruff: noqa: E402, F401 - the versions are checked before TVM is touched; re-exported
import tvm
from tvm import DataType, IRModule, relax, s_tir, te, tirx, topi
from tvm.driver import build as build_tir
from tvm.ir import Range, load_json, save_json
from tvm.ir.transform import PassContext, Sequential, module_pass
from tvm.ir.utils import derived_object as _derived_object
from tvm.relax import backend as relax_backend
from tvm.relax import dpl as relax_patterns
from tvm.relax import transform as relax_transform
from tvm.relax import vm_build
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.frontend import nn
from tvm.rpc import base as rpc_base
from tvm.rpc import connect as rpc_connect
from tvm.runtime import (
    Module,
    Tensor,
    device,
    from_dlpack,
    load_module,
    load_param_dict,
    save_param_dict,
    tensor,
)
from tvm.runtime.vm import VirtualMachine
from tvm.s_tir import Schedule, ScheduleError, Trace
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.builder import Builder, BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.cost_model import CostModel, PyCostModel
from tvm.s_tir.meta_schedule.database import Database, PyDatabase, TuningRecord, Workload
from tvm.s_tir.meta_schedule.extracted_task import ExtractedTask
from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.relax_integration import (
    extract_tasks,
    extracted_tasks_to_tune_contexts,
)
from tvm.s_tir.meta_schedule.runner import (
    PyRunner,
    PyRunnerFuture,
    RPCConfig,
    Runner,
    RunnerInput,
    RunnerResult,
)
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common
from tvm.s_tir.meta_schedule.search_strategy import (
    EvolutionarySearch,
    MeasureCandidate,
    PySearchStrategy,
    SearchStrategy,
)
from tvm.s_tir.meta_schedule.task_scheduler import PyTaskScheduler, TaskScheduler
from tvm.s_tir.meta_schedule.tune_context import TuneContext
from tvm.s_tir.meta_schedule.tune_context import _normalize_mod as normalize_mod
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.support.cc import create_shared, get_cc
from tvm.support.tar import tar
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu, target_has_features
from tvm.tirx import (
    Bind,
    BufferLoad,
    BufferStore,
    Evaluate,
    For,
    IndexMap,
    IntImm,
    PrimFunc,
    SeqStmt,
    Var,
    address_of,
    call_intrin,
)
from tvm.tirx.stmt import ForKind
from tvm_ffi import register_error, structural_hash
from tvm_ffi.serialization import from_json_graph_str

_T = TypeVar("_T")

Part: TypeAlias = tuple[IRModule, Target]  # functions, and what they are compiled for

# TVM 0.26 has them in tirx.
SBlock: Any = getattr(s_tir, "SBlock", None) or tirx.SBlock
SBlockRealize: Any = getattr(s_tir, "SBlockRealize", None) or tirx.SBlockRealize

Constant: Any = type(relax.const(0.0))  # each version of TVM names it otherwise
# A Python object that has passed through C++ comes back as a bare wrapper of the base class.
# This table has its Python side, which the C++ object at the address owns.
_python_sides: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# MetaSchedule's set-up of tasks changes logging and modules of the whole process.
_set_up = threading.Lock()
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def derived_object(cls: type[_T]) -> type[_T]:
    """Make a Python class usable by TVM's C++, as TVM's decorator of the same name does.

    In addition, :func:`python_side` finds the instance when C++ returns the object. As with
    TVM's own, subclasses must inherit from ``Decorated._cls``.
    """
    derived: Any = _derived_object(cls)
    construct: Callable[..., None] = derived.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _python_sides[handle(self)] = self._inst

    init.__wrapped__ = construct  # type: ignore[attr-defined]
    init.__doc__ = construct.__doc__
    derived.__init__ = init
    return derived  # type: ignore[no-any-return]


def handle(obj: Any) -> int:
    """Return the address of the C++ object behind a TVM object."""
    return int(obj.__chandle__())


def python_side(obj: Any) -> Any | None:
    """Return the Python instance behind an object, None for a stock object."""
    return _python_sides.get(handle(obj))


def _hooks_of(kind: Any) -> Callable[[Any], Any]:
    """Return a function that finds the hooks of a kind in an object; None in a stock object."""

    def find(obj: Any) -> Any:
        found = python_side(obj)
        return found if isinstance(found, kind) else None

    return find


model_hooks: Callable[[Any], ModelHooks | None] = _hooks_of(ModelHooks)
runner_hooks: Callable[[Any], RunnerHooks | None] = _hooks_of(RunnerHooks)
scheduler_hooks: Callable[[Any], SchedulerHooks | None] = _hooks_of(SchedulerHooks)
database_hooks: Callable[[Any], DatabaseHooks | None] = _hooks_of(DatabaseHooks)


def search_hooks(strategy: Any) -> SearchHooks:
    """Return a search strategy's hooks for schedulers; without effect for a stock strategy."""
    found: SearchHooks | None = _hooks_of(SearchHooks)(strategy)
    return NoSearchHooks() if found is None else found


def exported(name: str) -> Callable[..., Any]:
    """Return a C++ function that MetaSchedule exports, by its short name."""
    return tvm.get_global_func(f"s_tir.meta_schedule.{name}")  # type: ignore[no-any-return]


def sample_population(strategy: EvolutionarySearch, n: int) -> list[Schedule]:
    """Draw about ``n`` valid random schedules by the native initial sampling."""
    return list(exported("SearchStrategyEvolutionarySearchSampleInitPopulation")(strategy, n))


def evolve(strategy: EvolutionarySearch, population: list[Schedule], n: int) -> list[Schedule]:
    """Evolve natively; return up to ``n`` new unmeasured schedules, best score first."""
    return list(
        exported("SearchStrategyEvolutionarySearchEvolveWithCostModel")(strategy, population, n)
    )


def start_thread_pool() -> int:
    """Start TVM's thread pool for CPU kernels of this thread; return its number of threads."""
    return int(tvm.get_global_func("runtime.NumThreads")())


def import_tensor_intrinsics() -> None:
    """Register every tensor intrinsic of every backend; costs some 12 s of CPU, once."""
    import tvm.s_tir.tensor_intrin


def te_workload_names() -> list[str]:
    """Return the names of MetaSchedule's testing workloads (``"C2D"``, ``"GMM"``, ...)."""
    from tvm.s_tir.meta_schedule.testing import te_workload as workloads

    return sorted(workloads.CONFIGS)


def te_workload(name: str, size: int = 0) -> IRModule:
    """Return a testing workload's size of this index as a module with one function, main."""
    from tvm.s_tir.meta_schedule.testing import te_workload as workloads

    return IRModule({"main": workloads.create_te_workload(name, size)})


def load_own_json(text: str) -> Any:
    """Load what :func:`save_json` of this version has written.

    TVM's ``load_json`` upgrades files of older versions: it parses and writes the text once
    more in Python, some 30 ms for a tensor function.
    """
    return from_json_graph_str(text)


def module_key(mod: IRModule) -> int:
    """Return the structural hash of a module: the key of a candidate."""
    return int(structural_hash(mod))


def workload_key(mod: IRModule) -> str:
    """Return 16 hexadecimal digits that structurally equal modules share."""
    return f"{module_key(mod) & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def structure_key(mod: Any) -> str:
    """Return 16 hexadecimal digits of a module without the values of its constants."""
    return f"{structural_hash(mod, skip_tensor_content=True) & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def has_feature(target: Target, name: str) -> bool:
    """Say whether a processor has a feature by LLVM's name, e.g. ``"avx2"``."""
    return bool(target_has_features([name], target))


def is_gpu(target: Target) -> bool:
    """Say whether a target's functions need thread bindings."""
    return "gpu" in [str(key) for key in target.keys]


def anchor_of(mod: IRModule) -> str:
    """Return the name of a task's heaviest block, e.g. ``"conv2d_nhwc"``; "" without one."""
    block = tvm.s_tir.analysis.find_anchor_sblock(mod)
    return "" if block is None else str(block.name_hint)


def block_names(mod: IRModule) -> list[str]:
    """Return the names of a module's blocks, outermost ones, in their order."""
    schedule = Schedule(mod)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    return [str(schedule.get(block).name_hint) for block in blocks]


def has_blocks(function: PrimFunc) -> bool:
    """Say whether a function has blocks, which schedules work on; sorting has none."""
    body = function.body
    if not isinstance(body, SBlockRealize) or str(body.block.name_hint) != "root":
        return False
    return bool(block_names(IRModule({"main": function})))


def is_reshape(function: PrimFunc) -> bool:
    """Say whether a function only reshapes its argument: a network then makes a view of it."""
    is_block = isinstance(function.body, SBlockRealize)
    return is_block and bool(relax.analysis.has_reshape_pattern(function))


def args_info_of(mod: IRModule) -> list[ArgInfo]:
    """Return the arguments that a candidate's module takes when it is measured."""
    return list(ArgInfo.from_entry_func(mod, remove_preproc=True))


def argument_bytes(mod: IRModule) -> int:
    """Return the bytes of the arguments: what a call reads and writes at least."""
    return sum(map(bytes_of, args_info_of(mod)))


def bytes_of(info: ArgInfo) -> int:
    """Return the bytes of an argument."""
    return math.prod(map(int, info.shape)) * int(DataType(str(info.dtype)).itemsize)


def json_database(work_dir: str | Path) -> Database:
    """Open MetaSchedule's JSON database in a directory, which must exist."""
    return ms.database.JSONDatabase(work_dir=str(work_dir), module_equality="structural")


def copy_record(
    record: TuningRecord, database: Database, run_secs: Sequence[float] | None = None
) -> None:
    """Commit a record of another database, with ``run_secs`` instead of its times if given."""
    workload = database.commit_workload(record.workload.mod)
    seconds = record.run_secs if run_secs is None else run_secs
    database.commit_tuning_record(
        TuningRecord(record.trace, workload, seconds, record.target, record.args_info)
    )


def record_as_json(record: TuningRecord) -> Any:
    """Return a record as plain lists, strings and numbers, as in MetaSchedule's files.

    TVM's own method refuses traces that change a layout, a JSON string in its files.
    """
    return _as_plain(exported("TuningRecordAsJSON")(record))


def _as_plain(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, IndexMap):
        return str(save_json(value))
    if hasattr(value, "value"):  # a constant
        return value.value
    if hasattr(value, "items"):
        return {_as_plain(key): _as_plain(each) for key, each in value.items()}
    return [_as_plain(each) for each in value]


def data_of_constant(constant: Any) -> Any:
    """Return the tensor in a constant, which each version of TVM names otherwise."""
    return constant.value if hasattr(constant, "value") else constant.data


def result_type_of(function: relax.Function) -> Any:
    """Return the type of a function's result, which TVM 0.26 names otherwise."""
    return function.ret_ty if hasattr(function, "ret_ty") else function.ret_struct_info


def with_body(function: relax.Function, body: Any, params: Any = None) -> relax.Function:
    """Return a Relax function with another body, and other parameters if given."""
    attributes = (result_type_of(function), function.is_pure, function.attrs)
    return relax.Function(function.params if params is None else params, body, *attributes)


def with_main(mod: IRModule, main: relax.Function) -> IRModule:
    """Return a module with another function ``main``."""
    return IRModule({**dict(mod.functions), mod.get_global_var("main"): main}, attrs=mod.attrs)


def bindings_of(function: relax.Function) -> Iterator[Any]:
    """Yield the bindings of a Relax function in their order."""
    for block in function.body.blocks:
        yield from block.bindings


def tensor_call_of(binding: Any) -> Any | None:
    """Return the call of a tensor function that a binding holds; None if it holds none."""
    call: Any = getattr(binding, "value", None)
    is_call = isinstance(call, relax.Call) and getattr(call.op, "name", "") == "relax.call_tir"
    return call if is_call else None


def buffer_of(region: Any) -> Any:
    """Return the buffer of a block's region, which TVM 0.26 names otherwise."""
    return region.source if hasattr(region, "source") else region.buffer


def is_scheduled(function: Any) -> bool:
    """Say whether a function has a schedule from a database."""
    return bool(function.attrs and function.attrs.get("tirx.is_scheduled"))


def network_code(
    mod: IRModule, target: Target, others: Mapping[str, Target]
) -> tuple[Any, list[Part]]:
    """Compile a lowered network for the virtual machine; return that code and the functions.

    ``others`` has targets of functions that are not compiled for ``target``, by their names.
    """
    builder = relax.ExecBuilder()
    left = vm_build._vmcodegen(builder, mod, "bytecode")
    parts: dict[int, tuple[Target, dict[Any, PrimFunc]]] = {handle(target): (target, {})}
    for variable, function in tensor_functions_of(left):
        own = others.get(str(variable.name_hint), target)
        parts.setdefault(handle(own), (own, {}))[1][variable] = function
    return builder, [(IRModule(found), each) for each, found in parts.values() if found]


def link_network(code: Any, parts: Sequence[Part]) -> Any:
    """Compile a network's functions, and join them with its code."""
    (mod, target), *others = parts or [(None, None)]
    with without_argument_checks():
        libraries = [tirx.build(*each) for each in others]
        return vm_build._vmlink(code, target, mod, ext_libs=libraries)


def write_object(part: Part, path: str) -> None:
    """Compile some of a network's functions to an object file."""
    with without_argument_checks():
        tirx.build(*part).write_to_file(path)


def without_argument_checks() -> PassContext:
    """Compile without checks of arguments, which take a quarter to half of the time.

    For functions that only a network calls, which checks its inputs itself, and for candidates
    while they are measured.
    """
    return PassContext(opt_level=3, config={"tirx.disable_assert": True})


def check_well_formed(mod: IRModule) -> None:
    """Raise unless a Relax module is well-formed."""
    if relax.analysis.well_formed(mod) is False:  # TVM 0.27 raises by itself
        raise ValueError("the module is not well-formed")


def memory_database() -> Database:
    """Return a database in memory, with the module equality of :func:`json_database`."""
    return ms.database.MemoryDatabase(module_equality="structural")


def contexts_of(
    tasks: Sequence[ExtractedTask],
    work_dir: str,
    strategy: SearchStrategy,
    seed: int,
    *,
    reductions: bool = False,
) -> list[TuneContext]:
    """Return one tuning context per task; with ``reductions`` by our rules, too.

    See ``reduction_rule`` and ``transform_rule``.
    """
    from tvm_adaptive._tvm.reduction_rule import space_generator_of  # needs this module

    targets = [each.target for each in tasks]
    # MetaSchedule's seeds are in [1, 2^31 - 1).
    with _set_up, _own_logging(), only_intrinsics(backends_of(targets)):
        space = space_generator_of(targets, reductions=reductions)
        try:
            contexts, _ = extracted_tasks_to_tune_contexts(
                list(tasks), work_dir, space, strategy, seed=1 + seed % (2**31 - 2)
            )
        finally:  # contexts have clones of it, but it was given each task, and is never ended
            search_hooks(strategy).forget_task()
    return list(contexts)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Let MetaSchedule set its logging up, but not print its tables unless a level asks for it.

    The files in the work directory have all of it. An application's handlers are hidden from it:
    the set-up fails on those of this logger, and closes those of all others.
    """
    logger = logging.getLogger("tvm.s_tir.meta_schedule")

    def is_foreign(handler: Any) -> bool:
        return not str(handler.get_name() or "").startswith(f"{logger.name}.")

    printing = [each for each in logger.handlers if each.get_name() == f"{logger.name}.console"]
    # After a set-up, the logger's own level is MetaSchedule's, not the application's choice.
    is_chosen = logger.level not in (logging.NOTSET, logging.DEBUG) or not printing
    level = (logger.level if is_chosen else printing[0].level) or logging.WARNING
    # MetaSchedule knows levels with a name only.
    logger.setLevel(min((each for each in _LEVELS if each >= level), default=logging.CRITICAL))
    foreign = [each for each in logger.handlers if is_foreign(each)]
    for handler in foreign:
        logger.removeHandler(handler)
    # What Python closes: its weak references to all handlers, and those with names.
    module: Any = logging
    references = [each for each in module._handlerList if (found := each()) and is_foreign(found)]
    named = {name: each for name, each in module._handlers.items() if is_foreign(each)}
    module._handlerList[:] = [each for each in module._handlerList if each not in references]
    try:
        yield
    finally:
        module._handlerList[:0] = references
        module._handlers.update(named)
        for handler in foreign:
            logger.addHandler(handler)


def functions_as_tasks(
    mod: IRModule | PrimFunc, target: Target, calls: Mapping[str, int] | None = None
) -> list[ExtractedTask]:
    """Return the tensor functions of a module as tasks, ordered by name.

    Names have no slash, as logs and libraries are files of these names. Each is called once
    per inference unless ``calls`` says otherwise.
    """
    # MetaSchedule normalises a function before it looks it up.
    single = {str(v.name_hint): normalize_mod(f) for v, f in tensor_functions_of(mod)}
    tasks: dict[str, ExtractedTask] = {}
    # First the names without a slash, which stay.
    for name, each in sorted(single.items(), key=lambda pair: ("/" in pair[0], pair[0])):
        free = name.replace("/", "_")
        while free in tasks:
            free += "_"
        tasks[free] = ExtractedTask(free, each, target, [each], (calls or {}).get(name, 1))
    return [tasks[name] for name in sorted(tasks)]


def tensor_functions_of(mod: IRModule | PrimFunc) -> list[tuple[Any, PrimFunc]]:
    """Return the tensor functions of a module, with their names."""
    whole = IRModule({"main": mod}) if isinstance(mod, PrimFunc) else mod
    return [(v, f) for v, f in whole.functions.items() if isinstance(f, PrimFunc)]
