from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.database import TuningRecord
from tvm.s_tir.meta_schedule.runner import RPCConfig
from tvm.target import Target

from tests.journals import MemoryJournal
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.builder.compile import build_candidate
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    InvalidOptionError,
    MachineError,
    NoDeviceError,
    OutOfTimeError,
    WorkerDiedError,
    WorkerTaskError,
)
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.playoff import playoff, verifier, worker
from tvm_adaptive.runner.playoff.finalist import NOT_CHECKED, Finalist, PlayoffOptions
from tvm_adaptive.runner.playoff.modules import (
    longest_sums,
    sane_records,
    with_plain_weights,
)
from tvm_adaptive.runner.playoff.playoff import (
    FinalistReport,
    final_database,
    finalist_pool,
    play_off,
    without_playoff,
)
from tvm_adaptive.runner.rpc.lease import release
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.workers import pool as pools
from tvm_adaptive.workers.pool import Outcome, WorkerPool

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
    server = pools.ForkServer(("tvm_adaptive.runner.playoff.worker",))
    pool = finalist_pool(server=server)
    yield pool
    pool.close()


def play(
    database: Any, mod: Any, builder: Any, pool: WorkerPool, *, journal: Any = None, **options: Any
) -> Any:
    options = {"timeout_sec": 20.0, "max_sec": 1.0, "repeat_ms": 1.0, **options}
    records = sane_records(database, mod, LLVM)
    return play_off(
        records,
        LLVM,
        PlayoffOptions(**options),
        builder=builder,
        pool=pool,
        journal=journal,
        task_name="matmul",
    )


def test_a_full_disk_costs_a_task_its_play_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr("tvm_adaptive.runner.playoff.playoff.Verifier", fail)
    database, mod = database_of({GOOD: [2e-9]})
    nothing: Any = None
    journal = MemoryJournal()
    report = play(database, mod, nothing, nothing, journal=journal)
    assert (report.reason, report.winner) == ("error", None)
    assert "no space is left" in report.unchecked
    (event,) = journal.of("error")
    assert "no space is left" in event["message"]


