"""Messages about a store that could not be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_adaptive.database.location import displayed, url_of
from tvm_adaptive.tuning import warm_start
from tvm_adaptive.tuning.prior_trials import WarmStart


class Written:
    def __init__(self, n_missing: int) -> None:
        self.n_missing = n_missing
        self.limits_sec: list[float] = []

    def close(self, limit_sec: float) -> int:
        self.limits_sec.append(limit_sec)
        return self.n_missing


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "python_side", lambda callback: callback)


def session_of(tmp_path: Path, notes: list[str], events: list[Any], interrupted: bool) -> Any:
    name = displayed(url_of("postgresql://me:hunter2@host/name"))
    return SimpleNamespace(
        config=SimpleNamespace(store="env:TUNING_STORE"),
        store=SimpleNamespace(name=name),
        work_dir=tmp_path / "my run",
        budget=SimpleNamespace(interrupted=interrupted, search_left_sec=60.0),
        observer=SimpleNamespace(note=notes.append),
        journal=SimpleNamespace(write=lambda event, **fields: events.append((event, fields))),
    )


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_store_lacks_is_reported_with_what_to_do(tmp_path: Path, interrupted: bool) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events, interrupted)
    written = Written(17)
    warm_start._flush(session, written)
    (note,) = notes
    assert note.startswith("17 trials are not in the record store postgresql://me:***@host/name")
    assert note.endswith(f"db --store env:TUNING_STORE import '{tmp_path}/my run'")
    assert "hunter2" not in note
    assert events == [("undelivered", {"store": session.store.name, "n_trials": 17})]
    assert 0.0 < written.limits_sec[0] <= (5.0 if interrupted else 30.0)


def test_nothing_is_said_where_nothing_is_missing(tmp_path: Path) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events, interrupted=False)
    warm_start._flush(session, Written(0))
    assert notes == events == []


def test_rows_that_were_left_out_are_counted_where_the_user_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events, interrupted=False)
    session.history = SimpleNamespace(run_ids=())
    session.proven = set()
    found = WarmStart(n_left_out=9800)
    monkeypatch.setattr(warm_start, "find_prior_trials", lambda *args, **options: found)
    for hooks in ("model_hooks", "scheduler_hooks"):  # as of stock parts
        monkeypatch.setattr(warm_start, hooks, lambda part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=None, task_scheduler=None)
    warm_start._warm_start(session, session.store, (), parts)
    (note,) = notes
    assert note.startswith("9800 invalid rows of ")
    assert "db prune" in note
    ((_, event),) = events
    assert event["n_left_out"] == 9800
