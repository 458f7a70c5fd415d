from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import Target, copy_record, functions_as_tasks, json_database, te_workload
from tvm_adaptive.config import FinishConfig
from tvm_adaptive.contenders import contenders_of
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.finish import playoff_reserve_sec
from tvm_adaptive.measure_callback.recorder import RunProgress, TaskProgress
from tvm_adaptive.remember import remember_finals
from tvm_adaptive.runner.finalist import BUILD_FAILED, SAME, Finalist
from tvm_adaptive.runner.finalists import FinalistReport


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


def session(seconds: float | None, left_sec: float) -> Any:
    budget = SimpleNamespace(seconds=seconds, left_sec=left_sec, elapsed_sec=600.0)
    return SimpleNamespace(budget=budget, config=SimpleNamespace(finish=FinishConfig()))


@pytest.mark.parametrize(
    ("seconds", "left_sec", "later_sec", "expected"),
    [
        (600.0, 580.0, 20.0, 20 + 30 + 19.2),  # checks, timings, qualifying
        (80.0, 50.0, 20.0, 15.0),
        (80.0, 15.0, 20.0, 0.0),
        (None, math.inf, 20.0, 20 + 160 + 19.2),
    ],
)
def test_playoffs_leave_a_short_run_time_to_search(
    seconds: float | None, left_sec: float, later_sec: float, expected: float
) -> None:
    found = playoff_reserve_sec(session(seconds, left_sec), 20, later_sec)
    assert found == pytest.approx(expected)


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
    assert len(found.database) == (1 if importance_sec else 0)
