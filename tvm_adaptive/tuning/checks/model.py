"""The check of a model: of a network, or of the single functions of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tvm_adaptive._tvm import ExtractedTask, functions_as_tasks
from tvm_adaptive.errors import as_invalid_option
from tvm_adaptive.models import Network, TIRWorkload, extract, prepare
from tvm_adaptive.tuning.checks.network import NetworkCheck
from tvm_adaptive.tuning.checks.operators import OperatorCheck
from tvm_adaptive.tuning.session import RunContext

Check: TypeAlias = NetworkCheck | OperatorCheck


def tasks_and_check(
    context: RunContext, model: Network | TIRWorkload
) -> tuple[Sequence[ExtractedTask], Check]:
    """Return the tasks of a model and its check, which is to be closed."""
    if isinstance(model, Network):
        with context.stage("prepare"), as_invalid_option(f"TVM cannot prepare {model.name}"):
            prepared = prepare(model, context.target, **context.config.preparation)
            tasks = extract(prepared, context.target)
        return tasks, NetworkCheck(context, model, prepared)
    tasks = functions_as_tasks(model.mod, context.target)
    return tasks, OperatorCheck(context, tasks)
