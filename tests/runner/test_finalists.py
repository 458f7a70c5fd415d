from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.database import TuningRecord
from tvm.target import Target

from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.builder.compile import build_candidate
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.finalist_modules import reduction_length, with_plain_weights
from tvm_adaptive.runner.finalists import (
    best_as_recorded,
    final_database,
    finalist_pool,
    play_off,
)
from tvm_adaptive.workers import WorkerPool

# Workers cannot import this file; its functions travel whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LLVM = Target({"kind": "llvm", "num-cores": 1})
SIZE = 32
# A block iterates in tiles of this many rows; the misbehaving builder knows them by it.
GOOD, BETTER, WRONG, CRASHING, HANGING, UNBUILDABLE = 2, 4, 8, 16, 32, 1


def matmul(n: int = SIZE) -> tvm.IRModule:
    a = te.placeholder((n, n), name="A")
    b = te.placeholder((n, n), name="B")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    function = te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def record(workload: Any, rows: int, run_secs: list[float]) -> TuningRecord:
    schedule = Schedule(workload.mod)
    i, _, _ = schedule.get_loops(schedule.get_sblock("C"))
    schedule.split(i, factors=[None, rows])
    info = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    return TuningRecord(schedule.trace, workload, run_secs, LLVM, info)


def database_of(times: dict[int, list[float]]) -> tuple[Any, tvm.IRModule]:
    mod = matmul()
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(mod)
    for rows, run_secs in times.items():
        database.commit_tuning_record(record(workload, rows, run_secs))
    return database, mod


def build_badly(mod: Any, target: Any, params: Any) -> Any:
    """Build something else for some tile sizes: wrong and fast, crashing, hanging."""
    text = mod.script()
    rows = next((n for n in (2, 4, 8, 16, 32, 1) if f"T.grid({SIZE // n}, {n}, " in text), 0)
    if rows == UNBUILDABLE:
        raise RuntimeError("no registers left")
    if rows == WRONG:
        return build_candidate(idle(), target, params)
    if rows == CRASHING:
        return build_candidate(far_write(), target, params)
    if rows == HANGING:
        return build_candidate(long_loop(), target, params)
    return build_candidate(mod, target, params)


def idle() -> tvm.IRModule:
    return elementwise(lambda a, b: lambda i, j: a[i, j] + b[i, j])


def elementwise(rule: Any, n: int = SIZE) -> tvm.IRModule:
    a = te.placeholder((n, n), name="A")
    b = te.placeholder((n, n), name="B")
    c = te.compute((n, n), rule(a, b), name="C")
    function = te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def far_write() -> tvm.IRModule:
    far = 1 << 44
    return elementwise(lambda a, b: lambda i, j: te.if_then_else(i < 0, 0.0, a[i + far, j]))


def long_loop() -> tvm.IRModule:
    n = SIZE
    a = te.placeholder((n, n), name="A")
    b = te.placeholder((n, n), name="B")
    k = te.reduce_axis((0, 1 << 40), name="k")
    c = te.compute((n, n), lambda i, j: te.max(te.sin(a[i, j] + k) * b[i, j], axis=k), name="C")
    function = te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


@pytest.fixture(scope="module")
def builder() -> Iterator[Any]:
    builder = PersistentBuilder(max_workers=1, timeout_sec=60, build_function=build_badly)
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = finalist_pool()
    yield pool
    pool.close()


def play(database: Any, mod: Any, builder: Any, pool: WorkerPool, **options: Any) -> Any:
    options = {"timeout_sec": 20.0, "max_sec": 1.0, "repeat_ms": 1.0, **options}
    return play_off(database, mod, LLVM, builder=builder, pool=pool, **options)


