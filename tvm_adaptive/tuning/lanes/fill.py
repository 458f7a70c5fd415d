"""What runs on a lane: search a task's next batch and build it.

A process keeps the tasks that it has seen, opened up, and its compile workers: to open a
task takes a second.
"""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from typing import Any, ClassVar

from tvm_adaptive._tvm import (
    BuilderInput,
    ExtractedTask,
    contexts_of,
    load_json,
    memory_database,
    python_side,
)
from tvm_adaptive.builder.persistent import PersistentBuilder
from tvm_adaptive.cost_model.model import RFEICostModel
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.search_strategy.strategy import AdaptiveSearch
from tvm_adaptive.tuning.lanes.request import Built, SearchRequest, SearchResult, TaskSpec
from tvm_adaptive.values.trial_log import TrialLog
from tvm_adaptive.workers.scratch import ScratchFolder

# Tasks whose modules a process keeps, some megabytes each.
_MAX_OPEN = 32
# The run itself counts its trials.
_UNLIMITED = 10**8


def fill(order: SearchRequest) -> SearchResult:
    """Search and build a batch."""
    task = _opened(order.task)
    search = task.search
    task.model.install(order.model)
    search.resume(order.state, order.transfer_pool)
    search.limit_next_batch(order.limit)
    task.notes.events = []
    batch = search.generate_measure_candidates()
    if batch is None:
        return SearchResult(None, search.carry(), task.notes.events)
    keys = [key_of(candidate.sch) for candidate in batch]
    builder, log = _builder(order)
    results = builder.build([BuilderInput(each.sch.mod, task.target) for each in batch])
    built = [
        _built(key, each, log.get(key).build_sec) for key, each in zip(keys, results, strict=True)
    ]
    return SearchResult(tuple(built), search.carry(), task.notes.events)


class Notes:
    """A journal that is sent home."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self.events.append((event, fields))


class OpenTask:
    """A task with its context, its sketches and a model to search with."""

    def __init__(self, spec: TaskSpec) -> None:
        self.notes = Notes()
        self.model = RFEICostModel(seed=spec.seed)
        mod, self.target = load_json(spec.mod_json), load_json(spec.target_json)
        task = ExtractedTask(spec.name, mod, self.target, [mod], 1)
        # MetaSchedule writes a log of each task; nobody reads this one.
        self._folder = ScratchFolder("lane")
        strategy = AdaptiveSearch(**spec.options, journal=self.notes)
        (context,) = contexts_of([task], str(self._folder.path), strategy, spec.seed)
        self._context = context
        self.search: Any = python_side(context.search_strategy)
        assert self.search is not None
        self.search.pre_tuning(
            _UNLIMITED, spec.batch, context.generate_design_space(), memory_database(), self.model
        )

    def close(self) -> None:
        """Let go of the task."""
        self.search.post_tuning()
        self._folder.remove()


class _Kept:
    """What this process keeps."""

    tasks: ClassVar[collections.OrderedDict[str, OpenTask]] = collections.OrderedDict()
    builders: ClassVar[dict[tuple[Any, ...], tuple[PersistentBuilder, TrialLog]]] = {}


def _opened(spec: TaskSpec) -> OpenTask:
    tasks = _Kept.tasks
    if spec.key not in tasks:
        tasks[spec.key] = OpenTask(spec)
    tasks.move_to_end(spec.key)
    while len(tasks) > _MAX_OPEN:
        tasks.popitem(last=False)[1].close()
    return tasks[spec.key]


def _builder(order: SearchRequest) -> tuple[PersistentBuilder, TrialLog]:
    key = tuple(sorted(order.build.items()))
    if key not in _Kept.builders:
        log = TrialLog()
        _Kept.builders[key] = PersistentBuilder(**order.build, trial_log=log), log
    return _Kept.builders[key]


def _built(key: int, result: Any, build_sec: float | None) -> Built:
    if result.artifact_path is None:
        return Built(key, None, str(result.error_msg), build_sec)
    path = Path(str(result.artifact_path))
    content = path.read_bytes()
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    return Built(key, content, "", build_sec)
