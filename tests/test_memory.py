from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tvm_adaptive import memory
from tvm_adaptive._tvm import IRModule, Target, te_workload
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.memory import (
    NO_STORE,
    USER_STORE,
    Recalled,
    open_store,
    recall,
    told_name,
    user_store,
)
from tvm_adaptive.search_strategy.findings import finding_of
from tvm_adaptive.search_strategy.knobs import KnobSpace, Tile
from tvm_adaptive.search_strategy.travel import Relatives
from tvm_adaptive.task_scheduler.arms import Remembered

N_FEATURES = 5


class Model:
    def preload(self, dataset: Dataset) -> None:
        self.dataset = dataset


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.db") as store:
        yield store


@pytest.fixture(scope="module")
def mod() -> IRModule:
    return te_workload("GMM")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture
def context(mod: IRModule, target: Target) -> Any:
    return SimpleNamespace(mod=mod, target=target, task_name="mine")


def trials(mod: IRModule, target: Target, seconds: list[float | None]) -> list[StoredTrial]:
    made = [trial_of(make_record(mod, target, sec, seed + 1)) for seed, sec in enumerate(seconds)]
    return [
        dataclasses.replace(trial, features=np.full(N_FEATURES, i, dtype=np.float32))
        for i, trial in enumerate(made)
    ]


def space_of(trial: StoredTrial) -> KnobSpace:
    finding = finding_of(json.loads(trial.record), 1.0)
    assert finding is not None
    return KnobSpace([finding.knobs], [finding.sketch])


def test_the_same_task_is_known_and_its_best_are_its_own_seeds(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    kept = trials(mod, target, [3e-3, None, 1e-3])
    store.add(task_of(mod, target, "then"), kept)
    relatives, model = Relatives(), Model()
    recalled = recall(store, [context], relatives, model)
    assert (recalled.n_known, recalled.n_related, recalled.n_samples) == (1, 0, 3)
    np.testing.assert_array_equal(recalled.tasks["mine"].latencies_ms, [3.0, np.nan, 1.0])
    assert not recalled.tasks["mine"].is_proven
    task = store.tasks()[0]
    seeds = relatives.ask(task.family, "mine", space_of(kept[0]), rng)
    assert all(seed.is_own for seed in seeds)
    best = finding_of(json.loads(kept[2].record), 1.0)
    assert best is not None
    assert seeds[0].point.vector == best.vector
    ((_, samples),) = model.dataset
    np.testing.assert_array_equal(samples.seconds, [3e-3, np.nan, 1e-3])
    assert samples.rows[:, 0].tolist() == [0, 1, 2]


def test_the_winner_of_a_playoff_comes_first_and_a_liar_never(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3, 3e-3, 4e-3])
    store.add(task, kept)
    store.add_finals(task, [dataclasses.replace(kept[2], seconds=1.5e-3)])
    store.add_finals(task, [dataclasses.replace(kept[0], seconds=None, failure="wrong result")])
    relatives, model = Relatives(), Model()
    assert recall(store, [context], relatives, model).tasks["mine"].is_proven
    seeds = relatives.ask(task.family, "mine", space_of(kept[0]), rng)
    findings = [finding_of(json.loads(each.record), 1.0) for each in kept]
    vectors = [each.vector for each in findings if each is not None]
    assert [seed.point.vector for seed in seeds] == [vectors[2], vectors[1], vectors[3]]
    ((_, samples),) = model.dataset
    np.testing.assert_array_equal(samples.seconds, [2e-3, 3e-3, 4e-3])


