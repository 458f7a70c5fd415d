from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import IRModule, Schedule, Target, args_info_of, te_workload
from tvm_adaptive.asides import LastLesson, Lesson
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.keeper import Keeper


class Events:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


class Refusing:
    """A store that refuses the first few times."""

    def __init__(self, n_refusals: int) -> None:
        self.n_refusals = n_refusals
        self.n_asked = 0
        self.kept: list[StoredTrial] = []

    def add(self, task: StoredTask, trials: list[StoredTrial]) -> None:
        self.n_asked += 1
        if self.n_asked <= self.n_refusals:
            raise StoreError("full")
        self.kept += trials


@pytest.fixture(scope="module")
def mod() -> IRModule:
    return te_workload("GMM")


@pytest.fixture
def contexts(mod: IRModule) -> list[Any]:
    target = Target({"kind": "llvm", "num-cores": 2})
    return [SimpleNamespace(mod=mod, target=target, task_name="gmm")]


def keep(keeper: Any, contexts: list[Any], seconds: list[float | None]) -> None:
    """Hand a batch to a keeper."""
    candidates, built, run = [], [], []
    for number, sec in enumerate(seconds):
        context = contexts[0]
        record = make_record(context.mod, context.target, 1.0, number + 1)
        schedule = Schedule(context.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        candidates.append(SimpleNamespace(sch=schedule, args_info=args_info_of(context.mod)))
        built.append(SimpleNamespace(error_msg=None))
        message = None if sec is not None else "Traceback\n  somewhere\nBoom: it crashed"
        run.append(SimpleNamespace(error_msg=message, run_secs=[sec] if sec else None))
    keeper._inst.apply(None, 0, candidates, built, run)


def test_a_batch_is_kept_with_what_the_model_learned_of_it(
    tmp_path: Path, contexts: list[Any]
) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    lessons = LastLesson()
    lessons.lesson = Lesson(rows, np.array([0.1, np.nan, 0.2]))
    with RecordStore(tmp_path / "records.db") as store:
        keeper = Keeper([store], contexts, "run", lessons, Events())
        keep(keeper, contexts, [1e-3, None, 2e-3])
        keep(keeper, contexts, [3e-3])  # of this one it said nothing
        (task,) = store.tasks()
        kept = store.latest(task)
    assert task.name == "gmm"
    assert [trial.seconds for trial in kept] == [1e-3, None, 2e-3, 3e-3]
    assert [trial.failure for trial in kept] == ["", "Boom: it crashed", "", ""]
    assert [trial.error for trial in kept] == [0.1, None, 0.2, None]
    features = [trial.features for trial in kept]
    assert features[3] is None
    np.testing.assert_array_equal(np.stack([f for f in features[:3] if f is not None]), rows)
    assert {trial.run for trial in kept} == {"run"}


def test_a_lesson_of_another_batch_is_not_believed(tmp_path: Path, contexts: list[Any]) -> None:
    lessons = LastLesson()
    lessons.lesson = Lesson(np.zeros((2, 2), dtype=np.float32), None)
    with RecordStore(tmp_path / "records.db") as store:
        keep(Keeper([store], contexts, "run", lessons, Events()), contexts, [1e-3])
        assert store.latest(store.tasks()[0])[0].features is None


def test_what_could_not_be_written_is_written_with_the_next_batch(contexts: list[Any]) -> None:
    store, journal = Refusing(2), Events()
    keeper = Keeper([store], contexts, "run", LastLesson(), journal)  # type: ignore[arg-type]
    keep(keeper, contexts, [1e-3])
    keep(keeper, contexts, [2e-3])
    assert store.kept == []
    keep(keeper, contexts, [3e-3])
    assert [trial.seconds for trial in store.kept] == [1e-3, 2e-3, 3e-3]
    assert [fields["where"] for _, fields in journal.events] == ["store", "store"]


def test_a_store_that_keeps_failing_is_left_alone(contexts: list[Any]) -> None:
    store = Refusing(10**6)
    keeper = Keeper([store], contexts, "run", LastLesson(), Events())  # type: ignore[arg-type]
    for _ in range(6):
        keep(keeper, contexts, [1e-3])
    assert store.n_asked == 3
    assert len(keeper._inst._shelves[0]._waiting) == 3  # and nothing piles up


def test_one_store_that_fails_does_not_keep_from_another(contexts: list[Any]) -> None:
    broken, sound = Refusing(10**6), Refusing(0)
    stores: list[Any] = [broken, sound]
    keeper = Keeper(stores, contexts, "run", LastLesson(), Events())
    for _ in range(5):
        keep(keeper, contexts, [1e-3])
    assert (broken.n_asked, len(sound.kept)) == (3, 5)


def test_whatever_goes_wrong_does_not_end_the_run(contexts: list[Any]) -> None:
    journal = Events()
    keeper = Keeper([Refusing(0)], [], "run", LastLesson(), journal)  # type: ignore[arg-type]
    keep(keeper, contexts, [1e-3])
    assert [fields["where"] for _, fields in journal.events] == ["keeper"]
