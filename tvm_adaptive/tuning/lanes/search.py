"""A task's search whose rounds run on lanes, those of several tasks at the same time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    MeasureCandidate,
    PySearchStrategy,
    RunnerResult,
    Schedule,
    TuneContext,
    derived_object,
    python_side,
    save_json,
)
from tvm_adaptive.errors import LaneError
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.search_strategy.schedules import candidate_of
from tvm_adaptive.tuning.lanes.artifact_cache import ArtifactCache
from tvm_adaptive.tuning.lanes.base import LOOK_SEC, ORDER_TIMEOUT_SEC, Answer, Lanes
from tvm_adaptive.tuning.lanes.request import SearchRequest, TaskSpec
from tvm_adaptive.values.trial import Promise

logger = logging.getLogger(__name__)


@derived_object
class LaneSearch(PySearchStrategy):  # type: ignore[misc]
    """Has lanes fill a search's rounds; a round that none can fill is searched here."""

    def __init__(
        self,
        inner: Any,
        lanes: Lanes,
        shelf: ArtifactCache,
        build: Mapping[str, Any],
        journal: JournalWriter,
        *,
        time_left: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self.time_left = time_left
        self.inner = inner
        self.lanes = lanes
        self.shelf = shelf
        self.build = dict(build)
        self.journal = journal
        self._spec: TaskSpec | None = None
        self._pending: Future[Answer] | None = None
        self._limit: int | None = None
        self._asked: int | None = None

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        """Hand the task on."""
        self.inner._initialize_with_tune_context(context)

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Schedule],
        database: Database | None = None,
        cost_model: Any = None,
    ) -> None:
        """Start the inner search, and describe the task for lanes."""
        self.inner.pre_tuning(max_trials, num_trials_per_iter, design_spaces, database, cost_model)
        search = self._search
        context = search.context
        self._spec = TaskSpec(
            key=uuid.uuid4().hex,
            name=str(context.task_name),
            mod_json=save_json(context.mod),
            target_json=save_json(context.target),
            seed=int(context.rand_state),
            batch=num_trials_per_iter,
            options=dataclasses.asdict(search.options),
        )

    def post_tuning(self) -> None:
        """End the inner search."""
        self._pending = None
        self.inner.post_tuning()

    def clone(self) -> Any:
        """Return the same around a clone of the inner search."""
        return LaneSearch(
            self.inner.clone(),
            self.lanes,
            self.shelf,
            self.build,
            self.journal,
            time_left=self.time_left,
        )

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Let the next batch, and only that, have at most so many candidates."""
        self._limit = n_trials

    def promise(self) -> Promise | None:
        """Return what the inner search promises."""
        found: Promise | None = self._search.promise()
        return found

    @property
    def _search(self) -> Any:
        """The inner search's Python side."""
        search = python_side(self.inner)
        assert search is not None
        return search

    def prefetch(self) -> None:
        """Let a lane begin the next batch, unless one has."""
        if self._pending is not None or self._spec is None:
            return
        search = self._search
        self._asked, self._limit = self._limit, None
        self._pending = self.lanes.submit(
            SearchRequest(
                task=self._spec,
                state=search.carry(),
                model=search.state.proposer.model.snapshot(search.context),
                transfer_pool=search.transfer_pool,
                limit=self._asked,
                build=self.build,
            )
        )

    def is_ready(self) -> bool:
        """Say whether the next batch can be had at once."""
        return self._pending is not None and self._pending.done()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the batch that a lane has found and built; None ends the task."""
        search = self._search
        if search.is_spent:
            return None
        self.prefetch()
        delivery = self._delivery()
        if delivery is None:
            return None
        if isinstance(delivery, LaneError):
            name = None if self._spec is None else self._spec.name
            logger.warning(
                "%s: no lane could fill its round (%s); it is searched here", name, delivery
            )
            self.journal.write("error", where="lane", task=name, message=str(delivery))
            search.limit_next_batch(self._asked)
            found: list[MeasureCandidate] | None = self.inner.generate_measure_candidates()
            return found
        for event, fields in delivery.events:
            self.journal.write(event, **fields)
        schedules = search.take_over(
            delivery.state, [each.key for each in delivery.candidates or ()]
        )
        if delivery.candidates is None:
            return None
        for built in delivery.candidates:
            if built.key in schedules:
                self.shelf.put(built)
                search.note_build(built.key, built.build_sec)
        return [candidate_of(schedule) for schedule in schedules.values()]

    def _delivery(self) -> Answer | None:
        """Return what a lane brought; None when the search's time is over first."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        end_sec = time.monotonic() + ORDER_TIMEOUT_SEC
        while time.monotonic() < end_sec:
            left_sec = LOOK_SEC if self.time_left is None else self.time_left()
            with contextlib.suppress(FutureTimeoutError):
                return pending.result(timeout=max(0.0, min(LOOK_SEC, left_sec)))
            if left_sec <= 0:
                return None
            if not self.lanes.is_alive():
                return LaneError("no lane is left")
        return LaneError(f"nothing came back in {ORDER_TIMEOUT_SEC:g} s")

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Hand the results on."""
        self.inner.notify_runner_results(measure_candidates, results)
