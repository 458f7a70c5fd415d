"""Stock MetaSchedule, by its own function with its own defaults.

Nothing of ours takes part but a callback that writes times to a journal and, where a
run is bounded by seconds, a pass-through around the search that says when to end:
MetaSchedule itself knows trials only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.post_optimization import PostOpt
from tvm.s_tir.meta_schedule.relax_integration import extracted_tasks_to_tune_contexts

from benchmarks.configs import config_of
from benchmarks.journals import POST_OPTIMIZATION
from benchmarks.methods import Method
from benchmarks.plan import RunSpec
from tvm_adaptive._tvm import functions_as_tasks
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, Journal
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.measure_callback.recorder import Recorder
from tvm_adaptive.models import TIRWorkload, extract, load_workload, prepare
from tvm_adaptive.search_strategy.stoppable import StoppableSearch
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.parts import STOCK_START_SEC
from tvm_adaptive.tuning.target import resolve_target

# In MetaSchedule's profiler, which has no name for it: most of it are imports.
SET_UP_SCOPE = "CreateContexts"
# Of tune_tasks, whose search ends by seconds then; it counts in 32 bits.
_UNLIMITED = 10**8
# A favour to stock, which gives a build 30 s: as long as `tvm_adaptive.tune` gives.
_BUILD_TIMEOUT_SEC = DEFAULT.measure.build_timeout_sec + STOCK_START_SEC


@dataclasses.dataclass
class _Stages:
    """Time the parts of a run and write them to its journal."""

    journal: Journal
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start_sec = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_sec
        self.journal.write("stage", stage=name, seconds=self.seconds[name])


def tune_stock(spec: RunSpec, method: Method, work_dir: Path) -> None:
    """Tune with stock MetaSchedule; journal and database go to ``work_dir``.

    Parameters
    ----------
    spec : RunSpec
    method : Method
        Its changes say how a network is prepared; as for ours if there are none.
    work_dir : Path
    """
    start_sec = time.monotonic()
    target = resolve_target(spec.target)
    with contextlib.closing(Journal(work_dir / JOURNAL_FILE)) as journal:
        journal.write(
            "run",
            what=spec.workload,
            target=json.loads(str(target)),
            seed=spec.seed,
            budget_sec=spec.budget_sec,
            trials=spec.trials,
        )
        stages = _Stages(journal)
        with stages.stage("prepare"):
            tasks = _tasks(spec.workload, target, method)
        names = [(str(task.task_name), float(int(task.weight))) for task in tasks]
        progress = RunProgress([TaskProgress(*each) for each in names])

        def is_over() -> bool:
            return time.monotonic() - start_sec >= (spec.budget_sec or float("inf"))

        inner = ms.search_strategy.EvolutionarySearch()
        strategy = inner if spec.budget_sec is None else StoppableSearch(inner, is_over, journal)
        with stages.stage("search"):
            with ms.Profiler.timeit(SET_UP_SCOPE):
                contexts, weights = extracted_tasks_to_tune_contexts(
                    tasks, str(work_dir), strategy=strategy, seed=spec.seed + 1
                )
            ms.tune_tasks(
                tasks=contexts,
                task_weights=weights,
                work_dir=str(work_dir),
                max_trials_global=spec.trials or _UNLIMITED,
                num_trials_per_iter=method.batch,
                builder=ms.builder.LocalBuilder(timeout_sec=_BUILD_TIMEOUT_SEC),
                measure_callbacks=[
                    *ms.MeasureCallback.create("default"),
                    Recorder(progress, journal=journal),
                ],
            )
        if method.post_optimization:
            # As tune_tasks does it after its trials; a stage of its own shows its seconds.
            with stages.stage(POST_OPTIMIZATION), contextlib.redirect_stdout(sys.stderr):
                PostOpt(str(work_dir), target).run()
        journal.write("end", seconds=time.monotonic() - start_sec, stages=stages.seconds)


def _tasks(what: str, target: Any, method: Method) -> list[Any]:
    workload = load_workload(what)
    if isinstance(workload, TIRWorkload):
        return functions_as_tasks(workload.mod, target)
    return extract(prepare(workload, target, **config_of(method).preparation), target)
