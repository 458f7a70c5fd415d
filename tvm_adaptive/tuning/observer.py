"""Who watches a run, and a guard: a display that fails must not end what it watches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.budget import Budget

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who watches a run: the command line's display, or nobody.

    An observer that raises an exception is told nothing more; the run goes on.
    """

    def stage(self, name: str) -> None:
        """Learn that a stage begins (``"prepare"``, ``"search"``, ...)."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Learn what a round brought."""

    def note(self, text: str) -> None:
        """Learn something worth a line."""

    def event(self, event: dict[str, Any]) -> None:
        """Learn an event of the journal, as it was written; may be missing."""


class NoObserver:
    """Nobody watches."""

    def stage(self, name: str) -> None:
        """Do nothing."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Do nothing."""


class GuardedObserver:
    """Pass everything on to an observer until it fails; the failure is logged once."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer: Any = observer

    def stage(self, name: str) -> None:
        """Pass on that a stage begins."""
        self._tell("stage", name)

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Pass on what a round brought."""
        self._tell("round", progress, budget)

    def note(self, text: str) -> None:
        """Pass on something worth a line."""
        self._tell("note", text)

    def event(self, event: dict[str, Any]) -> None:
        """Pass on an event of the journal."""
        self._tell("event", event)

    def close(self) -> None:
        """Let an observer that has a method ``close`` leave the screen as it was."""
        self._tell("close")
        self._observer = None

    def _tell(self, name: str, *arguments: Any) -> None:
        method: Callable[..., None] | None = getattr(self._observer, name, None)
        if method is None:
            return
        try:
            method(*arguments)
        # rich answers a closed pipe with SystemExit.
        except (Exception, SystemExit) as error:
            self._observer = None
            # The log may go where the display has failed.
            with contextlib.suppress(OSError):
                logger.warning(
                    "the display failed (%s: %s); the run goes on without",
                    type(error).__name__,
                    error,
                )
