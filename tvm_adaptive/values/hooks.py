"""What our parts offer beyond MetaSchedule's interfaces; stock parts have none of it.

:mod:`tvm_adaptive._tvm` returns the hooks of an object of MetaSchedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.values.trial import FloatArray, Prediction, Promise

Rows = npt.NDArray[np.float32]


@runtime_checkable
class SearchHooks(Protocol):
    """A search strategy that a task scheduler can steer."""

    def promise(self) -> Promise | None:
        """Return the model's forecast for the task's next candidates; None if there is none."""
        return None

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Let the next batch, and only that, have at most ``n_trials``; None for a full one."""
        del n_trials

    def begin_next_batch(self) -> None:
        """Begin the next batch in another process, where the search has one."""
        return

    def is_ready(self) -> bool:
        """Say whether the next batch is available at once."""
        return False

    def forget_task(self) -> None:
        """Release the task that the search was given, which owns the search in turn."""
        return


class NoSearchHooks(SearchHooks):
    """The hooks of a search strategy that has none: they do nothing."""


@runtime_checkable
class ModelHooks(Protocol):
    """A cost model that states its uncertainty, scores features, and learns from earlier runs."""

    @property
    def n_features(self) -> int:
        """Features of a candidate."""

    @property
    def is_trained(self) -> bool:
        """Whether scores rank candidates yet."""

    def describe(self, context: Any, candidates: list[Any]) -> Rows:
        """Return the features of candidates."""

    def scores_of(
        self, context: Any, rows: Rows, cost_sec: FloatArray | None = None
    ) -> FloatArray | None:
        """Score candidates by their features; None before the first success."""

    def posterior(self, context: Any, candidates: list[Any]) -> Prediction | None:
        """Return the posterior of the candidates' throughput; None while there is none."""

    def posterior_of(self, context: Any, rows: Rows) -> Prediction | None:
        """Return the posterior of candidates by their features; None while there is none."""

    def accuracy_of(self, context: Any) -> float:
        """Return the rank correlation of the last forecasts with what was measured."""

    def preload(self, dataset: Any, *, fading: bool = False) -> None:
        """Learn what earlier runs measured; what another machine did fades."""

    def restore(
        self, context: Any, rows: Rows, seconds: FloatArray, errors: FloatArray | None = None
    ) -> None:
        """Learn what an earlier attempt of this run measured."""


@runtime_checkable
class RunnerHooks(Protocol):
    """A runner that may measure on several devices at the same time."""

    @property
    def n_devices(self) -> int:
        """Batches that are measured at the same time, at the most."""

    @property
    def suspended(self) -> frozenset[str]:
        """Names of the devices of a farm that are not used at present."""


@runtime_checkable
class SchedulerHooks(Protocol):
    """A task scheduler that knows what was measured before, and why it ended a run."""

    @property
    def stop_reason(self) -> str:
        """Why it ended the last run; empty if it did not."""
        return ""

    def restore(self, earlier: Mapping[str, Any]) -> None:
        """Begin where earlier attempts of the run ended; by the names of tasks."""

    def set_prior(self, prior: Mapping[str, Any]) -> None:
        """Take over what earlier runs measured; by the names of tasks."""

    def set_forms(self, forms: Mapping[str, FormKey]) -> None:
        """Let tasks compete as forms of the same part of a network; by the names of tasks."""


@runtime_checkable
class DatabaseHooks(Protocol):
    """A database that yields its records one at a time."""

    def records_of(self, mod: Any) -> Iterator[Any]:
        """Yield the records of a workload."""