def test_what_a_run_did_itself_is_not_told_again(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    first, second = trials(mod, target, [1e-3, 2e-3])
    task = task_of(mod, target, "then")
    store.add(task, [dataclasses.replace(first, run="mine"), second])
    recalled = recall(store, [context], Relatives(), Model(), without={"mine"})
    assert recalled.tasks["mine"].latencies_ms == (2.0,)


def test_a_search_that_takes_no_seeds_is_not_compared_with_earlier_ones(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    (kept,) = trials(mod, target, [1e-3])
    store.add(task, [kept])
    store.add_finals(task, [kept])
    recalled = recall(store, [context], None, Model())
    assert recalled.tasks == {"mine": Remembered((), is_proven=True)}


def test_a_relative_brings_seeds_and_samples(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3])
    store.add(dataclasses.replace(task, workload_key="0" * 16), kept)
    relatives, model = Relatives(), Model()
    assert recall(store, [context], relatives, model) == Recalled(0, 1, 2)
    seeds = relatives.ask(task.family, "mine", space_of(kept[0]), rng)
    assert seeds
    assert not any(seed.is_own for seed in seeds)


def test_another_target_brings_seeds_only(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    other = Target({"kind": "llvm", "num-cores": 64})
    kept = trials(mod, other, [1e-3, 2e-3])
    store.add(task_of(mod, other, "then"), kept)
    relatives, model = Relatives(), Model()
    assert recall(store, [context], relatives, model) == Recalled(0, 1, 0)
    seeds = relatives.ask(task_of(mod, other, "").family, "mine", space_of(kept[0]), rng)
    assert seeds
    assert not any(seed.is_own for seed in seeds)


def test_another_family_brings_nothing(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = StoredTask("0" * 16, task_of(mod, target, "").target, "softmax", "s", "[]")
    store.add(task, trials(mod, target, [1e-3]))
    model = Model()
    assert recall(store, [context], Relatives(), model) == Recalled(0, 0, 0)
    assert len(model.dataset) == 0


def test_records_that_cannot_be_read_are_left_out(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    store.add(task, [StoredTrial("{", 1e-4), StoredTrial('[[["?"]]]', 1e-4)])
    assert recall(store, [context], Relatives(), Model()).n_known == 0
    store.add(task, trials(mod, target, [1e-3]))
    assert recall(store, [context], Relatives(), Model()).n_known == 1


def test_of_a_long_history_the_best_and_some_of_all_of_it_are_learned(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    (pattern,) = trials(mod, target, [1.0])
    seconds = np.random.default_rng(0).permutation(np.arange(1.0, 501.0))
    store.add(
        task_of(mod, target, "then"),
        [dataclasses.replace(pattern, seconds=float(sec)) for sec in seconds],
    )
    model = Model()
    recall(store, [context], None, model)
    ((_, samples),) = model.dataset
    assert 48 <= len(samples.seconds) <= 64
    assert set(np.arange(1.0, 33.0)) <= set(samples.seconds)
    assert samples.seconds.max() > 300


def test_a_model_that_takes_no_samples_gets_none(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    store.add(task_of(mod, target, "then"), trials(mod, target, [1e-3]))
    assert recall(store, [context], None, None).n_known == 1


def test_none_is_no_store() -> None:
    with open_store(NO_STORE) as store:
        assert store is None


def test_the_users_own_store_is_made_below_the_home_directory() -> None:
    with open_store(USER_STORE) as store:
        assert store is not None
    assert user_store().is_file()


def test_a_run_goes_on_without_the_users_own_store(caplog: pytest.LogCaptureFixture) -> None:
    user_store().parent.mkdir(parents=True)
    user_store().write_bytes(b"something else" * 1000)
    with open_store(USER_STORE) as store:
        assert store is None
    assert "goes on without" in caplog.text


def test_a_store_that_was_named_must_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else" * 1000)
    with pytest.raises(StoreError), open_store(str(tmp_path / "file")):
        pass


def test_what_a_record_says_of_its_knobs(mod: IRModule, target: Target) -> None:
    (trial,) = trials(mod, target, [1e-3])
    finding = finding_of(json.loads(trial.record), 1e-3)
    assert finding is not None
    (tile,) = finding.knobs
    assert isinstance(tile, Tile)
    assert (tile.extent, tile.n_parts) == (128, 4)
    assert int(np.prod(finding.vector)) == 128


def test_all_samples_together_are_bounded(
    store: RecordStore,
    mod: IRModule,
    target: Target,
    context: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_MAX_SAMPLES", 5)
    task = task_of(mod, target, "then")
    for number in range(4):
        other = dataclasses.replace(task, workload_key=f"{number:016x}")
        store.add(other, trials(mod, target, [1e-3, 2e-3]))
    store.add(task, trials(mod, target, [1e-3, 2e-3]))
    model = Model()
    recall(store, [context], None, model)
    assert len(model.dataset) == 6
    # The task's own come first.
    assert next(iter(model.dataset))[0].startswith(task.workload_key)


def test_a_url_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="MY_STORE, which is not set"), open_store("env:MY_STORE"):
        pass
    monkeypatch.setenv("MY_STORE", f"sqlite:///{tmp_path / 'team.db'}")
    with open_store("env:MY_STORE") as store:
        assert store is not None
        assert store.name == str(tmp_path / "team.db")
        # A journal names the variable, from which a resumed run finds the store again.
        assert told_name("env:MY_STORE", store) == "env:MY_STORE"
    with RecordStore(tmp_path / "other.db") as store:
        assert told_name("whatever", store) == str(tmp_path / "other.db")
    assert told_name(USER_STORE, None) == NO_STORE
