"""What a scheduler may ask of a task's search beyond MetaSchedule's interface, if it can.

An adapter: tasks are MetaSchedule's records.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import python_side


def limit_next_batch(record: Any, n_trials: int | None) -> None:
    """Let a task's next batch have at most so many candidates; None for a full one."""
    _ask(record, "limit_next_batch", n_trials)


def prefetch(record: Any) -> None:
    """Let a task's next batch be searched elsewhere, while others are, too."""
    _ask(record, "prefetch")


def is_ready(record: Any) -> bool:
    """Say whether a task's next batch can be had at once."""
    return bool(_ask(record, "is_ready"))


def _ask(record: Any, what: str, *args: Any) -> Any:
    method = getattr(python_side(record.ctx.search_strategy), what, None)
    return None if method is None else method(*args)
