"""Say which function a tuned network's wrong outputs come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from tvm_adaptive._tvm import normalize_mod, workload_key
from tvm_adaptive.errors import summary_line
from tvm_adaptive.models import Prepared, extract
from tvm_adaptive.models.first_difference import first_difference
from tvm_adaptive.models.prepare import output_counts
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.workers.pool import WorkerPool

# With less, loading two libraries would be cut short as often as not.
_LEAST_SEC = 1.0
# The untuned network is slow.
_MOST_SEC = 120.0

# The untuned and the tuned library, their inputs, and the kind of their device.
Builds: TypeAlias = tuple[tuple[str, str], Sequence[Any], str]


def source_of_difference(
    context: RunContext,
    pool: WorkerPool,
    prepared: Prepared,
    builds: Builds,
    tuned: Collection[str],
) -> str:
    """Compare the functions of two builds one by one, as far as time allows; return the finding."""
    if context.farm is not None:
        return "on a farm, functions are not compared one by one"
    limit_sec = min(_MOST_SEC, context.budget.left_sec)
    if limit_sec < _LEAST_SEC:
        return "no time was left to compare the functions one by one"
    job = (*builds, output_counts(prepared.mod), context.config.finish.rtol)
    (outcome,) = pool.map(first_difference, [job], limit_sec)
    if outcome.error is not None:
        context.journal.write("error", where="first difference", message=str(outcome.error))
        return f"the functions could not be compared one by one: {summary_line(outcome.error)}"
    if outcome.value is None:
        return "no function alone differs: small differences add up"
    name, problem = outcome.value
    kind = f"task {_task_of(name, prepared, context)}" if name in tuned else "not tuned"
    return f"the first function whose outputs differ is {name} ({kind}): {problem}"


def _task_of(function: str, prepared: Prepared, context: RunContext) -> str:
    """Return the name of a function's task, which equal functions share."""
    key = workload_key(normalize_mod(prepared.mod[function]))
    tasks = extract(prepared, context.target)
    return {workload_key(task.dispatched[0]): str(task.task_name) for task in tasks}[key]
