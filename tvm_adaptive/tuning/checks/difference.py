"""Say which function a tuned network's wrong outputs come from."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tvm_adaptive._tvm import normalize_mod, workload_key
from tvm_adaptive.errors import OutOfTimeError, WorkerError, summary_line
from tvm_adaptive.models import Prepared, extract
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.tuning.checks.functions import functions_of
from tvm_adaptive.tuning.session import RunContext

# Of a comparison of all functions: the untuned network is slow.
MOST_SEC = 120.0


def source_of_difference(
    context: RunContext,
    compare: Callable[[], ComparedCalls],
    prepared: Prepared,
    *,
    tuned: Collection[str],
) -> str:
    """Compare the functions of two builds, as far as time allows; return the finding."""
    if context.farm is not None:
        return "on a farm, functions are not compared one by one"
    try:
        found = compare()
    except OutOfTimeError as error:
        return str(error)
    except WorkerError as error:
        context.journal.write("error", where="first difference", message=str(error))
        return f"the functions could not be compared one by one: {summary_line(error)}"
    problems = found.problems or found.unclear
    if not problems:
        return "no function alone differs: small differences add up"
    name, problem = next(iter(problems.items()))
    kind = f"task {_task_of(name, prepared, context)}" if name in tuned else "not tuned"
    return f"the first function whose outputs differ is {name} ({kind}): {problem}"


def _task_of(function: str, prepared: Prepared, context: RunContext) -> str:
    """Return the name of a function's task, which equal functions share."""
    key = workload_key(normalize_mod(functions_of(prepared)[function]))
    tasks = extract(prepared, context.target)
    return {workload_key(task.dispatched[0]): str(task.task_name) for task in tasks}[key]
