"""What a search that runs elsewhere is told, and what it brings back. Plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tvm_adaptive.search_strategy.transfer import TransferPool


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task, in a form that crosses the border to another process or machine."""

    key: str  # different for every task of every run
    name: str
    mod_json: str
    target_json: str
    seed: int
    batch: int  # candidates of a full batch
    # of :class:`~tvm_adaptive.AdaptiveSearch`, those that are plain values
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """One batch to search and to build."""

    task: TaskSpec
    state: bytes  # what the task's search knows; see ``AdaptiveSearch.carry``
    model: bytes  # see ``RFEICostModel.snapshot``
    transfer_pool: TransferPool | None  # what the tasks of the run have found
    limit: int | None  # candidates at the most; None for a full batch
    build: Mapping[str, Any]  # options of :class:`~tvm_adaptive.PersistentBuilder`


@dataclasses.dataclass(frozen=True)
class Built:
    """A candidate that was built, or was not."""

    key: int  # of its program
    artifact: bytes | None  # the library, as an archive that is linked where it is loaded
    error: str  # why there is none
    build_sec: float | None  # what it took of the batch's time


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What an order brought."""

    candidates: tuple[Built, ...] | None  # none when the task's space is exhausted
    state: bytes  # what the search knows now
    events: list[tuple[str, dict[str, Any]]]  # for the journal
