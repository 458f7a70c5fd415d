"""The fastest kernels of earlier attempts, built again beside the first batches of a resumed run.

The runner times each before the batch: by its recorded time it says what the machine of those
attempts would take (:mod:`tvm_adaptive.runner.duet`). It is no trial, and has no second record.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    BuilderInput,
    BuilderResult,
    Database,
    IRModule,
    PyBuilder,
    TuneContext,
    args_info_of,
    derived_object,
)
from tvm_adaptive.runner.playoff.modules import mean_sec, sane_records, scheduled
from tvm_adaptive.values.trial_log import EarlierKernel, TrialLog

logger = logging.getLogger(__name__)


@derived_object
class EarlierKernelBuilder(PyBuilder):  # type: ignore[misc]
    """Builds the fastest recorded kernel of a task beside its first batch, and tells the runner."""

    def __init__(
        self, inner: Any, trial_log: TrialLog, contexts: Sequence[TuneContext], database: Database
    ) -> None:
        super().__init__()
        self._inner = inner
        self._trial_log = trial_log
        self._contexts = {str(context.task_name): context for context in contexts}
        self._database = database
        self._kernels: dict[str, EarlierKernel | None] = {}  # by task; None for none

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Return a result per input, in their order."""
        inputs, facts = list(build_inputs), self._trial_log.batch_facts
        # Later, the fastest may be of this attempt.
        is_first = bool(inputs) and facts.task not in self._kernels
        found = self._fastest(facts.task) if is_first else None
        added = [] if found is None else [BuilderInput(found[0], inputs[0].target)]
        results = list(self._inner.build([*inputs, *added]))
        # A batch without a library records no time: the one after it is the first then.
        if is_first and any(each.error_msg is None for each in results):
            self._kernels[facts.task] = None if found is None else _kernel(*found, results[-1])
        facts.earlier = self._kernels.get(facts.task)
        return results[: len(inputs)]

    def close(self) -> None:
        """Remove what was built beside batches; the runner has copies."""
        for kernel in self._kernels.values():
            if kernel is not None:
                shutil.rmtree(Path(kernel.artifact).parent, ignore_errors=True)

    def _fastest(self, task: str) -> tuple[IRModule, float] | None:
        """Return a task's fastest recorded kernel, and its seconds; None without one."""
        context = self._contexts.get(task)
        if context is None:
            return None
        try:
            records = sane_records(self._database, context.mod, context.target, 1)
            return (scheduled(records[0]), mean_sec(records[0])) if records else None
        except Exception:  # C++ called us: an exception would end the whole run
            logger.warning("%s: its times begin on another scale", task, exc_info=True)
            return None


def _kernel(mod: IRModule, sec: float, built: BuilderResult) -> EarlierKernel | None:
    """Return a kernel that was built; None if that failed."""
    if built.artifact_path is None:
        return None
    args_info = tuple(info.as_json() for info in args_info_of(mod))
    return EarlierKernel(str(built.artifact_path), args_info, sec)


@contextlib.contextmanager
def with_earlier_kernels(
    builder: Any,
    trial_log: TrialLog,
    contexts: Sequence[TuneContext],
    database: Database,
) -> Iterator[Any]:
    """Yield a builder that adds the kernels of earlier attempts, if a runner needs them."""
    if not (trial_log.has_anchors and len(database)):
        yield builder
        return
    adding = EarlierKernelBuilder(builder, trial_log, contexts, database)
    with contextlib.closing(adding):
        yield adding
