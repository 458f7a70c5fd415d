"""Compare the functions of the tuned library with the untuned ones, in a worker with a deadline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from tvm_adaptive._tvm import (
    Constant,
    IRModule,
    PrimFunc,
    data_of_constant,
    normalize_mod,
    workload_key,
)
from tvm_adaptive.errors import MachineError, OutOfTimeError, WorkerError, WorkerTimeoutError
from tvm_adaptive.models.compare_calls import ComparedCalls, compare_calls
from tvm_adaptive.models.compile import Coverage
from tvm_adaptive.models.prepare import Prepared, output_counts, tensor_calls
from tvm_adaptive.runner.playoff.finalist import SCHEDULE_FAILED
from tvm_adaptive.runner.playoff.modules import buffers_of, longest_sums
from tvm_adaptive.runner.playoff.verifier import failure_text
from tvm_adaptive.tuning.checks.library import FunctionCheck
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.values.agreement import tolerance
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# The untuned and the tuned library, their inputs, and the kind of their device.
Builds: TypeAlias = tuple[tuple[str, str], Sequence[Any], str]

_SHARED = ("float16", "float32", "float64")
# Numbers that tell nearly all weights from plain ones.
_FIRST = 16
# With less, loading two libraries would be cut short as often as not.
_LEAST_LOAD_SEC = 1.0
# Each function that crashes costs one more run. Of thousands of candidates few crash, and a
# library with more of them has another fault.
_MOST_CRASHES = 3


def functions_of(prepared: Prepared) -> dict[str, PrimFunc]:
    """Return the functions of a network in all forms, by their names."""
    mod, alternatives = prepared.mod, prepared.alternatives
    direct = {name: mod[name] for name in output_counts(mod)}
    return direct if alternatives is None else direct | alternatives.functions


def names_by_workload(prepared: Prepared) -> dict[str, list[str]]:
    """Return the names of the functions of each task, by its workload's key."""
    found: dict[str, list[str]] = {}
    for name, function in functions_of(prepared).items():
        found.setdefault(workload_key(normalize_mod(function)), []).append(name)
    return found


def verdict_on(functions: Iterable[str], covered: Coverage, found: ComparedCalls) -> FunctionCheck:
    """Return what was found of the functions of one task, by their names."""
    # Of equal functions of two groups of forms, a library may have one.
    library = covered.functions
    names = [name for name in functions if name in library]
    failed = {name: f"{SCHEDULE_FAILED}{why}" for name, why in covered.failed.items()}
    all_problems = failed | found.problems
    problems = [all_problems[name] for name in names if name in all_problems]
    if problems:
        return FunctionCheck(problems[0])
    is_checked = all(
        name in found.n_compared and name not in found.unclear and name in covered.tuned
        for name in names
    )
    if not names or not is_checked:
        return FunctionCheck()
    return FunctionCheck("", min(found.seconds.get(name, 0.0) for name in names))


def compare_functions(
    context: RunContext,
    pool: WorkerPool,
    prepared: Prepared,
    builds: Builds,
    steps: Mapping[str, Sequence[str]],
    *,
    most_sec: float,
    rounding_sec: float = 0.0,
    in_overtime: bool = False,
) -> ComparedCalls:
    """Compare the functions of two builds of a network; see :func:`compare_builds`."""
    n_outputs, functions = compared_outputs(prepared.mod, steps), functions_of(prepared)
    rtol = tolerances({name: functions[name] for name in n_outputs}, context.config.finish.rtol)
    found = compare_builds(
        context,
        pool,
        builds,
        n_outputs,
        rtol=rtol,
        steps=steps,
        most_sec=most_sec,
        rounding_sec=rounding_sec,
        in_overtime=in_overtime,
    )
    # Whatever such a function reads, its result is the same: a play-off draws other weights.
    for name in names_with_plain_weights(prepared.mod):
        for each in (name, *steps.get(name, ())):
            found.n_compared.pop(each, None)
    return found