def test_the_database_ends_with_the_playoffs_numbers(
    builder: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    database, mod = database_of({GOOD: [2e-9], BETTER: [1e-9, 3e-9]})
    journal = Journal(tmp_path / "journal.jsonl")
    report = play(database, mod, builder, pool, journal=journal, task_name="matmul")
    winner = report.winner
    assert [finalist.disqualified for finalist in report.finalists] == ["", ""]
    assert [finalist.unchecked for finalist in report.finalists] == ["", ""]
    assert winner.playoff_sec > 1e-7  # 32^3 multiplications can't be done in 2 ns
    assert winner.stderr_sec >= 0.0
    final = final_database(tmp_path, "structural", [report])
    reopened = ms.database.JSONDatabase(work_dir=str(tmp_path / "final"))
    for each in (final, reopened):
        assert len(each) == 1
        found = each.query_tuning_record(mod, LLVM, "main")
        assert [float(s) for s in found.run_secs] == pytest.approx([winner.playoff_sec])
        assert each.query_schedule(mod, LLVM, "main") is not None
    assert len(final_database(tmp_path, "structural", [report, report])) == 2
    event = read_journal(tmp_path / "journal.jsonl")[-1]
    assert (event["event"], event["task"], event["winner"]) == ("playoff", "matmul", 0)
    assert event["candidates"][0]["recorded_ms"] == pytest.approx(2e-6)
    assert event["candidates"][0]["playoff_ms"] == pytest.approx(winner.playoff_sec * 1e3)
    assert event["disqualified"] == []
    assert event["seconds"] > 0


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (WRONG, "wrong result: buffer 2: .* values are wrong"),
        (CRASHING, "crash: the worker process ended: killed by SIGSEGV"),
        (HANGING, "hang: timeout: killed after 2 s"),
        (UNBUILDABLE, "build: .*no registers left"),
    ],
)
def test_a_bad_finalist_never_wins(
    rows: int, reason: str, builder: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    database, mod = database_of({rows: [1e-9], GOOD: [2e-9], BETTER: [3e-9]})
    journal = Journal(tmp_path / "journal.jsonl")
    report = play(database, mod, builder, pool, journal=journal, timeout_sec=2.0)
    assert report.winner.recorded_sec in (2e-9, 3e-9)
    *good, bad = report.finalists
    assert bad.recorded_sec == 1e-9
    assert math.isnan(bad.playoff_sec)
    assert [finalist.disqualified for finalist in good] == ["", ""]
    assert not math.isnan(good[1].playoff_sec)
    with pytest.raises(AssertionError, match=f"(?s){reason}"):
        raise AssertionError(bad.disqualified)
    event = read_journal(tmp_path / "journal.jsonl")[-1]
    assert event["disqualified"] == [bad.disqualified]
    final = final_database(tmp_path, "structural", [report])
    (kept,) = final.get_all_tuning_records()
    assert float(kept.run_secs[0]) == pytest.approx(report.winner.playoff_sec)


def test_the_next_best_get_their_turn(builder: Any, pool: WorkerPool, tmp_path: Path) -> None:
    database, mod = database_of({WRONG: [1e-9], GOOD: [2e-9], BETTER: [3e-9]})
    report = play(database, mod, builder, pool, top_k=1)
    assert report.winner.recorded_sec == 2e-9
    assert len(report.finalists) == 2
    database, mod = database_of({WRONG: [1e-9]})
    report = play(database, mod, builder, pool)
    assert report.winner is None
    assert len(final_database(tmp_path, "structural", [report])) == 0


@pytest.mark.parametrize("bad", [[1e10], [float("nan")], [1e10, 1e10], [float("inf")], [0.0]])
def test_failed_records_are_no_finalists(bad: list[float], builder: Any, pool: Any) -> None:
    database, mod = database_of({WRONG: bad})
    report = play(database, mod, builder, pool)
    assert (report.finalists, report.winner, report.reason) == ((), None, "no-record")


def test_an_unknown_task_and_another_target_have_no_record(builder: Any, pool: Any) -> None:
    database, mod = database_of({GOOD: [1e-3]})
    assert play(database, matmul(8), builder, pool).reason == "no-record"
    assert len(database) == 1
    report = play_off(database, mod, Target("c"), builder=builder, pool=pool)
    assert report.reason == "no-record"


def test_the_same_schedule_plays_once(builder: Any, pool: WorkerPool) -> None:
    database, mod = database_of({GOOD: [2e-9]})
    workload = database.commit_workload(mod)
    database.commit_tuning_record(record(workload, GOOD, [1e-9]))
    report = play(database, mod, builder, pool)
    assert report.winner.recorded_sec == 1e-9
    assert report.finalists[1].disqualified == "the same schedule as a better record"


def test_a_builder_that_is_broken_keeps_what_was_recorded(pool: WorkerPool, tmp_path: Path) -> None:
    database, mod = database_of({GOOD: [2e-3], BETTER: [1e-3]})
    builder = PersistentBuilder(max_workers=1)
    builder.close()
    report = play(database, mod, builder, pool)
    assert (report.reason, report.winner.recorded_sec) == ("error", 1e-3)
    assert "no reference" in report.winner.unchecked
    (kept,) = final_database(tmp_path, "structural", [report]).get_all_tuning_records()
    assert float(kept.run_secs[0]) == pytest.approx(1e-3)
    journal = Journal(tmp_path / "journal.jsonl")
    report = play(database, mod, None, pool, journal=journal)
    assert (report.reason, report.winner.recorded_sec) == ("error", 1e-3)


def test_artifacts_are_removed(pool: WorkerPool, tmp_path: Path) -> None:
    database, mod = database_of({GOOD: [1e-9]})
    builder = PersistentBuilder(max_workers=1, artifact_dir=tmp_path)
    report = play(database, mod, builder, pool)
    builder.close()
    assert report.winner is not None
    assert list(tmp_path.iterdir()) == []


def test_prepacked_weights_are_checked_in_their_plain_layout(
    builder: Any, pool: WorkerPool
) -> None:
    mod = matmul()
    mod = tvm.IRModule({"main": mod["main"].with_attr("layout_free_buffers", [1])})
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(mod)
    schedule = Schedule(mod)
    block = schedule.get_sblock("C")
    packed = schedule.cache_read(block, 1, "global")
    schedule.transform_layout(
        block, ("read", 1), lambda k, j: [j // 8, k, j % 8], assume_injective_transform=True
    )
    schedule.annotate(packed, "meta_schedule.layout_rewrite_preproc", True)
    assert with_plain_weights(schedule.mod) is not schedule.mod
    info = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    assert [int(n) for n in info[1].shape] == [4, SIZE, 8]
    database.commit_tuning_record(TuningRecord(schedule.trace, workload, [1e-9], LLVM, info))
    report = play(database, mod, builder, pool)
    (finalist,) = report.finalists
    assert (finalist.disqualified, finalist.unchecked) == ("", "")
    assert finalist.playoff_sec > 0


def test_without_a_playoff_the_best_record_stands() -> None:
    database, mod = database_of({GOOD: [2e-3], BETTER: [1e-3], WRONG: [1e10]})
    report = best_as_recorded(database, mod, LLVM, "matmul")
    assert (report.reason, report.winner.final_sec()) == ("not-held", 1e-3)
    assert best_as_recorded(database, matmul(8), LLVM).reason == "no-record"


def test_reduction_length_is_the_longest_sum() -> None:
    assert reduction_length(matmul(24)) == 24
    assert reduction_length(idle()) == 1
    plain = matmul()
    assert with_plain_weights(plain) is plain


def loops(database: Any, mod: Any, recorded: dict[tuple[int, str], float]) -> None:
    """Record schedules of a matmul by their rows and their innermost loop."""
    workload = database.commit_workload(mod)
    for (rows, innermost), seconds in recorded.items():
        schedule = Schedule(mod)
        i, j, k = schedule.get_loops(schedule.get_sblock("C"))
        outer, inner = schedule.split(i, factors=[None, rows])
        if innermost == "j":  # contiguous, and in vectors
            schedule.reorder(outer, inner, k, j)
            schedule.vectorize(j)
        info = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        database.commit_tuning_record(TuningRecord(schedule.trace, workload, [seconds], LLVM, info))


def test_who_was_lucky_does_not_keep_the_fast_one_out(builder: Any, pool: WorkerPool) -> None:
    mod, database = matmul(128), ms.database.MemoryDatabase()
    slow = {(rows, "k"): rows * 1e-10 + 1e-8 for rows in (1, 2, 4, 8)}
    loops(database, mod, {**slow, (4, "j"): 1.2e-8, (16, "k"): 3e-8})
    lucky = play(database, mod, builder, pool, top_k=2)
    assert lucky.winner.recorded_sec < 1.2e-8
    fair = play(database, mod, builder, pool, top_k=2, n_qualifiers=6)
    assert fair.winner.recorded_sec == pytest.approx(1.2e-8)
    assert fair.winner.playoff_sec < 0.7 * lucky.winner.playoff_sec
    assert len(fair.finalists) == 2, "the others are out before they are checked"
    in_no_time = play(database, mod, builder, pool, top_k=2, n_qualifiers=6, qualifying_sec=0.0)
    assert in_no_time.winner.recorded_sec < 1.2e-8


def test_what_fails_while_qualifying_is_told_and_never_wins(builder: Any, pool: WorkerPool) -> None:
    times = {UNBUILDABLE: 1.0, CRASHING: 1.1, WRONG: 1.2, GOOD: 1.3, BETTER: 1.4}
    database, mod = database_of({rows: [1e-8 * factor] for rows, factor in times.items()})
    workload = database.commit_workload(mod)
    database.commit_tuning_record(record(workload, GOOD, [1.35e-8]))
    report = play(database, mod, builder, pool, top_k=1, n_qualifiers=6, qualifying_sec=30.0)
    assert report.winner.recorded_sec in (1.3e-8, 1.4e-8)
    told = " ".join(each.disqualified for each in report.finalists)
    assert "no registers left" in told
    assert "crash" in told
    assert "the same schedule" not in told


def test_top_k_is_checked(builder: Any) -> None:
    database, mod = database_of({})
    with pytest.raises(InvalidOptionError, match="top_k must be at least 1 but got 0"):
        play_off(database, mod, LLVM, builder=builder, top_k=0)
