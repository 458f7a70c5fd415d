"""A play-off's winner in variants that prefetch its weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tvm.s_tir import meta_schedule as ms

from tests.models.prefetch.conftest import LLVM, ROWS_INSIDE, product, record_of_schedule, tiled
from tvm_adaptive._tvm import IRModule, copy_record
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.models.prefetch.rewrite import HINT
from tvm_adaptive.runner.playoff import playoff, verifier
from tvm_adaptive.runner.playoff.finalist import PlayoffOptions
from tvm_adaptive.runner.playoff.modules import sane_records
from tvm_adaptive.runner.playoff.playoff import FinalistReport, finalist_pool, play_off
from tvm_adaptive.runner.playoff.rounds import PlayoffResult
from tvm_adaptive.workers import pool as pools
from tvm_adaptive.workers.pool import WorkerPool

# Workers cannot import this file; its functions travel whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def builder() -> Iterator[Any]:
    builder = PersistentBuilder(max_workers=1, timeout_sec=60)
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = finalist_pool(1, pools.ForkServer(("tvm_adaptive.runner.playoff.worker",)))
    yield pool
    pool.close()


def database_of_one() -> tuple[Any, IRModule]:
    mod, database = product(), ms.database.MemoryDatabase()
    copy_record(record_of_schedule(tiled(mod, ROWS_INSIDE), mod), database)
    return database, mod


def play(
    builder: Any, pool: WorkerPool, *, prefetch: bool = True, journal: Any = None
) -> FinalistReport:
    database, mod = database_of_one()
    options = PlayoffOptions(timeout_sec=20, max_sec=2, repeat_ms=1, prefetch=prefetch)
    records = sane_records(database, mod, LLVM)
    return play_off(records, LLVM, options, builder=builder, pool=pool, journal=journal)


def decided_by(*rankings: list[int]) -> Any:
    """Return what stands in for timings: one ranking for each call."""
    left = list(rankings)

    def play_rounds(measure: Any, n_candidates: int, **_options: Any) -> PlayoffResult:
        ranking = left.pop(0)
        assert sorted(ranking) == list(range(n_candidates))
        seconds = np.array([1e-3 * (1 + ranking.index(i)) for i in range(n_candidates)])
        return PlayoffResult(tuple(ranking), seconds, seconds / 100, "separated")

    return play_rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranking", "hint"),
    [([0, 1, 2], None), ([1, 0, 2], "1:16"), ([2, 1, 0], "1:65536")],
    ids=["itself", "bursts", "at once"],
)
def test_the_fastest_form_stands_for_the_winner(
    ranking: list[int],
    hint: str | None,
    *,
    builder: Any,
    pool: WorkerPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(playoff, "play_rounds", decided_by([0], ranking))
    report = play(builder, pool, journal=Journal(tmp_path / "journal.jsonl"))
    (winner,) = report.finalists
    assert report.winner is winner
    assert (winner.disqualified, winner.unchecked, winner.prefetches) == ("", "", hint is not None)
    assert winner.playoff_sec == pytest.approx(1e-3)
    assert (HINT in str(winner.record.trace)) == (hint is not None)
    assert hint is None or hint in str(winner.record.trace)
    reported = read_journal(tmp_path / "journal.jsonl")[-1]
    assert reported["candidates"][0]["prefetches"] == (hint is not None)


def test_variants_are_timed_as_they_will_run(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_them, n_timed = playoff._time, list[int]()

    def note(entries: Any, *limits: Any) -> Any:
        n_timed.append(len(entries))
        return time_them(entries, *limits)

    monkeypatch.setattr(playoff, "_time", note)
    report = play(builder, pool)
    assert n_timed == [1, 3]  # the winner, and the same beside its two variants
    assert report.winner is not None
    assert report.winner.playoff_sec > 0
    assert report.winner.stderr_sec >= 0


def test_a_winner_that_crashes_beside_its_variants_does_not_win(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = verifier.run_reference

    def crash(kernel: Any, seed: int, path: str) -> None:
        if path.endswith("-variant"):
            os.abort()
        kept(kernel, seed, path)

    monkeypatch.setattr(verifier, "run_reference", crash)
    monkeypatch.setattr(playoff, "play_rounds", decided_by([0]))
    report = play(builder, pool)
    (finalist,) = report.finalists
    assert report.winner is None
    assert finalist.disqualified.startswith("crash")


def test_who_wants_none_gets_none(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playoff, "play_rounds", decided_by([0]))
    report = play(builder, pool, prefetch=False)
    assert report.winner is not None
    assert not report.winner.prefetches


def test_a_record_that_no_hint_can_be_given_wins_all_the_same(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: Any, weights: tuple[int, ...]) -> list[Any]:
        raise ValueError("an odd trace")

    monkeypatch.setattr(playoff, "hinted", fail)
    report = play(builder, pool)
    assert report.winner is not None
    assert report.reason != "error"
    assert not report.winner.prefetches


def test_a_form_with_other_results_cannot_win(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants_of = playoff.hinted

    def with_a_wrong_one(record: Any, weights: tuple[int, ...]) -> list[Any]:
        mod = product(sign=-1)
        return [record_of_schedule(tiled(mod, ROWS_INSIDE), mod), *variants_of(record, weights)]

    monkeypatch.setattr(playoff, "hinted", with_a_wrong_one)
    monkeypatch.setattr(playoff, "play_rounds", decided_by([0], [2, 1, 0]))
    report = play(builder, pool)
    assert report.winner is not None
    assert "1:65536" in str(report.winner.record.trace), "the wrong one is not among the three"


def test_a_winner_that_fails_beside_its_variants_does_not_win(
    builder: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_them = playoff._time

    def fail_beside_variants(entries: Any, *limits: Any) -> Any:
        if len(entries) > 1:
            entries[0].finalist.disqualified = "crash: seldom"
        return time_them(entries, *limits)

    monkeypatch.setattr(playoff, "_time", fail_beside_variants)
    monkeypatch.setattr(playoff, "play_rounds", decided_by([0], [1, 2, 0]))
    report = play(builder, pool)
    assert report.winner is None
    assert [each.disqualified for each in report.finalists] == ["crash: seldom"]
