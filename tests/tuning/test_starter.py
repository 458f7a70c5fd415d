from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    TVM_VERSION,
    IRModule,
    Target,
    anchor_of,
    record_as_json,
    te_workload,
    workload_key,
)
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.database.location import STARTER_FOLDER
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.starter_file import (
    StarterHeader,
    StarterTask,
    read_starter,
    write_starter,
)
from tvm_adaptive.measure_callback.history import History, TaskHistory
from tvm_adaptive.search_strategy.knobs import KnobSpace
from tvm_adaptive.search_strategy.transfer import Seed, TransferPool, transfer_record_of
from tvm_adaptive.tuning import starter, warm_start
from tvm_adaptive.tuning.config import DEFAULT, PAPER, TuneConfig
from tvm_adaptive.tuning.starter import (
    StarterFile,
    instruction_set_of,
    start_from,
    starter_file_of,
)

WIDTH = 5
NAME = "avx2-2.json.xz"
AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
AVX512 = Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2})


class Model:
    n_features = WIDTH

    def __init__(self) -> None:
        self.dataset = Dataset()

    def preload(self, dataset: Dataset, *, fading: bool = False) -> None:
        assert fading
        self.dataset = dataset


@pytest.fixture(scope="module")
def mod() -> IRModule:
    return te_workload("GMM")


@pytest.fixture
def context(mod: IRModule) -> Any:
    return SimpleNamespace(mod=mod, target=AVX2, task_name="mine")


def starter_task(mod: IRModule, key: str, n: int = 3) -> StarterTask:
    made = [record_as_json(make_record(mod, AVX2, 1e-3, seed + 1)) for seed in range(n)]
    return StarterTask(
        family=anchor_of(mod),
        workload_key=key,
        name="theirs",
        records=tuple((record[0], 1e-3 * (place + 1)) for place, record in enumerate(made)),
        rows=np.ones((n, WIDTH), dtype=np.float32),
        seconds=np.linspace(1e-3, 2e-3, n),
    )


def write(folder: Path, tasks: list[StarterTask], tvm: str = str(TVM_VERSION)) -> Path:
    header = StarterHeader(
        instruction_set="avx2",
        n_threads=2,
        tvm=tvm,
        processor="some processor",
        mcpu="x86-64-v3",
        date="2026-01-01",
        command="make",
        workloads=(),
    )
    folder.mkdir(exist_ok=True)
    write_starter(folder / NAME, header, tasks)
    return folder / NAME


def seeds_of(pool: TransferPool, mod: IRModule, task: StarterTask) -> list[Seed]:
    found = transfer_record_of([task.records[0][0]], 1.0)
    assert found is not None
    space = KnobSpace([found.knobs], [found.sketch])
    return pool.ask(anchor_of(mod), "mine", space, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("names", "target", "chosen"),
    [
        (["avx2-2", "avx512-2"], AVX2, ("avx2-2", True)),
        (["avx2-2", "avx512-2"], AVX512, ("avx512-2", True)),
        (["avx2-2"], AVX512, ("avx2-2", False)),
        (["avx512-2"], AVX2, None),  # it has more registers, and wider ones
        ([], AVX2, None),
    ],
)
def test_the_file_of_the_instruction_set_is_chosen(
    tmp_path: Path, names: list[str], target: Target, chosen: tuple[str, bool] | None
) -> None:
    for name in names:
        (tmp_path / f"{name}.json.xz").touch()
    found = starter_file_of(target, tmp_path)
    assert (found and (found.name, found.is_alike)) == chosen


@pytest.mark.parametrize(
    ("target", "instruction_set"),
    [
        (AVX2, "avx2"),
        (AVX512, "avx512"),
        (Target({"kind": "llvm", "num-cores": 2}), ""),
        (Target({"kind": "c"}), ""),
    ],
)
def test_the_instruction_set_is_the_targets(target: Target, instruction_set: str) -> None:
    assert instruction_set_of(target) == instruction_set


