"""The hooks of a task's search strategy, where it has any.

An adapter: tasks are MetaSchedule's records.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import search_hooks


def limit_next_batch(record: Any, n_trials: int | None) -> None:
    """Let a task's next batch have at most so many candidates; None for a full one."""
    hooks = search_hooks(record.ctx.search_strategy)
    if hooks is not None:
        hooks.limit_next_batch(n_trials)


def prefetch(record: Any) -> None:
    """Let a task's next batch be searched in another process, while others are, too."""
    hooks = search_hooks(record.ctx.search_strategy)
    if hooks is not None:
        hooks.prefetch()


def is_ready(record: Any) -> bool:
    """Say whether a task's next batch is available at once."""
    hooks = search_hooks(record.ctx.search_strategy)
    return hooks is not None and hooks.is_ready()
