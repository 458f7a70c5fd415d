"""Observers for tests."""

from __future__ import annotations

from typing import Any

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.budget import Budget


class NoObserver:
    """Ignores everything; a base for observers of a part."""

    def stage(self, name: str) -> None:
        """Do nothing."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Do nothing."""


class Notes(NoObserver):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
