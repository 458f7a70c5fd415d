"""Compile a network without tuning, in a worker of its own, beside what the run does meanwhile."""

from __future__ import annotations

import contextlib
import functools
import math
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tvm_adaptive._tvm import Target, is_gpu, save_json
from tvm_adaptive.models import Prepared
from tvm_adaptive.models.compile import export_module, schedule_network
from tvm_adaptive.models.weights import save_module
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.workers.pool import Outcome, Step, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# Compiling a tuned network, without writing the weights, takes 6 to 10 times as long as the
# untuned one, plus what else the machine does.
_TUNED_MARGIN = 12.0
# The compiler of CUDA does as much for default schedules: ResNet-18's took 9 s, tuned ones 11.
_TUNED_GPU_MARGIN = 2.0


def tuned_margin(target: Target) -> float:
    """Return how many times as long as an untuned network a tuned one may take to compile."""
    return _TUNED_GPU_MARGIN if is_gpu(target) else _TUNED_MARGIN


class UntunedBuild:
    """The compilation of a network without tuning; it begins at once, and is to be closed.

    A ``quick`` one is only compared with, see :func:`~tvm_adaptive.models.compile.export_module`.
    """

    def __init__(self, context: RunContext, prepared: Prepared, path: Path, *, quick: bool) -> None:
        self.is_quick = quick
        self._context = context
        self._path = path
        self._is_closed = False
        mod, self.coverage = schedule_network(prepared, None, context.target)
        folder = ScratchFolder("network", context.work_dir)
        save_module(mod, folder.path)
        thread = ThreadPoolExecutor(1, path.stem)
        self._compiling = thread.submit(self._compile, folder)
        thread.shutdown(wait=False)  # it ends with the compilation

    def _compile(self, folder: ScratchFolder) -> Outcome | None:
        """Compile in a worker, which one thread uses and ends; None if stopped."""
        task = (str(folder.path), save_json(self._context.target), str(self._path))
        compiling = functools.partial(export_module, quick=self.is_quick)
        step = Step("compiling", compiling, task, math.inf)

        def is_over() -> bool:
            return self._is_closed or self._context.budget.interrupted

        with folder, contextlib.closing(WorkerPool(1, server=self._context.server)) as pool:
            outcomes = dict(pool.stream([pool.plan_of(step)], is_over=is_over))
            return outcomes.get(0)

    def result(self) -> Outcome | None:
        """Wait for what :func:`export_module` returns; None if it was stopped."""
        return self._compiling.result()

    def close(self) -> None:
        """Stop the compilation, before the fork server is closed."""
        self._is_closed = True
        wait([self._compiling])
