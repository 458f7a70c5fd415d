from __future__ import annotations

import dataclasses
import json
import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from tests.database.conftest import make_record
from tvm_adaptive._tvm import IRModule, Target, te_workload
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import transaction
from tvm_adaptive.database.location import (
    NO_STORE,
    USER_STORE,
    user_store,
)
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import Identity, StoredTask, StoredTrial, pack_features
from tvm_adaptive.database.store import RecordStore, open_store, redacted_name
from tvm_adaptive.errors import StoreError
from tvm_adaptive.search_strategy.knobs import KnobSpace, Tile
from tvm_adaptive.search_strategy.transfer import TransferPool, transfer_record_of
from tvm_adaptive.task_scheduler.arms import PriorTrials
from tvm_adaptive.tuning import prior_trials
from tvm_adaptive.tuning.prior_trials import WarmStart, find_prior_trials
from tvm_adaptive.workers.environment import Environment

N_FEATURES = 5
HERE = Environment("this processor, 2 cores", "0.27.0", "0.1.14")


class Model:
    n_features = N_FEATURES

    def preload(self, dataset: Dataset, *, fading: bool = False) -> None:
        assert not fading
        self.dataset = dataset


class Slow:
    """A store that takes a second for the verdicts on a task; also the clock."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self.sec = 0.0
        self.asked: list[Identity] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __call__(self) -> float:
        return self.sec

    def finals(self, task: StoredTask, **options: Any) -> list[StoredTrial]:
        self.sec += 1.0
        self.asked.append(task.identity)
        return self._store.finals(task, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.db", HERE) as store:
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
    finding = transfer_record_of(json.loads(trial.record), 1.0)
    assert finding is not None
    return KnobSpace([finding.knobs], [finding.sketch])


def test_the_same_task_is_known_and_its_best_are_its_own_seeds(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    kept = trials(mod, target, [3e-3, None, 1e-3])
    store.add(task_of(mod, target, "then"), kept)
    transfer_pool, model = TransferPool(), Model()
    recalled = find_prior_trials(store, [context], transfer_pool, model)
    assert (recalled.n_known, recalled.n_related, recalled.n_samples) == (1, 0, 3)
    np.testing.assert_array_equal(recalled.tasks["mine"].latencies_ms, [3.0, np.nan, 1.0])
    assert not recalled.tasks["mine"].is_proven
    task = store.tasks()[0]
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    assert all(seed.is_own for seed in seeds)
    best = transfer_record_of(json.loads(kept[2].record), 1.0)
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
    transfer_pool, model = TransferPool(), Model()
    assert find_prior_trials(store, [context], transfer_pool, model).tasks["mine"].is_proven
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    transfer_records = [transfer_record_of(json.loads(each.record), 1.0) for each in kept]
    vectors = [each.vector for each in transfer_records if each is not None]
    assert [seed.point.vector for seed in seeds] == [vectors[2], vectors[1], vectors[3]]
    ((_, samples),) = model.dataset
    np.testing.assert_array_equal(samples.seconds, [2e-3, 3e-3, 4e-3])


def test_trials_of_equal_tasks_are_learnt_once(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    store.add(task_of(mod, target, "mine"), trials(mod, target, [1e-3, 2e-3]))
    other: Any = SimpleNamespace(mod=mod, target=target, task_name="other")
    learnt: list[float] = []
    model: Any = SimpleNamespace(
        n_features=Model().n_features,
        restore=lambda _context, _rows, seconds, _errors: learnt.extend(seconds),
    )
    assert prior_trials.restore(store, [context, other], model) == 2
    assert sorted(learnt) == [1e-3, 2e-3]


def test_what_was_disqualified_is_no_history_of_its_task(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3, None, 3e-3])
    store.add(task, [*kept[:3], dataclasses.replace(kept[3], run="mine")])
    store.add_finals(task, [dataclasses.replace(kept[0], seconds=None, failure="wrong result")])
    recalled = find_prior_trials(store, [context], TransferPool(), Model(), without={"mine"})
    np.testing.assert_array_equal(recalled.tasks["mine"].latencies_ms, [np.nan, 2.0, np.nan])


def test_what_a_run_did_itself_is_not_reported_again(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    first, second = trials(mod, target, [1e-3, 2e-3])
    task = task_of(mod, target, "then")
    store.add(task, [dataclasses.replace(first, run="mine"), second])
    recalled = find_prior_trials(store, [context], TransferPool(), Model(), without={"mine"})
    assert recalled.tasks["mine"].latencies_ms == (2.0,)


def test_a_search_that_takes_no_seeds_is_not_compared_with_earlier_ones(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    (kept,) = trials(mod, target, [1e-3])
    store.add(task, [kept])
    store.add_finals(task, [kept])
    recalled = find_prior_trials(store, [context], None, Model())
    assert recalled.tasks == {"mine": PriorTrials((), is_proven=True)}


def test_a_relative_brings_seeds_and_samples(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3])
    store.add(dataclasses.replace(task, workload_key="0" * 16), kept)
    transfer_pool, model = TransferPool(), Model()
    assert find_prior_trials(store, [context], transfer_pool, model) == WarmStart(0, 1, 2)
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    assert seeds
    assert all(seed.is_of_equal_task and not seed.is_own for seed in seeds)


@pytest.mark.parametrize(("n_trials", "is_told"), [(15, False), (16, True)])
def test_the_best_of_a_few_trials_is_for_tasks_of_the_same_extents_only(
    *,
    store: RecordStore,
    mod: IRModule,
    target: Target,
    context: Any,
    rng: np.random.Generator,
    n_trials: int,
    is_told: bool,
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, None, *[2e-3] * (n_trials - 2)])
    # Of this very run, such as of an attempt that was interrupted, or of any other one.
    mine = [dataclasses.replace(each, run="mine") for each in kept]
    store.add(dataclasses.replace(task, workload_key="0" * 16), mine)
    pool = TransferPool()
    find_prior_trials(store, [context], pool, None, without={"mine"})
    equal = space_of(kept[0])
    ((tile,),) = equal.sketches
    assert isinstance(tile, Tile)
    larger = KnobSpace([(dataclasses.replace(tile, extent=2 * tile.extent),)], equal.names)
    assert pool.ask(task.family, "mine", equal, rng)
    assert bool(pool.ask(task.family, "mine", larger, rng)) == is_told


@pytest.mark.parametrize(("run", "n_known", "n_related"), [("mine", 0, 0), ("other", 1, 1)])
def test_what_only_this_run_has_tuned_is_not_known_before(
    *,
    store: RecordStore,
    mod: IRModule,
    target: Target,
    context: Any,
    run: str,
    n_known: int,
    n_related: int,
) -> None:
    larger: Any = SimpleNamespace(mod=te_workload("GMM", 1), target=target, task_name="larger")
    task, (kept,) = task_of(mod, target, "then"), trials(mod, target, [1e-3])
    store.add(task, [dataclasses.replace(kept, run=run)])
    store.add_finals(task, [dataclasses.replace(kept, run=f"{run}.2")])
    found = find_prior_trials(store, [context, larger], TransferPool(), None, without={"mine"})
    assert (found.n_known, found.n_related) == (n_known, n_related)
    # A proof is one, whoever has made it, also without a trial.
    store.prune(0)
    found = find_prior_trials(store, [context, larger], TransferPool(), None, without={"mine"})
    assert (found.n_known, found.n_related) == (n_known, n_related)
    assert found.tasks["mine"].is_proven


def test_another_target_brings_seeds_only(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    other = Target({"kind": "llvm", "num-cores": 64})
    kept = trials(mod, other, [1e-3, 2e-3])
    store.add(task_of(mod, other, "then"), kept)
    transfer_pool, model = TransferPool(), Model()
    assert find_prior_trials(store, [context], transfer_pool, model) == WarmStart(0, 1, 0)
    seeds = transfer_pool.ask(task_of(mod, other, "").family, "mine", space_of(kept[0]), rng)
    assert seeds
    assert not any(seed.is_own or seed.is_of_equal_task for seed in seeds)


def test_another_family_brings_nothing(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = StoredTask("0" * 16, task_of(mod, target, "").target, "softmax", "s", "[]")
    store.add(task, trials(mod, target, [1e-3]))
    model = Model()
    assert find_prior_trials(store, [context], TransferPool(), model) == WarmStart(0, 0, 0)
    assert len(model.dataset) == 0


def test_records_that_cannot_be_read_are_left_out(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    store.add(task, [StoredTrial("{", 1e-4), StoredTrial('[[["?"]]]', 1e-4)])
    assert find_prior_trials(store, [context], TransferPool(), Model()).n_known == 0
    store.add(task, trials(mod, target, [1e-3]))
    assert find_prior_trials(store, [context], TransferPool(), Model()).n_known == 1


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
    find_prior_trials(store, [context], None, model)
    ((_, samples),) = model.dataset
    assert 48 <= len(samples.seconds) <= 64
    assert set(np.arange(1.0, 33.0)) <= set(samples.seconds)
    assert samples.seconds.max() > 300


def test_a_model_that_takes_no_samples_gets_none(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    store.add(task_of(mod, target, "then"), trials(mod, target, [1e-3]))
    assert find_prior_trials(store, [context], None, None).n_known == 1


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
    assert "continues without it" in caplog.text


def test_a_store_that_was_named_must_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else" * 1000)
    with pytest.raises(StoreError), open_store(str(tmp_path / "file")):
        pass


def test_what_a_record_says_of_its_knobs(mod: IRModule, target: Target) -> None:
    (trial,) = trials(mod, target, [1e-3])
    finding = transfer_record_of(json.loads(trial.record), 1e-3)
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
    monkeypatch.setattr(prior_trials, "_MAX_SAMPLES", 5)
    task = task_of(mod, target, "then")
    for number in range(4):
        other = dataclasses.replace(task, workload_key=f"{number:016x}")
        store.add(other, trials(mod, target, [1e-3, 2e-3]))
    store.add(task, trials(mod, target, [1e-3, 2e-3]))
    model = Model()
    find_prior_trials(store, [context], None, model)
    assert len(model.dataset) == 6
    # The task's own come first.
    assert next(iter(model.dataset))[0].startswith(task.workload_key)


@pytest.mark.parametrize(
    ("search_sec", "has_model", "n_related"),
    # Of ten seconds, or a tenth of the search's, each task takes two, and three with samples.
    [
        (math.inf, False, 3),
        (60.0, False, 1),
        (30.0, False, 0),
        (math.inf, True, 2),
        (60.0, True, 0),
    ],
)
def test_a_slow_store_delays_a_search_for_seconds_only(
    *,
    store: RecordStore,
    mod: IRModule,
    target: Target,
    context: Any,
    search_sec: float,
    has_model: bool,
    n_related: int,
) -> None:
    other_mod = te_workload("C1D")
    other: Any = SimpleNamespace(mod=other_mod, target=target, task_name="other")
    for family, each in enumerate((mod, other_mod)):
        task, kept = task_of(each, target, "then"), trials(each, target, [1e-3, 2e-3])
        store.add(task, kept)
        for number in range(3):
            store.add(dataclasses.replace(task, workload_key=f"related {family} {number}"), kept)
    slow: Any = Slow(store)
    model = Model() if has_model else None
    pool = TransferPool()
    found = find_prior_trials(
        slow, [context, other], pool, model, search_sec=search_sec, clock=slow
    )
    asked = dict.fromkeys(key for key, _ in slow.asked)
    # The run's own are read in any case, of the others the newest of each family.
    order = ["related 0 2", "related 1 2", "related 0 1", "related 1 1"]
    assert [key for key in asked if key.startswith("related")] == order[:n_related]
    assert (found.n_known, sorted(found.tasks)) == (2, ["mine", "other"])
    assert found.n_samples == (2 * (2 + n_related) if has_model else 0)


def test_a_run_s_own_trials_take_no_place_of_samples_of_others(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    (pattern,) = trials(mod, target, [1.0])
    mine, others = (
        [dataclasses.replace(pattern, seconds=sec + i / 1000, run=run) for i in range(n)]
        for run, sec, n in (("mine", 1.0, 200), ("other", 5.0, 64))
    )
    store.add(task_of(mod, target, "then"), [*mine, *others])
    found = find_prior_trials(store, [context], None, Model(), without={"mine"})
    assert found.n_samples == 64


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
        assert redacted_name("env:MY_STORE", store) == "env:MY_STORE"
    with RecordStore(tmp_path / "other.db") as store:
        assert redacted_name("whatever", store) == str(tmp_path / "other.db")
    assert redacted_name(USER_STORE, None) == USER_STORE  # a resumed run tries it again
    assert redacted_name("whatever", None) == NO_STORE
    monkeypatch.chdir(tmp_path)
    with RecordStore("team.db") as store:
        assert redacted_name("team.db", store) == str(tmp_path / "team.db")


def at(environment: Environment, trials: list[StoredTrial]) -> list[StoredTrial]:
    return [dataclasses.replace(trial, environment=environment) for trial in trials]


OTHER_DEVICE = dataclasses.replace(HERE, device="another processor, 2 cores")
OTHER_TVM = dataclasses.replace(HERE, tvm="0.26.0")
SOMEWHERE = dataclasses.replace(HERE, device="")


@pytest.mark.parametrize("there", [OTHER_DEVICE, OTHER_TVM, SOMEWHERE])
def test_what_comes_from_elsewhere_is_a_hint_and_no_time(
    tmp_path: Path, context: Any, rng: np.random.Generator, there: Environment
) -> None:
    mod, target = context.mod, context.target
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3, 3e-3])
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task, at(there, kept))
        store.add_finals(task, at(there, [dataclasses.replace(kept[1], features=None)]))
        transfer_pool, model = TransferPool(), Model()
        recalled = find_prior_trials(store.at(HERE), [context], transfer_pool, model)
        assert recalled.n_known == 1
        assert recalled.n_samples == len(model.dataset) == 0
        assert recalled.tasks == {}
        found = vectors_of(kept)
        seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
        # The winner there is the best hint; all are measured again.
        assert [seed.point.vector for seed in seeds] == [found[1], found[0], found[2]]
        assert all(seed.is_own for seed in seeds)
        # As before, for somebody who measures there.
        if there.is_known:
            again = find_prior_trials(store.at(there), [context], TransferPool(), Model())
            assert again.n_samples == 3
            assert again.tasks["mine"].is_proven


def test_a_relative_of_elsewhere_is_no_equal(
    store: RecordStore, context: Any, rng: np.random.Generator
) -> None:
    """An equal's best is deployed unmeasured where a task has no trials."""
    kept = trials(context.mod, context.target, [1e-3, 2e-3])
    task = task_of(context.mod, context.target, "then")
    relative = dataclasses.replace(task, workload_key="0" * 16)
    store.add(relative, at(OTHER_DEVICE, kept[:1]) + at(HERE, kept[1:]))
    transfer_pool = TransferPool()
    find_prior_trials(store, [context], transfer_pool, None)
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    equals = {seed.point.vector: seed.is_of_equal_task for seed in seeds}
    assert equals == dict(zip(vectors_of(kept), [False, True], strict=True))


