"""The check of single functions: latency and outputs before and after their search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import Database, ExtractedTask, args_info_of, save_json
from tvm_adaptive.models import largest_difference
from tvm_adaptive.models.compile import device_kind, export_function, schedule_tir
from tvm_adaptive.models.run import try_function
from tvm_adaptive.tuning.library_check import (
    LEAST_RUN_SEC,
    UNTUNED_SHARE,
    LibraryCheck,
    Measurement,
)
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.values.agreement import outputs_problem


class OperatorCheck(LibraryCheck):
    """Compile, run and time single functions before and after their search."""

    def __init__(self, context: RunContext, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(context)
        self._tasks = tasks
        self._before: list[Measurement | None] = []

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        budget = self._context.budget
        with self._context.stage("untuned"):
            least_left_sec = (1.0 - UNTUNED_SHARE) * budget.left_sec
            for task in self._tasks:
                if budget.left_sec <= least_left_sec < math.inf:
                    self._report_shortfall(f"no time was left to time {task.task_name} untuned")
                    self._before.append(None)
                    continue
                path = self._compile(task, None)
                # A function's first run is worth a little more than its share.
                most_sec = max(budget.left_sec - least_left_sec, LEAST_RUN_SEC)
                self._before.append(None if path is None else self._measure(task, path, most_sec))
        known = [each.latency_sec for each in self._before if each is not None]
        if len(known) == len(self._tasks):
            self._context.journal.write("untuned", seconds=sum(known))
            self._context.observer.note(f"untuned: {sum(known) * 1e3:.3f} ms")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned functions."""
        if self._context.budget.interrupted:
            return None
        # All libraries before any comparison: they are what the user wants.
        with self._context.stage("compile"):
            paths = [self._compile(task, database) for task in self._tasks]
        compiled = list(zip(self._tasks, paths, strict=True))
        with self._context.stage("compare"):
            after = [None if path is None else self._measure(task, path) for task, path in compiled]
            for task, path in compiled:
                if path is not None:
                    self.libraries[str(task.task_name)] = self._linked(path)
        self.n_tuned = sum(
            path is not None and database.has_workload(task.dispatched[0])
            for task, path in compiled
        )
        self.coverage = f"{self.n_tuned} of {len(self._tasks)} functions tuned"
        return self._compare(self._before, after)

    def _compile(self, task: ExtractedTask, database: Database | None) -> Path | None:
        """Compile a function; return None, and report why, if there is no library."""
        target = self._context.target
        # Two names: a worker that has loaded a library would find the old one under it.
        state = ".untuned" if database is None else ""
        path = self._context.work_dir / f"{task.task_name}{state}{self._suffix}"
        try:
            mod = schedule_tir(task.dispatched[0], target, database)
            self._compile_tuned(export_function, (save_json(mod), save_json(target), str(path)))
        except Exception as error:
            self._report_uncompiled(path, error, "")
            return None
        return path

    def _measure(
        self, task: ExtractedTask, path: Path, most_sec: float = math.inf
    ) -> Measurement | None:
        mod = task.dispatched[0]
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._context.target), self._context.seed)
        found = self._run(try_function, job, path, most_sec)
        return None if found is None else Measurement(*found)

    def _compare(
        self, before: Sequence[Measurement | None], after: Sequence[Measurement | None]
    ) -> Comparison | None:
        """Compare what was measured; None if a measurement is missing."""
        pairs = [
            (old, new)
            for old, new in zip(before, after, strict=True)
            if old is not None and new is not None
        ]
        if len(pairs) < len(before):
            return None
        differences = [largest_difference(new.outputs, old.outputs) for old, new in pairs]
        problems = (
            self._problem(task, new.outputs, old.outputs)
            for task, (old, new) in zip(self._tasks, pairs, strict=True)
        )
        problem = next(filter(None, problems), "")
        comparison = Comparison(
            before_sec=sum(old.latency_sec for old, _ in pairs),
            after_sec=sum(new.latency_sec for _, new in pairs),
            max_abs=max(difference.max_abs for difference in differences),
            max_rel=max(difference.max_rel for difference in differences),
            agree=not problem,
            problem=problem,
        )
        self._context.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison

    def _problem(
        self, task: ExtractedTask, outputs: Sequence[Any], reference: Sequence[Any]
    ) -> str:
        """Say where the outputs of a function disagree with those of the untuned one."""
        problem = outputs_problem(outputs, reference, self._context.config.finish.rtol)
        return f"{task.task_name}: {problem}" if problem else ""
