"""Observers of a run, and a guard: a display that fails must not end the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.budget import Budget

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Gets news of a run, such as the command line's display.

    An observer that raises an exception is not called again; the run continues. Methods
    ``event`` and ``close`` may be missing; the latter restores the screen when a second
    signal ends the process.
    """

    def stage(self, name: str) -> None:
        """Handle the start of a stage (``"prepare"``, ``"search"``, ...)."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Handle the results of a round."""

    def note(self, text: str) -> None:
        """Handle a line for the user."""

    def event(self, event: dict[str, Any]) -> None:
        """Handle an event of the journal; a resumed run begins with those of earlier attempts."""


class GuardedObserver:
    """Passes everything to an observer until it fails; the failure is logged once."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer: Any = observer
        self.stage: Callable[[str], None] = partial(self._call, "stage")
        self.round: Callable[[RunProgress, Budget], None] = partial(self._call, "round")
        self.note: Callable[[str], None] = partial(self._call, "note")
        self.event: Callable[[dict[str, Any]], None] = partial(self._call, "event")

    def close(self) -> None:
        """Let the observer restore the screen, and drop it."""
        self._call("close")
        self._observer = None

    def _call(self, name: str, *arguments: Any) -> None:
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
                    "the display failed (%s: %s); the run continues without it",
                    type(error).__name__,
                    error,
                )
