"""Journals for tests."""

from __future__ import annotations

from typing import Any


class MemoryJournal:
    """Keeps its events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self.events.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [each for each in self.events if each["event"] == event]