def vectors_of(kept: list[StoredTrial]) -> list[tuple[int, ...]]:
    transfer_records = [transfer_record_of(json.loads(each.record), 1.0) for each in kept]
    return [each.vector for each in transfer_records if each is not None]


def test_among_what_was_measured_here_the_best_from_elsewhere_has_a_place(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3])
    store.add(task, kept[:5])
    store.add(task, at(OTHER_DEVICE, [dataclasses.replace(kept[5], seconds=9.0)]))
    transfer_pool = TransferPool()
    recalled = find_prior_trials(store, [context], transfer_pool, Model())
    assert len(recalled.tasks["mine"].latencies_ms) == 5
    found = vectors_of(kept)
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    assert [seed.point.vector for seed in seeds] == [found[0], found[1], found[2], found[5]]


def test_what_a_playoff_disqualified_elsewhere_is_wrong_here_too(
    store: RecordStore, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3])
    store.add(task, kept)
    liar = dataclasses.replace(kept[0], seconds=None, failure="wrong result")
    store.add_finals(task, at(OTHER_TVM, [liar]))
    transfer_pool, model = TransferPool(), Model()
    find_prior_trials(store, [context], transfer_pool, model)
    seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
    assert [seed.point.vector for seed in seeds] == vectors_of(kept)[1:]
    ((_, samples),) = model.dataset
    assert samples.seconds.tolist() == [2e-3]