def test_other_targets_have_no_file(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"")
    gpu = Target({"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024})
    assert starter_file_of(gpu, tmp_path) is None
    assert starter_file_of(Target({"kind": "llvm", "num-cores": 2}), tmp_path) is None
    assert starter_file_of(AVX2, tmp_path / "missing") is None
    assert starter_file_of(AVX2, tmp_path) == StarterFile(tmp_path / NAME, True)
    assert starter_file_of(AVX512, tmp_path) == StarterFile(tmp_path / NAME, False)


def test_a_relative_brings_seeds_and_samples(tmp_path: Path, mod: IRModule, context: Any) -> None:
    task = starter_task(mod, "0" * 16)
    file = StarterFile(write(tmp_path, [task]), is_alike=True)
    pool, model = TransferPool(), Model()
    start = start_from(file, [context], pool, model)
    assert start is not None
    assert (start.file, start.n_tasks, start.n_related, start.n_samples) == ("avx2-2", 1, 1, 3)
    seeds = seeds_of(pool, mod, task)
    assert len(seeds) == 3
    assert not any(seed.is_own for seed in seeds)
    ((_, samples),) = model.dataset
    np.testing.assert_allclose(samples.seconds, task.seconds)


def test_the_same_task_is_first_but_never_trusted(
    tmp_path: Path, mod: IRModule, context: Any
) -> None:
    same, other = starter_task(mod, workload_key(mod), 1), starter_task(mod, "0" * 16, 3)
    # Without its first schedule, which is the same task's, too.
    rest = {name: getattr(other, name)[1:] for name in ("records", "rows", "seconds")}
    other = dataclasses.replace(other, **rest)
    # In the file and by its extents the other one is no further.
    file = StarterFile(write(tmp_path, [other, same]), is_alike=True)
    pool = TransferPool()
    start_from(file, [context], pool, None)
    seeds = seeds_of(pool, mod, same)
    first, theirs = (transfer_record_of([each.records[0][0]], 1.0) for each in (same, other))
    assert first is not None
    assert theirs is not None
    assert theirs.vector != first.vector
    assert len(seeds) == 3
    assert seeds[0] == Seed(seeds[0].point, is_own=False)
    assert seeds[0].point.vector == first.vector


def test_reductions_are_related_whatever_their_operand_is_called(
    tmp_path: Path, mod: IRModule, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = dataclasses.replace(starter_task(mod, "0" * 16), family="x0_var_sum")
    file = StarterFile(write(tmp_path, [task]), is_alike=True)
    monkeypatch.setattr(starter, "anchor_of", lambda _: "add4_var_sum")
    pool, found = TransferPool(), transfer_record_of([task.records[0][0]], 1.0)
    assert found is not None
    start = start_from(file, [context], pool, None)
    assert start is not None
    assert start.n_tasks == 1
    space = KnobSpace([found.knobs], [found.sketch])
    assert pool.ask("add4_var_sum", "mine", space, np.random.default_rng(0))


@pytest.mark.parametrize(("is_alike", "tvm"), [(False, str(TVM_VERSION)), (True, "0.99.0")])
def test_another_instruction_set_or_release_brings_seeds_alone(
    tmp_path: Path, mod: IRModule, context: Any, is_alike: bool, tvm: str
) -> None:
    task = starter_task(mod, "0" * 16)
    file = StarterFile(write(tmp_path, [task], tvm), is_alike)
    pool, model = TransferPool(), Model()
    start = start_from(file, [context], pool, model)
    assert start is not None
    assert start.n_samples == 0
    assert len(model.dataset) == 0
    assert seeds_of(pool, mod, task)


def test_samples_of_another_width_and_records_that_cannot_be_read_are_left_out(
    tmp_path: Path, mod: IRModule, context: Any
) -> None:
    task = starter_task(mod, "0" * 16)
    strange = [[["SampleCategorical", [], [], ["v0"]]], [[0, 1]]]  # without candidates
    narrow = dataclasses.replace(
        task, rows=np.ones((3, WIDTH - 1), dtype=np.float32), records=((strange, 1e-3),)
    )
    pool, model = TransferPool(), Model()
    start = start_from(StarterFile(write(tmp_path, [narrow]), True), [context], pool, model)
    assert start is not None
    assert start.n_samples == 0
    assert seeds_of(pool, mod, task) == []


def test_a_damaged_file_is_one_line_in_the_log(
    tmp_path: Path, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"damaged")
    pool, model = TransferPool(), Model()
    with caplog.at_level(logging.WARNING):
        assert start_from(StarterFile(path, True), [context], pool, model) is None
    (record,) = caplog.records
    assert "begins without" in record.getMessage()
    assert NAME in record.getMessage()


@pytest.mark.parametrize(
    ("config", "is_used"),
    [
        (DEFAULT, True),
        (DEFAULT.replace(starter=False), False),
        (DEFAULT.replace(store="none"), False),
        (PAPER, False),
        (PAPER.replace(store="user"), False),
    ],
)
def test_a_configuration_can_do_without(
    *,
    tmp_path: Path,
    context: Any,
    config: TuneConfig,
    is_used: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_session: Any,
) -> None:
    mod = context.mod
    path = write(tmp_path / "starter", [starter_task(mod, "0" * 16)])
    monkeypatch.setattr(warm_start, "starter_file_of", lambda _: StarterFile(path, True))
    monkeypatch.setattr(warm_start, "model_hooks", lambda model: model)
    events: list[str] = []
    journal = SimpleNamespace(write=lambda event, **_: events.append(event))
    pool = TransferPool()
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=pool, task_scheduler=None)
    session, database = make_session(config, journal=journal), RunDatabase(tmp_path)
    with warm_start.warm_started(session, [context], parts, database):
        pass
    assert events == (["starter"] if is_used else [])
    assert bool(seeds_of(pool, mod, starter_task(mod, "0" * 16))) is is_used


@pytest.mark.parametrize(
    ("model", "note"),
    [(None, None), (Model(), "the cost model begins with 3 samples of starter records (avx2-2)")],
)
def test_no_task_begins_with_records_that_its_search_does_not_take(
    tmp_path: Path,
    context: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    make_session: Any,
    model: Model | None,
    note: str | None,
) -> None:
    path = write(tmp_path / "starter", [starter_task(context.mod, "0" * 16)])
    monkeypatch.setattr(warm_start, "starter_file_of", lambda _: StarterFile(path, True))
    monkeypatch.setattr(warm_start, "model_hooks", lambda model: model)
    observer, journal = Notes(), MemoryJournal()
    session = make_session(observer=observer, journal=journal)
    parts: Any = SimpleNamespace(cost_model=model, transfer_pool=None)
    warm_start._start(session, [context], parts)
    assert observer.notes == ([] if note is None else [note])
    assert [(each["n_tasks"], each["n_samples"]) for each in journal.of("starter")] == (
        [] if note is None else [(0, 3)]
    )


def test_a_task_that_has_trials_does_not_begin_with_starter_records(
    tmp_path: Path, context: Any, monkeypatch: pytest.MonkeyPatch, *, make_session: Any
) -> None:
    task = starter_task(context.mod, "0" * 16)
    path = write(tmp_path / "starter", [task])
    monkeypatch.setattr(warm_start, "starter_file_of", lambda _: StarterFile(path, True))
    monkeypatch.setattr(warm_start, "model_hooks", lambda model: model)
    history = History(tasks={"mine": TaskHistory(name="mine")})
    history.tasks["mine"].add_latencies([1.0])
    observer, pool = Notes(), TransferPool()
    session = make_session(observer=observer, history=history)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=pool)
    other = SimpleNamespace(mod=context.mod, target=AVX2, task_name="other")
    warm_start._start(session, [context, other], parts)
    assert observer.notes == ["1 of 2 tasks begin with starter records (avx2-2)"]
    warm_start._start(session, [context], parts)
    assert len(observer.notes) == 1
    assert seeds_of(pool, context.mod, task)


def test_the_packages_own_files_are_valid_and_small() -> None:
    files = sorted(STARTER_FOLDER.glob("*.xz"))
    assert {path.name for path in files} >= {"avx2-2.json.xz", "avx512-2.json.xz"}
    for path in files:
        header, tasks = read_starter(path)
        assert path.name == f"{header.instruction_set}-{header.n_threads}.json.xz"
        assert tasks
        assert all(each.records for each in tasks)
        # Of records in TVM's own form, the search uses none that it cannot read.
        traces = [trace for each in tasks for trace, _ in each.records]
        assert all(transfer_record_of([trace], 1.0) is not None for trace in traces)
    assert sum(path.stat().st_size for path in files) <= 2_000_000
