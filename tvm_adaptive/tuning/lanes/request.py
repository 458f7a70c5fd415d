"""The requests to lanes and their results, as plain values, and the lanes' interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from tvm_adaptive.errors import LaneError

# After this time the result never comes: the lane's machine may be gone for good.
REQUEST_TIMEOUT_SEC = 600.0


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task in a form that other processes and machines can read."""

    key: str  # unique to a task of a run
    name: str
    mod_json: str
    target_json: str
    seed: int
    batch: int  # candidates of a full batch
    options: Mapping[str, Any]  # of ``AdaptiveSearch``, those that are plain values
    reduction_sketches: bool  # as in ``SearchConfig``


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """One batch to search and to build."""

    task: TaskSpec
    state: bytes  # of the task's search; see ``AdaptiveSearch.carry``
    model: bytes  # see ``RFEICostModel.snapshot``
    transfer_pool: bytes  # a pickle: the run goes on changing its own
    limit: int | None  # maximum number of candidates; None for a full batch
    build: Mapping[str, Any]  # options of ``PersistentBuilder``


@dataclasses.dataclass(frozen=True)
class Built:
    """The result of building a candidate."""

    key: int  # of its program
    artifact: bytes | None  # the library, as an archive that is linked where it is loaded
    error: str  # why there is no artifact
    build_sec: float | None  # share of the batch's seconds


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a request."""

    candidates: tuple[Built, ...] | None  # None when the task's space is exhausted
    state: bytes  # of the search after the batch
    events: list[tuple[str, dict[str, Any]]]  # for the journal


# A lane's result, or the reason why no lane has one.
Answer = SearchResult | LaneError


class Lanes(Protocol):
    """Processes or machines, each of which answers one request at a time."""

    n_lanes: int  # requests that are answered at the same time

    def submit(self, request: SearchRequest) -> Future[Answer]:
        """Queue a request."""

    def is_alive(self) -> bool:
        """Return whether any lane is left to answer a request."""

    def close(self) -> None:
        """Cancel pending requests and end the lanes."""
