"""Which number of threads a network is found to be fastest with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_adaptive.errors import WorkerError
from tvm_adaptive.tuning import turns
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.turns import time_thread_counts


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def write(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


@pytest.fixture
def context() -> Any:
    notes = Notes()
    return SimpleNamespace(budget=Budget(), observer=notes, journal=notes, server=None)


def timed(context: Any, monkeypatch: pytest.MonkeyPatch, secs: dict[int, Any]) -> dict[int, float]:
    """Time a network that takes so long with each number of threads."""

    def time_in_turns(
        libraries: dict[int, Any], *_rest: Any, **_options: Any
    ) -> dict[int, list[float]]:
        for count in libraries:
            if isinstance(secs[count], Exception):
                raise secs[count]
        return {count: [secs[count]] * 3 for count in libraries}

    monkeypatch.setattr(turns, "time_in_turns", time_in_turns)
    return time_thread_counts(context, Path("net.so"), [], max(secs))


@pytest.mark.parametrize(
    ("secs", "tried"),
    [
        ({8: 1.0, 4: 2.0, 2: 0.1, 1: 0.1}, [8, 4]),
        ({8: 1.0, 4: 0.9, 2: 0.8, 1: 0.9}, [8, 4, 2, 1]),
        ({6: 1.0, 3: 0.9, 1: 0.8}, [6, 3, 1]),
        ({1: 1.0}, []),
    ],
)
def test_fewer_threads_are_tried_as_long_as_they_are_faster(
    context: Any, monkeypatch: pytest.MonkeyPatch, secs: dict[int, float], tried: list[int]
) -> None:
    found = timed(context, monkeypatch, secs)
    assert list(found) == tried
    assert found == {count: secs[count] for count in tried}
    assert [event for event, _ in context.journal.events] == ["threads"] * bool(tried)


def test_what_was_timed_before_a_crash_is_kept(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timed(context, monkeypatch, {4: 1.0, 2: 0.5, 1: WorkerError("it crashed")})
    assert found == {4: 1.0, 2: 0.5}
    assert context.observer.notes == ["numbers of threads are not compared: it crashed"]


@pytest.mark.parametrize(
    ("rounds", "n_rounds"),
    [
        ([(1.0, 2.0)] * 7, 4),
        ([(2.0, 1.0)] * 7, 4),
        ([(1.0, 2.0), (2.0, 1.0)] * 3 + [(1.0, 2.0)], 7),
        ([(2.0, 1.0), *[(1.0, 2.0)] * 6], 5),
    ],
)
def test_rounds_end_when_a_majority_agrees(
    rounds: list[tuple[float, float]], n_rounds: int
) -> None:
    """The median of all would lie on the same side."""
    decided = [
        turns._has_majority({2: [a for a, _ in rounds[:n]], 1: [b for _, b in rounds[:n]]})
        for n in range(1, 8)
    ]
    assert decided.index(True) + 1 == n_rounds


def test_turns_end_when_they_have_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WorkerPool", lambda *_args, **_options: FakePool())
    libraries = {1: (Path("a.so"), 1), 2: (Path("b.so"), 2)}
    server: Any = object()
    found = turns.time_in_turns(
        libraries, [], 7, server, is_decided=lambda secs: len(secs[1]) == len(secs[2]) == 3
    )
    assert found == {1: [1.0] * 3, 2: [1.0] * 3}


class FakePool:
    """Time everything as a second."""

    def map(self, *_arguments: Any) -> list[Any]:
        return [SimpleNamespace(error=None, value=1.0)]

    def close(self) -> None:
        pass


def test_an_interrupted_run_times_nothing(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context.budget.interrupted = True
    assert timed(context, monkeypatch, {2: 1.0, 1: 0.5}) == {}
