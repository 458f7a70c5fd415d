"""The check of single functions: outputs and latency beside the untuned ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from tvm_adaptive._tvm import Database, ExtractedTask, args_info_of, save_json
from tvm_adaptive.models import largest_difference
from tvm_adaptive.models.compare_calls import call_problem
from tvm_adaptive.models.compile import Coverage, device_kind, export_function, schedule_tir
from tvm_adaptive.models.run import try_function
from tvm_adaptive.tuning.checks.functions import tolerances
from tvm_adaptive.tuning.checks.library import (
    LEAST_RUN_SEC,
    UNTUNED_SHARE,
    LibraryCheck,
    Measurement,
)
from tvm_adaptive.tuning.manifest import MANIFEST_FILE
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext

# In the names of libraries that are only compared with.
_UNTUNED = ".untuned"


class OperatorCheck(LibraryCheck):
    """Compile, run and time single functions before and after their search."""

    def __init__(self, context: RunContext, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(context)
        self._tasks = tasks
        self._before: list[Measurement | None] = []
        self._tuned: set[str] = set()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for task in self._tasks:
            self._path(task, _UNTUNED).unlink(missing_ok=True)

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        budget = self._context.budget
        with self._context.stage("untuned"):
            least_left_sec = (1.0 - UNTUNED_SHARE) * budget.left_sec
            for task in self._tasks:
                if budget.interrupted:
                    self._before.append(None)
                    continue
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
        self.failure = ""  # of an untuned function
        # All libraries before any comparison: they are what the user wants.
        self._context.journal.write("library", tuned=True)  # what was compared is replaced
        self._forget_description(MANIFEST_FILE)
        with self._context.stage("compile"):
            paths = [self._compile(task, database) for task in self._tasks]
        compiled = list(zip(self._tasks, paths, strict=True))
        self.is_compiled = any(path is not None for path in paths)
        with self._context.stage("compare"):
            after = [None if path is None else self._measure(task, path) for task, path in compiled]
            for task, path in compiled:
                if path is not None:
                    self.libraries[str(task.task_name)] = self._linked(path)
            comparison = self._compare(self._before, after)
            if comparison is not None and self._is_here:
                self._write_roofline()
        tuned: dict[str, int] = {}
        fallback: dict[str, int] = {}
        for task, path in compiled:
            name = str(task.task_name)
            is_tuned = path is not None and name in self._tuned
            (tuned if is_tuned else fallback)[name] = 1
        self.covered = Coverage(tuned, fallback, failed={})
        self.coverage = f"{self.n_tuned} of {len(self._tasks)} functions tuned"
        return comparison

    def _compile(self, task: ExtractedTask, database: Database | None) -> Path | None:
        """Compile a function; return None, and report why, if there is no library."""
        target = self._context.target
        # Two names: a worker that has loaded a library would find the old one under it.
        path = self._path(task, _UNTUNED if database is None else "")
        try:
            self._check_time()
            mod, is_tuned = schedule_tir(task.dispatched[0], target, database)
            self._compile_tuned(export_function, (save_json(mod), save_json(target), str(path)))
        except Exception as error:
            self._report_uncompiled(path, error, "")
            return None
        if is_tuned:
            self._tuned.add(str(task.task_name))
        return path

    def _path(self, task: ExtractedTask, state: str) -> Path:
        return self._context.work_dir / f"{task.task_name}{state}{self._suffix}"

    def _measure(
        self, task: ExtractedTask, path: Path, most_sec: float = math.inf
    ) -> Measurement | None:
        mod = task.dispatched[0]
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._context.target), self._context.seed)
        found = self._run(try_function, job, path, most_sec)
        if found is None:
            return None
        outputs, latency_sec = found
        return Measurement(outputs, latency_sec, self._device)

    def _compare(
        self, before: Sequence[Measurement | None], after: Sequence[Measurement | None]
    ) -> Comparison | None:
        """Compare what was measured; None if a measurement is missing and nothing is wrong."""
        pairs = {
            str(task.task_name): (old, new)
            for task, old, new in zip(self._tasks, before, after, strict=True)
            if old is not None and new is not None
        }
        mods = {str(task.task_name): task.dispatched[0] for task in self._tasks}
        functions = {name: mods[name]["main"] for name in pairs}
        rtols = tolerances(functions, self._context.config.finish.rtol)
        found = {
            name: call_problem(new.outputs, old.outputs, rtols[name])
            for name, (old, new) in pairs.items()
        }
        problem = next((f"{name}: {text}" for name, text in found.items() if text), "")
        is_whole = len(pairs) == len(before)
        if not is_whole and not problem:
            return None
        differences = [largest_difference(new.outputs, old.outputs) for old, new in pairs.values()]
        is_fair = is_whole and all(old.device == new.device for old, new in pairs.values())
        comparison = Comparison(
            before_sec=sum(old.latency_sec for old, _ in pairs.values()) if is_fair else math.inf,
            after_sec=sum(new.latency_sec for _, new in pairs.values()) if is_whole else math.inf,
            max_abs=max(difference.max_abs for difference in differences),
            max_rel=max(difference.max_rel for difference in differences),
            agree=not problem,
            problem=problem,
        )
        self._context.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison
