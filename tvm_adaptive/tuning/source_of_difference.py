"""Say which function a tuned network's wrong outputs come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tvm_adaptive._tvm import PrimFunc, normalize_mod, workload_key
from tvm_adaptive.errors import OutOfTimeError, WorkerError, summary_line
from tvm_adaptive.models import Prepared, extract
from tvm_adaptive.tuning.build_check import Builds, compare_builds, compared_outputs, tolerances
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.workers.pool import WorkerPool

# The untuned network is slow.
_MOST_SEC = 120.0


def source_of_difference(
    context: RunContext,
    pool: WorkerPool,
    prepared: Prepared,
    builds: Builds,
    *,
    tuned: Collection[str],
    steps: Mapping[str, Sequence[str]],
) -> str:
    """Compare the functions of two builds one by one, as far as time allows; return the finding."""
    if context.farm is not None:
        return "on a farm, functions are not compared one by one"
    n_outputs = compared_outputs(prepared.mod, steps)
    functions = {name: _function_of(name, prepared) for name in n_outputs}
    rtol = tolerances(functions, context.config.finish.rtol)
    try:
        found = compare_builds(
            *(context, pool, builds, n_outputs), rtol=rtol, steps=steps, most_sec=_MOST_SEC
        )
    except OutOfTimeError as error:
        return str(error)
    except WorkerError as error:
        context.journal.write("error", where="first difference", message=str(error))
        return f"the functions could not be compared one by one: {summary_line(error)}"
    if not found.problems:
        return "no function alone differs: small differences add up"
    name, problem = next(iter(found.problems.items()))
    kind = f"task {_task_of(name, prepared, context)}" if name in tuned else "not tuned"
    return f"the first function whose outputs differ is {name} ({kind}): {problem}"


def _task_of(function: str, prepared: Prepared, context: RunContext) -> str:
    """Return the name of a function's task, which equal functions share."""
    key = workload_key(normalize_mod(_function_of(function, prepared)))
    tasks = extract(prepared, context.target)
    return {workload_key(task.dispatched[0]): str(task.task_name) for task in tasks}[key]


def _function_of(name: str, prepared: Prepared) -> PrimFunc:
    others = {} if prepared.alternatives is None else prepared.alternatives.functions
    return others.get(name) or prepared.mod[name]
