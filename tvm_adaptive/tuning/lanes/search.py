"""A task's search on lanes, and the builder that returns what lanes have built."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    BuilderInput,
    BuilderResult,
    MeasureCandidate,
    PyBuilder,
    derived_object,
    module_key,
    python_side,
    save_json,
)
from tvm_adaptive.builder.compile import ARCHIVE_NAME
from tvm_adaptive.errors import LaneError, is_machine_failure, summary_line
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.search_strategy.schedules import candidate_of
from tvm_adaptive.search_strategy.stoppable import DelegatingSearch
from tvm_adaptive.tuning.lanes.request import (
    REQUEST_TIMEOUT_SEC,
    Answer,
    Built,
    Lanes,
    SearchRequest,
    TaskSpec,
)

logger = logging.getLogger(__name__)

# How often a search that waits for its result checks that any lane is alive, and for Ctrl-C.
POLL_SEC = 1.0


class ArtifactCache:
    """Build results by program, until MetaSchedule asks its builder for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._results: dict[int, BuilderResult] = {}

    def put(self, built: Built) -> None:
        """Add the result of a build."""
        if built.artifact is None:
            self._results[built.key] = BuilderResult(None, built.error)
            return
        path = Path(tempfile.mkdtemp(prefix="candidate-", dir=self._folder)) / ARCHIVE_NAME
        path.write_bytes(built.artifact)
        self._results[built.key] = BuilderResult(str(path), None)

    def take(self, key: int) -> BuilderResult | None:
        """Remove and return a program's build result; None without one."""
        return self._results.pop(key, None)


@derived_object
class CachedArtifactBuilder(PyBuilder):  # type: ignore[misc]
    """Returns cached results, and builds the other programs here."""

    def __init__(self, cache: ArtifactCache, inner: Any) -> None:
        super().__init__()
        self._cache = cache
        self._inner = inner

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Return a result per input, in their order."""
        inputs = list(build_inputs)
        found = [self._cache.take(module_key(each.mod)) for each in inputs]
        missing = [each for each, result in zip(inputs, found, strict=True) if result is None]
        rest = iter(self._inner.build(missing) if missing else ())
        return [next(rest) if result is None else result for result in found]


@derived_object
class LaneSearch(DelegatingSearch):
    """Runs a search's rounds on lanes; a round without a lane's result is searched here."""

    def __init__(
        self,
        inner: Any,
        lanes: Lanes,
        cache: ArtifactCache,
        build: Mapping[str, Any],
        journal: JournalWriter,
        *,
        reduction_sketches: bool = False,
        time_left: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(inner, journal)
        self.reduction_sketches = reduction_sketches
        self.lanes = lanes
        self.cache = cache
        self.build = dict(build)
        self.time_left = time_left
        self._spec: TaskSpec | None = None
        self._pending: Future[Answer] | None = None
        self._limit: int | None = None
        self._requested: int | None = None  # limit of the pending request

    def pre_tuning(self, *args: Any, **options: Any) -> None:
        """Start the inner search, and describe the task for lanes."""
        super().pre_tuning(*args, **options)
        search = self._search
        context = search.context
        self._spec = TaskSpec(
            key=uuid.uuid4().hex,
            name=str(context.task_name),
            mod_json=save_json(context.mod),
            target_json=save_json(context.target),
            seed=int(context.rand_state),
            batch=search.state.proposer.batch,
            options=dataclasses.asdict(search.options),
            reduction_sketches=self.reduction_sketches,
        )

    def post_tuning(self) -> None:
        """End the inner search."""
        self._pending = None
        super().post_tuning()

    def clone(self) -> Any:
        """Return the same around a clone of the inner search."""
        return LaneSearch(
            self.inner.clone(),
            self.lanes,
            self.cache,
            self.build,
            self.journal,
            reduction_sketches=self.reduction_sketches,
            time_left=self.time_left,
        )

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Limit the number of candidates of the next batch, and only that."""
        self._limit = n_trials

    @property
    def _search(self) -> Any:
        """The inner search's Python side."""
        search = python_side(self.inner)
        assert search is not None
        return search

    def begin_next_batch(self) -> None:
        """Request the next batch from a lane, unless it is requested already."""
        if self._pending is not None or self._spec is None:
            return
        search = self._search
        request = SearchRequest(
            task=self._spec,
            state=search.carry(),
            model=search.state.proposer.model.snapshot(search.context),
            transfer_pool=pickle.dumps(search.transfer_pool),
            limit=self._limit,
            build=self.build,
        )
        self._pending = self.lanes.submit(request)
        self._requested, self._limit = self._limit, None

    def is_ready(self) -> bool:
        """Return whether the result of the next batch is here."""
        return self._pending is not None and self._pending.done()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the batch that a lane has found and built; None ends the task."""
        search = self._search
        if search.is_spent:
            return None
        result = self._requested_result()
        if result is None:
            return None
        if isinstance(result, LaneError):
            name = None if self._spec is None else self._spec.name
            logger.warning("%s: no lane answered (%s); its round is searched here", name, result)
            self.journal.write("error", where="lane", task=name, message=str(result))
            search.limit_next_batch(self._requested)
            return super().generate_measure_candidates()
        for event, fields in result.events:
            self.journal.write(event, **fields)
        schedules = search.take_over(result.state, [each.key for each in result.candidates or ()])
        if result.candidates is None:
            return None
        # What a lane's machine could not build, this one may.
        lacking = {b.error for b in result.candidates if is_machine_failure(b.error)}
        for built in result.candidates:
            if built.key in schedules and built.error not in lacking:
                try:
                    self.cache.put(built)
                except OSError as error:  # no room or descriptor here: the builder handles that
                    lacking.add(summary_line(error))
                else:
                    search.note_build(built.key, built.build_sec)
        for message in lacking:
            name = None if self._spec is None else self._spec.name
            self.journal.write("error", where="lane", task=name, message=message)
        return [candidate_of(schedule) for schedule in schedules.values()]

    def _requested_result(self) -> Answer | None:
        """Request a batch, unless it is requested already, and wait for it."""
        try:
            self.begin_next_batch()
        except Exception as error:  # such as a lack of descriptors; the search itself may work
            self._requested, self._limit = self._limit, None
            return LaneError(summary_line(error))
        return self._result()

    def _result(self) -> Answer | None:
        """Wait for the pending result; None when the search is over first."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        end_sec = time.monotonic() + REQUEST_TIMEOUT_SEC
        while time.monotonic() < end_sec:
            left_sec = POLL_SEC if self.time_left is None else self.time_left()
            with contextlib.suppress(FutureTimeoutError):
                return pending.result(timeout=max(0.0, min(POLL_SEC, left_sec)))
            if left_sec <= 0:
                return None
            if not self.lanes.is_alive():
                return LaneError("no lane is left")
        return LaneError(f"no result came in {REQUEST_TIMEOUT_SEC:g} s")