@pytest.mark.slow
def test_the_database_ends_with_the_playoffs_numbers(
    builder: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    database, mod = database_of({GOOD: [2e-9], BETTER: [1e-9, 3e-9]})
    journal = Journal(tmp_path / "journal.jsonl")
    report = play(database, mod, builder, pool, journal=journal)
    winner = report.winner
    assert [finalist.disqualified for finalist in report.finalists] == ["", ""]
    assert [finalist.unchecked for finalist in report.finalists] == ["", ""]
    assert winner.playoff_sec > 1e-7  # 32^3 multiplications can't be done in 2 ns
    assert winner.stderr_sec >= 0.0
    final = final_database(tmp_path, [report])
    reopened = ms.database.JSONDatabase(work_dir=str(tmp_path / "final"))
    for each in (final, reopened):
        assert len(each) == 1
        found = each.query_tuning_record(mod, LLVM, "main")
        assert [float(s) for s in found.run_secs] == pytest.approx([winner.playoff_sec])
        assert each.query_schedule(mod, LLVM, "main") is not None
    assert len(final_database(tmp_path, [report, report])) == 2
    event = read_journal(tmp_path / "journal.jsonl")[-1]
    assert (event["event"], event["task"], event["winner"]) == ("playoff", "matmul", 0)
    assert event["candidates"][0]["recorded_ms"] == pytest.approx(2e-6)
    assert event["candidates"][0]["playoff_ms"] == pytest.approx(winner.playoff_sec * 1e3)
    assert event["disqualified"] == []
    assert event["seconds"] > 0


@contextlib.contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_full_disk_leaves_the_former_database_of_winners(tmp_path: Path, share: float) -> None:
    database, mod = database_of({GOOD: [2e-9], BETTER: [1e-9]})
    records = sane_records(database, mod, LLVM)
    better, good = (
        FinalistReport("matmul", (Finalist(each, 1e-9, 1e-9, unchecked=""),), "won", 1.0)
        for each in records
    )
    final_database(tmp_path, [good])
    before = contents(tmp_path / "final")
    n_bytes = int(share * max(map(len, before.values())))
    with (
        files_up_to(n_bytes),
        pytest.raises(MachineError, match=r"/final cannot be written: \S"),
    ):
        final_database(tmp_path, [better, good])
    assert contents(tmp_path / "final") == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert len(final_database(tmp_path, [better, good])) == 2


def test_a_disk_without_room_for_a_folder_leaves_the_former_database_of_winners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    final_database(tmp_path, [])
    before = contents(tmp_path / "final")
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(MachineError, match="no space is left"):
        final_database(tmp_path, [])
    assert contents(tmp_path / "final") == before


def reports_of(*rows: int) -> list[FinalistReport]:
    """Return the report of a winner for each number of rows."""
    database, mod = database_of({each: [1e-9 * each] for each in rows})
    return [
        FinalistReport("matmul", (Finalist(each, 1e-9, 1e-9, unchecked=""),), "won", 1.0)
        for each in sane_records(database, mod, LLVM)
    ]


def test_files_of_others_beside_the_winners_stay(tmp_path: Path) -> None:
    good, better = reports_of(GOOD, BETTER)
    assert len(final_database(tmp_path, [good])) == 1
    mine = [tmp_path / name / "mine.pt" for name in ("final", "final.new")]
    for each in mine:
        each.parent.mkdir(exist_ok=True)
        each.write_text("weights")
    assert len(final_database(tmp_path, [good, better])) == 2
    assert set(contents(tmp_path / "final")) == {WORKLOAD_FILE, RECORD_FILE, "mine.pt"}
    assert set(contents(tmp_path / "final.new")) == {"mine.pt"}
    assert {each.read_text() for each in mine} == {"weights"}


def test_a_kill_while_the_winners_are_replaced_leaves_a_database_that_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, better = reports_of(GOOD, BETTER)
    final_database(tmp_path, [good])
    replace = os.replace

    def replace_until_killed(source: Path, target: Path) -> None:
        if target.name == RECORD_FILE:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_until_killed)
        patch.setattr(playoff, "_remove_database", lambda _folder: None)
        with pytest.raises(KeyboardInterrupt):
            final_database(tmp_path, [good, better])
    assert set(contents(tmp_path / "final.new")) == {RECORD_FILE}
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path / "final"))) == 0
    assert len(final_database(tmp_path, [good, better])) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (WRONG, "wrong result: buffer 2: .* values are wrong"),
        (CRASHING, "crash: the worker process ended: killed by SIGSEGV"),
        (HANGING, "hang: timeout: killed after 1 s"),
        (UNBUILDABLE, "build: .*no registers left"),
    ],
)
def test_a_bad_finalist_never_wins(
    rows: int, reason: str, builder: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    database, mod = database_of({rows: [1e-9], GOOD: [2e-9], BETTER: [3e-9]})
    journal = Journal(tmp_path / "journal.jsonl")
    report = play(database, mod, builder, pool, journal=journal, timeout_sec=1.0)
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
    final = final_database(tmp_path, [report])
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
    assert len(final_database(tmp_path, [report])) == 0


@pytest.mark.parametrize("bad", [[1e10], [float("nan")], [1e10, 1e10], [float("inf")], [0.0]])
def test_failed_records_are_no_finalists(bad: list[float], builder: Any, pool: Any) -> None:
    database, mod = database_of({WRONG: bad})
    report = play(database, mod, builder, pool)
    assert (report.finalists, report.winner, report.reason) == ((), None, "no-record")


def test_an_unknown_task_and_another_target_have_no_record(builder: Any, pool: Any) -> None:
    database, mod = database_of({GOOD: [1e-3]})
    assert play(database, matmul(8), builder, pool).reason == "no-record"
    assert len(database) == 1
    assert sane_records(database, mod, Target("c")) == []


def test_the_same_schedule_plays_once(builder: Any, pool: WorkerPool) -> None:
    database, mod = database_of({GOOD: [2e-9]})
    workload = database.commit_workload(mod)
    database.commit_tuning_record(record(workload, GOOD, [1e-9]))
    report = play(database, mod, builder, pool)
    assert report.winner.recorded_sec == 1e-9
    assert report.finalists[1].disqualified == "the same schedule as a better record"


def test_a_builder_that_is_broken_lets_nothing_win(pool: WorkerPool, tmp_path: Path) -> None:
    database, mod = database_of({GOOD: [2e-3], BETTER: [1e-3]})
    builder = PersistentBuilder(max_workers=1)
    builder.close()
    report = play(database, mod, builder, pool)
    assert (report.reason, report.winner) == ("no-reference", None)
    assert "no reference" in report.unchecked
    assert len(final_database(tmp_path, [report])) == 0
    report = play(database, mod, None, pool, journal=Journal(tmp_path / "journal.jsonl"))
    assert (report.reason, report.winner) == ("no-reference", None)


def test_without_a_reference_nothing_wins(builder: Any, pool: WorkerPool) -> None:
    """A function that takes longer than its deadline leaves nothing to compare with."""
    database, _ = database_of({})
    mod = long_loop()
    workload = database.commit_workload(mod)
    schedule = Schedule(mod)
    info = ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    slow = TuningRecord(schedule.trace, workload, [1e-9], LLVM, info)
    options = PlayoffOptions(reference_timeout_sec=1.0)
    report = play_off([slow], LLVM, options, builder=builder, pool=pool)
    assert (report.reason, report.winner) == ("no-reference", None)
    assert "killed after 1 s" in report.unchecked
    assert len(report.finalists) == 1


def test_the_reference_has_a_deadline_of_its_own(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: dict[str, float] = {}

    def note(function: Any, tasks: Any, timeout_sec: float) -> Any:
        deadlines.setdefault(function.__name__, timeout_sec)
        return carry_out(function, tasks, timeout_sec)

    carry_out = pool.map
    monkeypatch.setattr(pool, "map", note)
    database, mod = database_of({GOOD: [1e-3]})
    play(database, mod, builder, pool, timeout_sec=20.0, reference_timeout_sec=90.0)
    assert deadlines == {"run_reference": 90.0, "check": 20.0, "time_once": 20.0}


def test_who_cannot_be_checked_does_not_win(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that is timed was built, the one that is checked was not."""

    def with_something_else(mod: Any) -> Any:
        if f"T.grid({SIZE // GOOD}, {GOOD}, " in mod.script():
            return scheduled_as(mod, UNBUILDABLE)
        return mod

    monkeypatch.setattr(verifier, "with_plain_weights", with_something_else)
    database, mod = database_of({GOOD: [1e-9], BETTER: [2e-9]})
    report = play(database, mod, builder, pool)
    assert report.winner is not None
    assert report.winner.recorded_sec == 2e-9
    (other,) = [each for each in report.finalists if each is not report.winner]
    assert "no registers left" in other.unchecked
    assert math.isnan(other.playoff_sec)
    database, mod = database_of({GOOD: [1e-9]})
    assert play(database, mod, builder, pool).winner is None


def scheduled_as(mod: Any, rows: int) -> tvm.IRModule:
    schedule = Schedule(matmul())
    i, _, _ = schedule.get_loops(schedule.get_sblock("C"))
    schedule.split(i, factors=[None, rows])
    return schedule.mod


def test_artifacts_are_removed(pool: WorkerPool, tmp_path: Path) -> None:
    database, mod = database_of({GOOD: [1e-9]})
    builder = PersistentBuilder(max_workers=1, artifact_dir=tmp_path)
    report = play(database, mod, builder, pool)
    builder.close()
    assert report.winner is not None
    assert list(tmp_path.iterdir()) == []


def test_artifacts_are_removed_if_time_ends_while_others_are_built(
    pool: WorkerPool, tmp_path: Path
) -> None:
    database, mod = database_of({GOOD: [1e-9], BETTER: [2e-9]})
    left_sec = iter([60.0, 60.0, 0.0])  # of the reference and of two records
    builder = PersistentBuilder(max_workers=1, artifact_dir=tmp_path, time_left=left_sec.__next__)
    report = play(database, mod, builder, pool)
    builder.close()
    assert report.reason == "no-time"
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


def test_without_a_playoff_only_what_was_proven_before_stands() -> None:
    database, mod = database_of({GOOD: [2e-3], BETTER: [1e-3], WRONG: [1e10]})
    records = sane_records(database, mod, LLVM)
    report = without_playoff(records, None, "matmul")
    assert (report.reason, report.winner, report.unchecked) == ("not-held", None, "no play-off")
    assert report.finalists[0].final_sec() == 1e-3
    proven = Finalist(records[1], 3e-3, 3e-3, unchecked="")
    assert without_playoff(records, proven).winner is proven
    assert without_playoff([], None).reason == "no-record"


def test_nothing_is_sound_before_it_was_checked() -> None:
    database, mod = database_of({GOOD: [2e-3]})
    (record_of_it,) = sane_records(database, mod, LLVM)
    assert not Finalist(record_of_it, 2e-3, 1e-3).is_sound


def test_the_longest_sum_counts() -> None:
    assert longest_sums(matmul(24))["float32"] == 24
    assert set(longest_sums(idle()).values()) <= {1}
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


def test_what_fails_while_qualifying_is_reported_and_never_wins(
    builder: Any, pool: WorkerPool
) -> None:
    times = {UNBUILDABLE: 1.0, CRASHING: 1.1, WRONG: 1.2, GOOD: 1.3, BETTER: 1.4}
    database, mod = database_of({rows: [1e-8 * factor] for rows, factor in times.items()})
    workload = database.commit_workload(mod)
    database.commit_tuning_record(record(workload, GOOD, [1.35e-8]))
    report = play(database, mod, builder, pool, top_k=1, n_qualifiers=6, qualifying_sec=30.0)
    assert report.winner.recorded_sec in (1.3e-8, 1.4e-8)
    reported = " ".join(each.disqualified for each in report.finalists)
    assert "no registers left" in reported
    assert "crash" in reported
    assert "the same schedule" not in reported


def counted(offset: Any = lambda i, j: 0) -> tvm.IRModule:
    """Return a product whose sums are rounded to integers."""
    n = SIZE
    a = te.placeholder((n, n), name="A")
    b = te.placeholder((n, n), name="B")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    d = te.compute((n, n), lambda i, j: (c[i, j] * 64).astype("int32") + offset(i, j), name="D")
    function = te.create_prim_func([a, b, d]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def reordered(mod: tvm.IRModule) -> Schedule:
    """Return a schedule whose sums have another order."""
    schedule = Schedule(mod)
    block = schedule.get_sblock("C")
    *_, k = schedule.get_loops(block)
    _, inner = schedule.split(k, factors=[None, 4])
    schedule.rfactor(inner, factor_axis=0)
    return schedule


def play_reordered(pool: WorkerPool, n_wrong: int) -> Any:
    """Play off a schedule of rounded sums in another order; so many results are off by one."""

    def build(mod: Any, target: Any, params: Any) -> Any:
        if n_wrong and "rf" in mod.script():
            mod = counted(lambda i, j: te.if_then_else(te.all(i == 3, j < n_wrong), 1, 0))
        return build_candidate(mod, target, params)

    mod = counted()
    workload = ms.database.MemoryDatabase().commit_workload(mod)
    info = ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    other = TuningRecord(reordered(mod).trace, workload, [1e-9], LLVM, info)
    with contextlib.closing(PersistentBuilder(max_workers=1, build_function=build)) as builder:
        options = PlayoffOptions(max_sec=0.2, repeat_ms=1.0)
        return play_off([other], LLVM, options, builder=builder, pool=pool)


@pytest.mark.parametrize("n_wrong", [0, 4])
def test_integers_that_are_made_of_sums_are_looked_at_one_by_one(
    n_wrong: int, pool: WorkerPool
) -> None:
    """A few of a thousand that are off by one are no rounding, unless they are near an edge."""
    report = play_reordered(pool, n_wrong)
    (finalist,) = report.finalists
    if n_wrong:
        assert report.winner is None
        assert f"{n_wrong} of 1024 values are wrong" in finalist.disqualified
    else:
        assert report.winner is finalist, finalist.disqualified


def test_integers_without_neighbours_are_not_called_wrong(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The untuned function of the neighbours is too slow: that is not the finalist's fault."""

    def fail(*_task: Any) -> None:
        raise RuntimeError("too slow")

    monkeypatch.setattr(verifier, "run_neighbours", fail)
    report = play_reordered(pool, 4)
    (finalist,) = report.finalists
    assert (report.winner, finalist.disqualified) == (None, "")
    assert "what it rounds could not be compared" in finalist.unchecked


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_device_that_is_lost_costs_no_winner(
    is_checked: bool, builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, mod = database_of({GOOD: [1e-9], BETTER: [2e-9]})

    def lose(*_args: Any) -> None:
        raise NoDeviceError("the farm has gone")

    where, name = (playoff, "_time") if is_checked else (verifier.Verifier, "check")
    monkeypatch.setattr(where, name, lose)
    report = play(database, mod, builder, pool)
    assert report.reason == "error"
    if is_checked:
        assert report.winner is not None
        assert report.winner.recorded_sec == 1e-9
    else:
        assert report.winner is None
        assert "the farm has gone" in report.unchecked


class SlowLink(LeasingPool):
    """Takes fifty seconds for each task."""

    limits_sec: ClassVar[list[float]] = []

    def map(self, function: Any, tasks: Any, timeout_sec: float) -> list[Outcome]:
        self.limits_sec.append(timeout_sec)
        return [Outcome(worker.KernelCheck(), elapsed_sec=50.0) for _ in tasks]


def test_a_check_over_a_slow_link_may_take_as_long_as_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = worker.Kernel("kernel.tar", "cpu", (("float32", (1,)),))
    monkeypatch.setattr(verifier.Verifier, "_kernels", lambda _, mods: [(kernel, "")] * len(mods))
    pool = SlowLink(RPCConfig("nowhere", 1, "board", 1, 5))
    nothing: Any = None
    options = PlayoffOptions(timeout_sec=20.0)
    database, mod = database_of({GOOD: [1e-9]})
    (found,) = sane_records(database, mod, LLVM)
    entry = verifier.Entry(Finalist(found, 1e-9), found.workload.mod, kernel, kernel)
    with contextlib.closing(verifier.Verifier(LLVM, nothing, pool, options)) as checks:
        assert checks.prepare_reference(mod) == ""
        checks.check([entry])
    assert pool.limits_sec == [120.0, 100.0]
    assert entry.is_checked


def test_one_interrupted_run_does_not_choose_the_number_of_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secs = iter([10e-3, 50e-6, 50e-6, 50e-6])
    numbers: list[int] = []

    def timer(number: int, _repeat: int) -> list[float]:
        numbers.append(number)
        return [next(secs)]

    kernel = worker.Kernel("kernel.so", "cpu", ())
    loaded = worker._Loaded(None, None, [], timer)
    monkeypatch.setitem(worker._loaded, kernel, loaded)
    assert worker.time_once(kernel, 0, 20.0) == 50e-6
    assert worker.time_once(kernel, 0, 20.0) == 50e-6
    assert numbers == [1, 2, 400, 400]


def test_a_kernel_of_seconds_is_timed_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def timer(number: int, _repeat: int) -> list[float]:
        numbers.append(number)
        return [8.0]

    kernel = worker.Kernel("kernel.so", "cpu", ())
    monkeypatch.setitem(worker._loaded, kernel, worker._Loaded(None, None, [], timer))
    assert worker.time_once(kernel, 0, 20.0) == worker.time_once(kernel, 0, 20.0) == 8.0
    assert numbers == [1, 1]


def test_a_schedule_without_any_time_can_win(builder: Any, pool: WorkerPool) -> None:
    workload = ms.database.MemoryDatabase().commit_workload(matmul())
    drafted = [record(workload, GOOD, [])]
    options = PlayoffOptions(timeout_sec=20.0, max_sec=1.0, repeat_ms=1.0)
    report = play_off(drafted, LLVM, options, builder=builder, pool=pool)
    assert report.winner is not None
    assert 0.0 < report.winner.final_sec() < 1.0


def test_a_draft_that_there_was_no_time_to_time_can_be_deployed(
    builder: Any, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = ms.database.MemoryDatabase().commit_workload(matmul())
    drafted = [record(workload, GOOD, [])]

    def time_ends(*_: Any) -> Any:
        raise OutOfTimeError(OUT_OF_TIME)

    monkeypatch.setattr(playoff, "_time", time_ends)
    options = PlayoffOptions(timeout_sec=20.0)
    report = play_off(drafted, LLVM, options, builder=builder, pool=pool)
    assert report.winner is not None
    assert report.winner.is_draft
    assert math.isfinite(report.winner.final_sec())
    assert len(final_database(tmp_path, [report])) == 1


class WithoutMemory:
    """A builder that has memory for the reference alone."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.n_batches = 0

    def build(self, inputs: Any) -> Any:
        self.n_batches += 1
        if self.n_batches == 1:
            return self.inner.build(inputs)
        message = "machine: PersistentBuilder: MemoryError"
        return [ms.builder.BuilderResult(None, message) for _ in inputs]


def test_a_lack_of_memory_while_finalists_are_built_is_not_their_fault(
    builder: Any, pool: WorkerPool
) -> None:
    database, mod = database_of({GOOD: [2e-9], BETTER: [1e-9]})
    report = play(database, mod, WithoutMemory(builder), pool)
    assert (report.reason, report.winner) == ("error", None)
    assert not any(finalist.disqualified for finalist in report.finalists)


class Answers:
    """A pool that gives answers in turn: values and errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def map(self, *_call: Any) -> list[Outcome]:
        answer = self.answers.pop(0)
        is_error = isinstance(answer, Exception)
        return [Outcome(error=answer) if is_error else Outcome(answer)]


NO_MEMORY = MachineError("no memory is left")
DIED = WorkerDiedError("killed by SIGSEGV")


@pytest.mark.parametrize(
    ("answers", "n_left", "disqualified"),
    [
        ([NO_MEMORY, 1e-3], 0, ""),  # another program's peak is over
        ([NO_MEMORY, NO_MEMORY, 1e-3], 1, ""),
        ([NO_MEMORY, DIED, 1e-3], 1, "crash: killed by SIGSEGV"),
        ([DIED, 1e-3], 1, "crash: killed by SIGSEGV"),
    ],
)
def test_a_failure_of_the_machine_is_tried_again_and_is_no_finalists_fault(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], n_left: int, disqualified: str
) -> None:
    monkeypatch.setattr(verifier, "_RETRY_PAUSE_SEC", 0.0)
    nothing: Any = None
    pool: Any = Answers(*answers)
    finalist = Finalist(nothing, 2e-3)
    entry = verifier.Entry(finalist, timed=worker.Kernel("kernel.so", "cpu", ()))
    with contextlib.closing(verifier.Verifier(LLVM, nothing, pool, PlayoffOptions())) as checker:
        time_it = checker.timer([entry])
        if NO_MEMORY in answers[1:]:
            with pytest.raises(MachineError):
                time_it(0)
        else:
            assert math.isnan(time_it(0)) == bool(disqualified)
    assert len(pool.answers) == n_left
    assert finalist.disqualified == disqualified


class Boards(LeasingPool):
    """A farm of two devices that gives answers in turn, the first as long as it is not unfit."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(RPCConfig("nowhere", 1, "board", 1, 5))
        self.answers = list(answers)
        self._present = ("farm:1", "farm:2")

    def map(self, function: Any, tasks: Any, timeout_sec: float) -> list[Outcome]:
        if function is release:
            return [Outcome()]
        self.address = "farm:2" if "farm:1" in self._unfit else "farm:1"
        answer = self.answers.pop(0)
        is_error = isinstance(answer, Exception)
        return [Outcome(error=answer) if is_error else Outcome(answer)]


AGREES, DIFFERS = worker.KernelCheck(), worker.KernelCheck("it differs")
NO_LINKER = WorkerTaskError("no linker")


@pytest.mark.parametrize("answer", [DIFFERS, NO_LINKER])
@pytest.mark.parametrize("control", [AGREES, DIFFERS, NO_LINKER])
@pytest.mark.parametrize("stage", ["check", "timing"])
def test_on_a_farm_only_a_sound_device_refutes_a_kernel(
    stage: str, control: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    kernel = worker.Kernel("kernel.tar", "cpu", ())
    finalist = Finalist(nothing, 2e-3, unchecked="" if stage == "timing" else NOT_CHECKED)
    entry = verifier.Entry(finalist, timed=kernel, plain=kernel)
    pool = Boards(answer if stage == "check" else NO_LINKER, control)
    monkeypatch.setattr(verifier.Verifier, "_build_plain", lambda *_: None)
    with contextlib.closing(verifier.Verifier(LLVM, nothing, pool, PlayoffOptions())) as checks:
        checks._untuned = kernel

        def judge() -> None:
            if stage == "check":
                checks.check([entry])
            else:
                checks.timer([entry])(0)

        if control is AGREES:
            judge()
            assert finalist.is_refuted
            assert not pool._unfit
        else:
            with pytest.raises(MachineError, match="farm:1 does not repeat the results"):
                judge()
            assert finalist.disqualified == ""
            assert not finalist.is_sound
            assert pool._unfit == {"farm:1"}
    assert pool.answers == []


class Shared(Boards):
    """A farm whose devices others use, too: each answer is of the device that it gives next."""

    def __init__(self, devices: str, *answers: Any) -> None:
        super().__init__(*answers)
        self.devices = [f"farm:{number}" for number in devices]

    def map(self, function: Any, tasks: Any, timeout_sec: float) -> list[Outcome]:
        outcomes = super().map(function, tasks, timeout_sec)
        if function is not release:
            self.address = self.devices.pop(0)
        return outcomes


@pytest.mark.parametrize("stage", ["check", "timing"])
@pytest.mark.parametrize(
    ("devices", "again", "is_refuted"),
    [
        ("122", NO_LINKER, True),
        ("122", DIED, True),  # without a second try, which another device would get
        ("122", AGREES, False),  # the first device may be at fault
        ("121", NO_LINKER, False),  # which fails again
    ],
)
def test_a_device_refutes_no_kernel_that_failed_on_another_one(
    stage: str, devices: str, again: Any, is_refuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    kernel = worker.Kernel("kernel.tar", "cpu", ())
    finalist = Finalist(nothing, 2e-3)
    entry = verifier.Entry(finalist, timed=kernel, plain=kernel)
    pool = Shared(devices, NO_LINKER, AGREES, again)
    monkeypatch.setattr(verifier.Verifier, "_build_plain", lambda *_: None)
    with contextlib.closing(verifier.Verifier(LLVM, nothing, pool, PlayoffOptions())) as checks:
        checks._untuned = kernel
        judging: Any = contextlib.nullcontext() if is_refuted else pytest.raises(MachineError)
        with judging:
            if stage == "check":
                checks.check([entry])
            else:
                checks.timer([entry])(0)
    assert finalist.is_refuted == is_refuted
    assert not finalist.is_sound
    assert pool.answers == []


def test_devices_without_disk_space_leave_a_task_to_be_played_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier, "_RETRY_PAUSE_SEC", 0.0)
    kernel = worker.Kernel("kernel.tar", "cpu", (("float32", (1,)),))
    monkeypatch.setattr(verifier.Verifier, "_kernels", lambda _, mods: [(kernel, "")] * len(mods))
    full = MachineError("No space left on device")
    database, mod = database_of({GOOD: [1e-9]})
    nothing: Any = None
    report = play(database, mod, nothing, Boards(full, full))
    assert (report.reason, report.winner) == ("error", None)


@pytest.mark.parametrize("second", [None, NO_LINKER])
def test_a_device_that_cannot_run_untuned_functions_is_passed_over_if_another_can(
    second: Any,
) -> None:
    nothing: Any = None
    kernel = worker.Kernel("kernel.tar", "cpu", ())
    pool = Boards(NO_LINKER, second)
    with contextlib.closing(verifier.Verifier(LLVM, nothing, pool, PlayoffOptions())) as checks:
        assert checks._run_untuned(kernel).error is second
    assert pool.address == "farm:2"
    assert pool._unfit == (set() if second else {"farm:1"})


def test_top_k_is_checked() -> None:
    with pytest.raises(InvalidOptionError, match="top_k must be at least 1 but got 0"):
        PlayoffOptions(top_k=0)


@pytest.mark.slow
def test_a_reference_that_outlasts_the_time_leaves_the_task_without_a_winner(
    builder: Any, pool: WorkerPool
) -> None:
    mod = long_loop()
    database = ms.database.MemoryDatabase()
    database.commit_tuning_record(record(database.commit_workload(mod), GOOD, [1e-9]))
    report = play(database, mod, builder, pool, timeout_sec=1000.0, limit_sec=5.0)
    assert (report.reason, report.winner, report.unchecked) == ("no-time", None, OUT_OF_TIME)


def test_without_time_nothing_is_begun(builder: Any, pool: WorkerPool) -> None:
    database, mod = database_of({GOOD: [2e-9]})
    report = play(database, mod, builder, pool, limit_sec=0.0)
    assert (report.reason, report.winner, report.unchecked) == ("no-time", None, OUT_OF_TIME)


@pytest.mark.parametrize("is_cut", ["checking", "timing"])
def test_who_was_checked_when_the_time_was_over_wins(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, is_cut: str
) -> None:
    """The faster record is looked at first; the other one hangs, or is not timed any more."""
    times = {GOOD: [1e-9], HANGING: [2e-9]} if is_cut == "checking" else {GOOD: [1e-9]}
    database, mod = database_of(times)
    if is_cut == "timing":

        def late(*_args: Any) -> None:
            raise OutOfTimeError(OUT_OF_TIME)

        monkeypatch.setattr(playoff, "_time", late)
    report = play(database, mod, builder, pool, timeout_sec=1000.0, limit_sec=5.0)
    assert report.reason == "no-time"
    (winner,) = report.finalists
    assert report.winner is winner
    assert (winner.recorded_sec, winner.unchecked, winner.disqualified) == (1e-9, "", "")
    assert math.isnan(winner.playoff_sec)


def test_a_builder_without_time_is_no_finalists_fault(builder: Any, pool: WorkerPool) -> None:
    database, mod = database_of({GOOD: [2e-9]})
    late = PersistentBuilder(max_workers=1, time_left=lambda: 0.0)
    try:
        report = play(database, mod, late, pool)
    finally:
        late.close()
    assert (report.reason, report.winner, report.unchecked) == ("no-time", None, OUT_OF_TIME)
