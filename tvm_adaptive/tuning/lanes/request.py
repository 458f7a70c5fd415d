"""What a search that runs elsewhere is told, and what it brings back. Plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tvm_adaptive.search_strategy.transfer import Relatives


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task, in a form that crosses the border to another process or machine.

    Attributes
    ----------
    key : str
        Different for every task of every run.
    name : str
    mod_json, target_json : str
    seed : int
    batch : int
        Candidates of a full batch.
    options : mapping of str to value
        Of :class:`~tvm_adaptive.AdaptiveSearch`, those that are plain values.
    """

    key: str
    name: str
    mod_json: str
    target_json: str
    seed: int
    batch: int
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Order:
    """One batch to search and to build.

    Attributes
    ----------
    task : TaskSpec
    state : bytes
        What the task's search knows; see ``AdaptiveSearch.carry``.
    model : bytes
        See :mod:`tvm_adaptive.cost_model.snapshot`.
    relatives : Relatives or None
        What the tasks of the run have found.
    limit : int or None
        Candidates at the most; None for a full batch.
    build : mapping of str to value
        Options of :class:`~tvm_adaptive.PersistentBuilder`.
    """

    task: TaskSpec
    state: bytes
    model: bytes
    relatives: Relatives | None
    limit: int | None
    build: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """A candidate that was built, or was not.

    Attributes
    ----------
    key : int
        Of its program.
    artifact : bytes or None
        The library, as an archive that is linked where it is loaded.
    error : str
        Why there is none.
    build_sec : float or None
        What it took of the batch's time.
    """

    key: int
    artifact: bytes | None
    error: str
    build_sec: float | None


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What an order brought.

    Attributes
    ----------
    candidates : tuple of Built or None
        None when the task's space is exhausted.
    state : bytes
        What the search knows now.
    events : list of (str, dict)
        For the journal.
    """

    candidates: tuple[Built, ...] | None
    state: bytes
    events: list[tuple[str, dict[str, Any]]]