def hostile_rows(n: int) -> list[dict[str, Any]]:
    """Return rows that somebody wrote by hand, most of them faster than any kernel."""
    good = json.dumps([[[], []], [1.0]])
    bomb = zlib.compress(bytes(1 << 20), level=9)
    tile = [["SamplePerfectTile", ["l"], [2, 64], ["a", "b"]]]
    foreign = pack_features(np.ones(N_FEATURES + 2, dtype=np.float32))
    patterns: list[dict[str, Any]] = [
        {"record": good[:-2]},
        {"record": "[" * 2000},
        {"record": "[[[],[]],[Infinity]]"},
        {"record": json.dumps([[tile, [[0, [0, 64]]]], [1.0]])},
        {"record": good, "seconds": 1e-300},
        {"record": good, "seconds": float("inf")},
        # Of these the record is one.
        {"record": good, "features": bomb, "seconds": 0.5},
        {"record": good, "features": foreign, "seconds": 0.5},
    ]
    return [
        {"seconds": 1e-9 * (number + 1), "features": None, **patterns[number % len(patterns)]}
        for number in range(n)
    ]


def test_ten_thousand_hostile_rows_hide_no_good_one(
    tmp_path: Path, mod: IRModule, target: Target, context: Any, rng: np.random.Generator
) -> None:
    task = task_of(mod, target, "then")
    seconds = [1e-3 * (number + 1) for number in range(100)]
    kept = trials(mod, target, [*seconds])
    with RecordStore(tmp_path / "records.db", HERE) as store:
        store.add(task, kept[:50])
        common = {"failure": "", "unix_sec": 1.0, "run": "theirs", "task_id": 1}
        rows = [{**common, "environment_id": 1, **row} for row in hostile_rows(10_000)]
        with transaction(store._engine) as connection:
            connection.execute(sa.insert(schema.trials), rows)
        store.add(task, kept[50:])
    with RecordStore(tmp_path / "records.db", HERE) as store:
        transfer_pool, model = TransferPool(), Model()
        start_sec = time.process_time()
        recalled = find_prior_trials(store, [context], transfer_pool, model)
        assert time.process_time() - start_sec < 60.0
        assert recalled.n_known == 1
        assert recalled.n_left_out > 4000
        ((_, samples),) = model.dataset
        assert len(samples.seconds) == 64
        assert set(samples.seconds) <= set(seconds)
        assert set(seconds[:32]) <= set(samples.seconds)
        seeds = transfer_pool.ask(task.family, "mine", space_of(kept[0]), rng)
        assert seeds[0].point.vector == vectors_of(kept)[0]


def test_a_row_of_foreign_width_costs_no_other(
    store: RecordStore, mod: IRModule, target: Target, context: Any
) -> None:
    task = task_of(mod, target, "then")
    kept = trials(mod, target, [1e-3, 2e-3, 3e-3])
    wide = dataclasses.replace(kept[2], features=np.ones(N_FEATURES + 1, dtype=np.float32))
    store.add(task, [wide, kept[0], kept[1], wide])
    assert find_prior_trials(store, [context], None, Model()).n_samples == 2
    kept_ones: list[Any] = []
    learner = SimpleNamespace(
        n_features=N_FEATURES, restore=lambda _context, rows, *_: kept_ones.extend(rows)
    )
    assert prior_trials.restore(store, [context], learner) == 2
    assert len(kept_ones) == 2


def test_a_user_without_a_home_has_no_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with open_store(USER_STORE) as store:
        assert store is None
    assert len(caplog.records) == 1
    assert "no home directory to keep records in; name a file with --store" in caplog.text
    with pytest.raises(StoreError, match="no home directory"):
        user_store()