def names_with_plain_weights(mod: IRModule) -> set[str]:
    """Return the functions with weights, as rows and columns, that are all one number.

    Networks have some before they are trained: the last scale of a block may begin with 0, which
    a convolution's weights are multiplied by.
    """
    return {
        str(call.args[0].name_hint)
        for call in tensor_calls(mod)
        if any(_is_plain(each) for each in call.args[1].fields)
    }


def _is_plain(argument: Any) -> bool:
    if not isinstance(argument, Constant):
        return False
    value = data_of_constant(argument)
    dtype = str(value.dtype)
    if "float" not in dtype or sum(int(extent) > 1 for extent in value.shape) < 2:
        return False
    # Large weights are not copied; NumPy knows few types that others share.
    array = np.from_dlpack(value) if dtype in _SHARED else value.numpy()
    flat = array.reshape(-1)
    return flat.size > 0 and bool((flat[:_FIRST] == flat[0]).all() and (flat == flat[0]).all())


def compare_builds(
    context: RunContext,
    pool: WorkerPool,
    builds: Builds,
    n_outputs: Mapping[str, int],
    *,
    rtol: float | Mapping[str, float],
    steps: Mapping[str, Sequence[str]] = MappingProxyType({}),
    most_sec: float,
    rounding_sec: float = 0.0,
    in_overtime: bool = False,
) -> ComparedCalls:
    """Compare two builds call by call; a crash or a hang is the problem of its function.

    The first attempt has ``rounding_sec`` to see what the reference rounds; with ``in_overtime``
    it may end after the budget. Raises OutOfTimeError when the budget ends first, WorkerError when
    something else than a tuned function failed.
    """
    failed: dict[str, str] = {}
    with ScratchFolder("calls", context.work_dir) as folder:
        path = folder / "function"
        while True:
            path.write_text("")
            left_sec = context.budget.left_sec
            if in_overtime and not failed:
                left_sec = max(_LEAST_LOAD_SEC, context.budget.overtime_left_sec)
            limit_sec = min(most_sec, left_sec)
            if limit_sec < min(_LEAST_LOAD_SEC, most_sec):
                raise OutOfTimeError("no time was left to compare the functions one by one")
            compare = functools.partial(
                compare_calls,
                steps=dict(steps),
                skipped=tuple(failed),
                rounding_sec=0.0 if failed else rounding_sec,
                progress_file=str(path),
            )
            (outcome,) = pool.map(compare, [(*builds, n_outputs, rtol)], limit_sec)
            if outcome.error is None:
                found: ComparedCalls = outcome.value
                return dataclasses.replace(found, problems={**found.problems, **failed})
            name = path.read_text()
            _raise_unless_its_own(outcome.error, name, limit_sec < most_sec)
            if len(failed) == _MOST_CRASHES:
                raise outcome.error
            failed[name] = failure_text(outcome.error)


def _raise_unless_its_own(error: WorkerError, name: str, is_short: bool) -> None:
    """Raise an error that is not the failure of the function that ran."""
    if isinstance(error, WorkerTimeoutError) and is_short:
        raise OutOfTimeError("the time ended while functions were compared one by one") from error
    if isinstance(error, MachineError) or not name:
        raise error


def compared_outputs(mod: IRModule, steps: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return how many outputs each function of two builds has, one of which computes in steps."""
    return output_counts(mod) | {name: 1 for those in steps.values() for name in those}


def steps_in_library(
    steps: Mapping[str, Sequence[str]], equal: Iterable[Sequence[str]], library: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the steps in the place of functions, by the names that a library has.

    Of equal steps of several groups it has one, which all of them call.
    """
    found = {
        name: next((each for each in names if each in library), name)
        for names in equal
        for name in names
    }
    return {
        name: tuple(each if each in library else found[each] for each in those)
        for name, those in steps.items()
    }


def tolerances(functions: Mapping[str, PrimFunc], rtol: float) -> dict[str, float]:
    """Return the relative difference that is allowed of each function's outputs.

    At least ``rtol``; more for short types, of which another order of additions rounds more.
    """
    found = {}
    for name, function in functions.items():
        single = normalize_mod(function)
        dtypes = [dtype for dtype, _ in buffers_of(single)]
        found[name] = max(rtol, tolerance(dtypes, longest_sums(single)))
    return found
