"""The code that runs on a lane: search a task's next batch and build it.

A process keeps its open tasks and compile workers: opening a task takes a second.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    BuilderInput,
    ExtractedTask,
    contexts_of,
    load_own_json,
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

# Open tasks of a process; the module of each takes some megabytes.
_MAX_OPEN = 32
# The run itself counts its trials.
_UNLIMITED = 10**8

_open_tasks: collections.OrderedDict[str, OpenTask] = collections.OrderedDict()
_builders: dict[tuple[Any, ...], tuple[PersistentBuilder, TrialLog]] = {}


def fill(request: SearchRequest) -> SearchResult:
    """Search and build a batch."""
    task = _open_task(request.task)
    search = task.search
    task.model.install(request.model)
    search.resume(request.state, pickle.loads(request.transfer_pool))
    search.limit_next_batch(request.limit)
    task.journal.events = []
    batch = search.generate_measure_candidates()
    if batch is None:
        return SearchResult(None, search.carry(), task.journal.events)
    keys = [key_of(candidate.sch) for candidate in batch]
    builder, log = _builder(request)
    results = builder.build([BuilderInput(each.sch.mod, task.target) for each in batch])
    built = [
        _built(key, each, log.get(key).build_sec) for key, each in zip(keys, results, strict=True)
    ]
    return SearchResult(tuple(built), search.carry(), task.journal.events)


class EventList:
    """A journal in memory, to be sent with the result."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **fields: Any) -> None:
        """Add an event."""
        self.events.append((event, fields))


class OpenTask:
    """A task with its context, its sketches and a model to search with."""

    def __init__(self, spec: TaskSpec) -> None:
        self.journal = EventList()
        self.model = RFEICostModel(seed=spec.seed)
        mod, self.target = load_own_json(spec.mod_json), load_own_json(spec.target_json)
        task = ExtractedTask(spec.name, mod, self.target, [mod], 1)
        # For MetaSchedule's log of the task, which nobody reads.
        self._folder = ScratchFolder("lane")
        strategy = AdaptiveSearch(**spec.options, journal=self.journal)
        (self._context,) = contexts_of(
            [task],
            str(self._folder.path),
            strategy,
            spec.seed,
            reductions=spec.reduction_sketches,
        )
        self.search: Any = python_side(self._context.search_strategy)
        assert self.search is not None
        space = self._context.generate_design_space()
        self.search.pre_tuning(_UNLIMITED, spec.batch, space, memory_database(), self.model)

    def close(self) -> None:
        """End the search and remove its files."""
        self.search.post_tuning()
        self._folder.remove()


def _open_task(spec: TaskSpec) -> OpenTask:
    if spec.key not in _open_tasks:
        _open_tasks[spec.key] = OpenTask(spec)
    _open_tasks.move_to_end(spec.key)
    while len(_open_tasks) > _MAX_OPEN:
        _open_tasks.popitem(last=False)[1].close()
    return _open_tasks[spec.key]


def _builder(request: SearchRequest) -> tuple[PersistentBuilder, TrialLog]:
    key = tuple(sorted(request.build.items()))
    if key not in _builders:
        log = TrialLog()
        _builders[key] = PersistentBuilder(**request.build, trial_log=log), log
    return _builders[key]


def _built(key: int, result: Any, build_sec: float | None) -> Built:
    if result.artifact_path is None:
        return Built(key, None, str(result.error_msg), build_sec)
    path = Path(str(result.artifact_path))
    content = path.read_bytes()
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    return Built(key, content, "", build_sec)
