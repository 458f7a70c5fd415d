from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.database.conftest import make_record
from tvm_adaptive import finish
from tvm_adaptive._tvm import Target, copy_record, functions_as_tasks, json_database, te_workload
from tvm_adaptive.budget import Budget
from tvm_adaptive.config import DEFAULT
from tvm_adaptive.contenders import contenders_of
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.measure_callback.recorder import RunProgress, TaskProgress
from tvm_adaptive.remember import remember_finals
from tvm_adaptive.reserve import Reserve
from tvm_adaptive.runner.finalist import BUILD_FAILED, SAME, Finalist
from tvm_adaptive.runner.finalists import FinalistReport
from tvm_adaptive.session import NoObserver, Session


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, (1.5e-3, "")),
        ({"unchecked": "no reference"}, None),
        ({"playoff_sec": math.nan}, None),
        ({"disqualified": "wrong result: 3 of 4", "playoff_sec": math.nan}, (None, "wrong result")),
        ({"disqualified": f"{BUILD_FAILED}timeout", "playoff_sec": math.nan}, None),
        ({"disqualified": SAME, "playoff_sec": math.nan}, None),
    ],
)
def test_only_what_was_learned_of_a_finalist_is_remembered(
    tmp_path: Path, changes: dict[str, Any], kept: tuple[float | None, str] | None
) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    record = make_record(te_workload("GMM"), target, 1e-3)
    fields = {"recorded_sec": 1e-3, "playoff_sec": 1.5e-3, "stderr_sec": 1.5e-5, **changes}
    report = FinalistReport("main", (Finalist(record, **fields),), "tied", 1.0)
    with RecordStore(tmp_path / "records.db") as store:
        session: Any = SimpleNamespace(store=store, target=target, run_id="a")
        remember_finals(session, [report])
        finals = store.finals(task_of(record.workload.mod, target, "main"))
    found = [(each.seconds, each.failure.partition(":")[0]) for each in finals]
    assert found == ([] if kept is None else [kept])
    assert all(each.run == "a" for each in finals)
    assert [each.error for each in finals if each.seconds] == ([0.01] if kept and kept[0] else [])


@pytest.mark.parametrize(
    ("own_seed", "final_seed", "importance_sec", "is_proven"),
    [
        (None, None, 0.0, False),  # nothing is known
        (1, None, 2e-3, False),
        (1, 2, 2e-3, False),  # another one was proven
        (1, 1, 2e-3, True),
        (None, 1, 6e-3, True),
    ],
)
def test_a_task_plays_for_its_records_or_for_what_was_proven(
    tmp_path: Path,
    own_seed: int | None,
    final_seed: int | None,
    importance_sec: float,
    is_proven: bool,
) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    mod = te_workload("GMM")
    (task,) = functions_as_tasks(mod, target)
    mod = task.dispatched[0]
    so_far = TaskProgress("main", 2.0)
    if own_seed is not None:
        copy_record(make_record(mod, target, 1e-3, own_seed), json_database(tmp_path))
        so_far.best_sec = 1e-3
    with RecordStore(tmp_path / "records.db") as store:
        if final_seed is not None:
            stored = task_of(mod, target, "main")
            # Recorded as much faster, by a run that had no play-off: nobody has checked it.
            store.add(stored, [trial_of(make_record(mod, target, 1e-6, 9), run="b")])
            store.add_finals(
                stored, [trial_of(make_record(mod, target, 3e-3, final_seed), run="a")]
            )
        session: Any = SimpleNamespace(work_dir=tmp_path, target=target, store=store)
        (found,) = contenders_of(session, [task], RunProgress([so_far]))
    assert found.importance_sec == pytest.approx(importance_sec)
    assert found.is_proven == is_proven
    assert found.is_due == (importance_sec > 0 and not is_proven)
    assert len(found.database) == (1 if importance_sec else 0)


@pytest.mark.parametrize(
    ("left_sec", "expected"),
    [
        (100.0, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 8.0}),
        (25.0, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 0.5}),
        (17.0, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 0.2}),
        (16.0, {"top_k": 1, "n_qualifiers": 0, "prefetch": False, "max_sec": 0.2}),
    ],
)
def test_a_task_is_only_checked_where_the_seconds_would_not_suffice_for_the_others(
    monkeypatch: pytest.MonkeyPatch, left_sec: float, expected: dict[str, Any]
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(finish, "play_off", lambda *_args, **options: told.update(options))
    budget = SimpleNamespace(seconds=600.0, left_sec=left_sec, reserve_sec=10.0, elapsed_sec=0.0)
    session: Any = SimpleNamespace(
        budget=budget,
        config=DEFAULT,
        target=None,
        seed=0,
        journal=None,
        work_dir=None,
    )
    mine: Any = SimpleNamespace(database=None, mod=None, name="main")
    nothing: Any = None
    turn = finish._Turn(share=0.5, n_left=10, n_due=9)
    finish._play_off(session, mine, turn, builder=nothing, pool=nothing)
    assert {key: told[key] for key in expected} == pytest.approx(expected)


def test_a_round_that_closes_the_last_gap_ends_the_hurry() -> None:
    nothing: Any = None
    session = Session(
        config=DEFAULT,
        target=nothing,
        work_dir=nothing,
        run_id="",
        seed=0,
        trials=None,
        until_ms=None,
        budget=Budget(100.0),
        journal=nothing,
        observer=NoObserver(),
        server=None,
        store=None,
        reserve=Reserve(later_sec=10.0, playoff_sec=30.0, check_sec=5.0),
        proven=frozenset({"b"}),
    )
    progress = RunProgress([TaskProgress("a", 1.0), TaskProgress("b", 1.0)])
    session.keep_back(progress)
    assert session.budget.reserve_sec == 15.0
    progress.tasks[0].best_sec = 1e-3
    session.round_done(progress)
    assert session.budget.reserve_sec == 40.0
