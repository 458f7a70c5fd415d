"""Which records of a task may win, and what stands where none does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.database.conftest import make_record
from tests.tuning.finals.test_decision import TARGET, session_of
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    TVM_VERSION,
    ExtractedTask,
    copy_record,
    functions_as_tasks,
    json_database,
    te_workload,
)
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile, proven
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.progress import TaskProgress
from tvm_adaptive.runner.playoff.finalist import (
    Finalist,
    as_recorded,
)
from tvm_adaptive.runner.playoff.playoff import FinalistReport, without_playoff
from tvm_adaptive.tuning import deploy
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.finals import decision
from tvm_adaptive.tuning.finals.finalists import (
    Finalists,
    beaten_by,
    finalists_of,
    finalists_of_run,
    note_unchecked,
    with_proven,
)
from tvm_adaptive.tuning.warm_start import VerdictRecorder
from tvm_adaptive.values.run_folder import RECORD_FILE
from tvm_adaptive.workers.environment import UNKNOWN


def gmm_task() -> ExtractedTask:
    return functions_as_tasks(te_workload("GMM"), TARGET)[0]


def finalists_with(
    folder: Path,
    own: dict[int, float],
    *,
    run: Sequence[StoredTrial] = (),
    store: Sequence[StoredTrial] | None = None,
    n_records: int | None = None,
) -> Finalists:
    """Return what a task has: records by seed, and what was said in its run and in a store."""
    task = gmm_task()
    mod = task.dispatched[0]
    for seed, seconds in own.items():
        copy_record(make_record(mod, TARGET, seconds, seed), json_database(folder))
    stored = task_of(mod, TARGET, "main")
    if run:
        VerdictFile(folder, str(TVM_VERSION)).add(stored, run)
    with contextlib.ExitStack() as stack:
        session = session_of(folder, TARGET)
        if store is not None:
            session.store = stack.enter_context(RecordStore(folder / "records.db"))
            # Recorded as much faster, by a run that had no play-off: nobody has checked it.
            session.store.add(stored, [trial_of(make_record(mod, TARGET, 1e-6, 9), run="b")])
            session.store.add_finals(stored, store)
        (found,) = finalists_of(session, [task], RunDatabase(folder), n_records=n_records)
    return found


def said(seed: int, seconds: float, failure: str = "", run: str = "a") -> StoredTrial:
    mod = gmm_task().dispatched[0]
    return trial_of(make_record(mod, TARGET, seconds, seed), failure=failure, run=run)


def times_of(finalists: Finalists) -> list[float]:
    return [float(each.run_secs[0]) for each in finalists.records]


@pytest.mark.parametrize("place", ["run", "store"])
@pytest.mark.parametrize(
    ("own_seed", "final_seed", "importance_sec", "is_proven", "order"),
    [
        (None, None, 0.0, False, []),  # nothing is known
        (1, None, 1e-3, False, [1e-3]),
        (1, 2, 1e-3, False, [1e-3, 3e-3]),  # another one was proven, and this may be faster
        (1, 1, 1e-3, True, [1e-3]),
        (None, 1, 3e-3, True, [3e-3]),
    ],
)
def test_a_task_plays_for_its_records_and_for_what_was_proven(
    tmp_path: Path,
    *,
    own_seed: int | None,
    final_seed: int | None,
    importance_sec: float,
    is_proven: bool,
    order: list[float],
    place: str,
) -> None:
    finals = [] if final_seed is None else [said(final_seed, 3e-3)]
    own = {} if own_seed is None else {own_seed: 1e-3}
    found = finalists_with(
        tmp_path,
        own,
        run=finals if place == "run" else (),
        store=[] if place == "run" else finals,
    )
    assert found.importance_sec == pytest.approx(importance_sec)
    assert found.is_proven == is_proven
    assert found.is_due == (importance_sec > 0 and not is_proven)
    assert times_of(found) == order
    assert (found.proven is None) == (final_seed is None)
    assert found.proven is None or (found.proven.is_sound and found.proven.final_sec() == 3e-3)


@pytest.mark.parametrize("place", ["run", "store"])
@pytest.mark.parametrize("error", [None, 0.01])
def test_what_was_checked_within_the_network_was_in_no_playoff(
    tmp_path: Path, place: str, error: float | None
) -> None:
    finals_of = {place: [dataclasses.replace(said(1, 3e-3), error=error)]}
    found = finalists_with(tmp_path, {}, **finals_of)
    assert found.proven is not None
    assert found.proven.in_network == (error is None)


@pytest.mark.parametrize(("place", "own"), [("run", {}), ("run", {2: 4e-3}), ("store", {})])
def test_what_a_run_has_proven_without_a_trial_was_a_draft(
    tmp_path: Path, place: str, own: dict[int, float]
) -> None:
    finals_of = {place: [dataclasses.replace(said(1, 3e-3), error=None)]}
    found = finalists_with(tmp_path, own, **finals_of)
    assert found.proven is not None
    assert found.proven.is_draft == (place == "run" and not own)


@pytest.mark.parametrize("place", ["run", "store"])
def test_a_disqualified_finalist_has_no_second_chance(tmp_path: Path, place: str) -> None:
    finals = [said(2, 3e-3), said(1, 1e-6, "wrong result: 3 of 4")]
    finals_of = {"run": finals} if place == "run" else {"store": finals}
    found = finalists_with(tmp_path, {1: 1e-6, 2: 2e-3, 3: 4e-3}, **finals_of)
    assert times_of(found) == [2e-3, 4e-3]
    assert found.is_proven, "what is faster than the proven one was disqualified"


def test_a_record_that_one_source_disqualified_wins_by_no_other(tmp_path: Path) -> None:
    found = finalists_with(
        tmp_path, {1: 1e-3}, run=[said(1, 1e-3, "crash: SIGSEGV")], store=[said(1, 3e-3, run="b")]
    )
    assert (found.proven, found.records, found.is_proven) == (None, (), False)


def test_luck_does_not_go_before_what_was_proven(tmp_path: Path) -> None:
    """A recorded time flatters by some hundredths; a tenth is more than that."""
    finals = [said(4, 1e-3)]
    found = finalists_with(tmp_path, {1: 0.8e-3, 2: 0.95e-3, 3: 0.99e-3}, run=finals)
    assert times_of(found) == [0.8e-3, 1e-3, 0.95e-3, 0.99e-3]


@pytest.mark.parametrize(
    ("own", "n_records"), [({1: 1.4e-3, 2: 2e-3}, None), ({2: 2e-3, 1: 1.4e-3}, 1)]
)
def test_what_was_proven_in_a_fast_hour_is_compared_by_this_runs_time(
    tmp_path: Path, own: dict[int, float], n_records: int | None
) -> None:
    found = finalists_with(tmp_path, own, store=[said(2, 1e-3)], n_records=n_records)
    assert times_of(found) == [1.4e-3, 2e-3]
    assert not found.is_proven
    assert found.importance_sec == pytest.approx(1.4e-3)


def test_what_was_proven_is_timed_beside_the_first_that_seem_faster(tmp_path: Path) -> None:
    own = {seed: seed * 1e-4 for seed in range(1, 6)} | {6: 1e-3}
    found = finalists_with(tmp_path, own, store=[said(6, 2e-3)])
    assert times_of(found) == pytest.approx([1e-4, 2e-4, 1e-3, 3e-4, 4e-4, 5e-4])
    assert found.is_due


@pytest.mark.parametrize(("rival_run", "is_proven"), [("b", False), ("a", True)])
def test_what_was_checked_in_another_hour_is_decided_by_this_runs_times(
    tmp_path: Path, rival_run: str, is_proven: bool
) -> None:
    """Where both were timed in one play-off, its word stands; times of two hours have none."""
    finals = [said(2, 1e-3, run="a"), said(1, 1.4e-3, run=rival_run)]
    found = finalists_with(tmp_path, {1: 1.4e-3, 2: 2e-3}, store=finals)
    assert times_of(found) == [1.4e-3, 2e-3]
    assert found.is_proven == is_proven


def test_a_runs_own_winner_is_compared_with_what_the_store_has_proven(tmp_path: Path) -> None:
    run, store = [said(2, 1e-3, run="a")], [said(1, 1.4e-3, run="b")]
    found = finalists_with(tmp_path, {1: 1.4e-3, 2: 2e-3}, run=run, store=store)
    assert times_of(found) == [1.4e-3, 2e-3]
    assert found.is_due


def test_a_record_that_tvm_cannot_apply_is_no_finalist(tmp_path: Path) -> None:
    """Of a run that is applied: another version of TVM may have been there."""
    mod = gmm_task().dispatched[0]
    for seed, seconds in enumerate((1e-3, 2e-3), start=1):
        copy_record(make_record(mod, TARGET, seconds, seed), json_database(tmp_path))
    path = tmp_path / RECORD_FILE
    first, second = path.read_text().splitlines()
    number, fields = json.loads(first)
    fields[0] = [[["AnotherVersions", [], [], []]], []]
    path.write_text(f"{json.dumps([number, fields])}\n{second}\n")
    (found,) = finalists_of_run(tmp_path, TARGET, [gmm_task()])
    assert times_of(found) == [2e-3]


def held(*finalists: Finalist, reason: str = "failed") -> FinalistReport:
    return FinalistReport("main", finalists, reason, 1.0)


def test_where_a_playoff_has_no_winner_the_earlier_one_stands() -> None:
    mod = gmm_task().dispatched[0]
    record, other = (make_record(mod, TARGET, 1e-3, seed) for seed in (1, 2))
    proven = Finalist(record, 1e-3, 1e-3, unchecked="")
    mine = Finalists(mod, "main", (other, record), 1e-3, proven)
    wrong = Finalist(other, 1e-9, disqualified="wrong result", unchecked="")
    task = TaskProgress("main", 1.0)
    outcome = decision.outcome_of(task, with_proven(held(wrong), mine))
    assert (outcome.best_sec, outcome.played_off, outcome.n_disqualified) == (1e-3, True, 1)
    # Found out now, it does not stand any longer.
    out = Finalist(record, 1e-3, disqualified="wrong result", unchecked="")
    outcome = decision.outcome_of(task, with_proven(held(wrong, out), mine))
    assert (outcome.best_sec, outcome.played_off) == (math.inf, False)
    # That it could not be built this time says nothing of it.
    unbuilt = Finalist(record, 1e-3, disqualified="build: machine: out of memory")
    outcome = decision.outcome_of(task, with_proven(held(wrong, unbuilt), mine))
    assert (outcome.best_sec, outcome.played_off) == (1e-3, True)
    nothing = dataclasses.replace(mine, proven=None)
    unknown = held(as_recorded(other, "no reference: timeout"), reason="no-reference")
    outcome = decision.outcome_of(task, with_proven(unknown, nothing))
    assert (outcome.best_sec, outcome.played_off) == (1e-3, False)
    notes = Notes()
    note_unchecked(unknown, notes)
    note_unchecked(held(wrong), notes)
    assert notes.notes == ["main stays untuned, as nothing could be checked: no reference: timeout"]


@pytest.mark.parametrize(
    ("timed_sec", "proven_again_sec", "deployed_sec"),
    [
        (math.nan, None, 1e-3),  # the time was over: checked, but its record may be luck
        (1.1e-3, None, 1e-3),
        (0.9e-3, None, 0.9e-3),
        (1.1e-3, 1.2e-3, 1.1e-3),  # side by side, the proven one has lost
        (math.nan, math.nan, 1e-3),
    ],
)
def test_a_lucky_record_does_not_replace_what_was_proven(
    timed_sec: float, proven_again_sec: float | None, deployed_sec: float
) -> None:
    mod = gmm_task().dispatched[0]
    record, lucky = make_record(mod, TARGET, 1e-3, 1), make_record(mod, TARGET, 0.5e-3, 2)
    mine = Finalists(mod, "main", (lucky, record), 1e-3, Finalist(record, 1e-3, 1e-3, unchecked=""))
    found = [Finalist(lucky, 0.5e-3, timed_sec, unchecked="")]
    if proven_again_sec is not None:
        found.append(Finalist(record, 1e-3, proven_again_sec, unchecked=""))
    report = with_proven(held(*found, reason="no-time"), mine)
    assert report.winner is not None
    assert report.winner.final_sec() == deployed_sec
    assert len(report.finalists) == (2 if deployed_sec == 1e-3 else len(found))


def test_what_was_proven_in_a_fast_hour_can_be_beaten_in_this_one() -> None:
    mod = gmm_task().dispatched[0]
    today, other = make_record(mod, TARGET, 2e-3, 1), make_record(mod, TARGET, 1.4e-3, 2)
    proven = Finalist(make_record(mod, TARGET, 1e-3, 1), 1e-3, 1e-3, unchecked="")
    mine = Finalists(mod, "main", (other, today), 1e-3, proven)
    report = with_proven(held(Finalist(other, 1.4e-3, 1.4e-3, unchecked="")), mine)
    assert report.winner is not None
    assert report.winner.record is other


def test_what_is_checked_now_beats_what_another_hour_has_proven(tmp_path: Path) -> None:
    """A later run, and whoever compiles from the store, gets what this run's times prefer."""
    mod = gmm_task().dispatched[0]
    stored = task_of(mod, TARGET, "main")
    found = finalists_with(tmp_path, {1: 1.4e-3, 2: 2e-3}, store=[said(2, 1e-3, run="before")])
    checked = dataclasses.replace(as_recorded(found.records[0], ""), in_network=True)
    report = held(checked, reason="network")
    beaten = beaten_by(report, found)
    assert beaten is not None
    assert beaten.final_sec() == 2e-3
    with RecordStore(tmp_path / "records.db") as store:
        VerdictRecorder(session_of(tmp_path, TARGET, store)).add(report, beaten=beaten)
        winner = proven(store.finals(stored))
    assert winner is not None
    assert winner.seconds == 1.4e-3
    # It was not checked again: the run's own file says nothing of it.
    ((said_here,),) = VerdictFile(tmp_path, str(TVM_VERSION)).read().values()
    assert said_here.seconds == 1.4e-3
    # Of what is not proven, checked again itself, or faster, nothing is said.
    assert beaten_by(report, dataclasses.replace(found, proven=None)) is None
    again, slower = (as_recorded(found.records[1], ""), as_recorded(found.records[0], ""))
    assert beaten_by(held(again, reason="network"), found) is None
    slower.recorded_sec = 3e-3
    assert beaten_by(held(slower, reason="network"), found) is None


def loosened_session(folder: Path, store: RecordStore | None = None, run: str = "a") -> Any:
    session = session_of(folder, TARGET, store)
    finish = dataclasses.replace(DEFAULT.finish, rtol=1e-2)
    session.config, session.run_id = dataclasses.replace(DEFAULT, finish=finish), run
    return session


def prove_loosely(folder: Path) -> None:
    """Let a run with a loosened tolerance prove a record within the network."""
    finalist = as_recorded(make_record(gmm_task().dispatched[0], TARGET, 1e-3, 1), "")
    finalist.in_network = True
    report = FinalistReport("main", (finalist,), "network", 0.0)
    VerdictRecorder(loosened_session(folder)).add(report)


def test_a_proof_at_a_loosened_tolerance_stays_one_when_the_run_resumes(tmp_path: Path) -> None:
    prove_loosely(tmp_path)
    session = loosened_session(tmp_path, run="b")
    (mine,) = finalists_of(session, [gmm_task()], RunDatabase(tmp_path))
    assert mine.is_proven
    report = without_playoff(mine.records, mine.proven, "main")
    VerdictRecorder(session).add(report, is_earlier=True)
    file = VerdictFile(tmp_path, str(TVM_VERSION))
    assert [each.run for finals in file.read().values() for each in finals] == ["a", "a"]
    assert not any(file.read(with_loose=False).values())


def test_a_proof_at_a_loosened_tolerance_that_stands_after_a_play_off_is_not_shared(
    tmp_path: Path,
) -> None:
    prove_loosely(tmp_path)
    other = make_record(gmm_task().dispatched[0], TARGET, 3e-3, 2)
    timed = Finalist(other, 3e-3, 3e-3, 3e-5, unchecked="")
    with RecordStore(tmp_path / "records.db") as store:
        session = loosened_session(tmp_path, store, run="b")
        (mine,) = finalists_of(session, [gmm_task()], RunDatabase(tmp_path))
        report = with_proven(held(timed, reason="tied"), mine)
        assert [each.in_network for each in report.finalists] == [True, False]
        VerdictRecorder(session).add(report)
        (task,) = store.tasks()
        # The play-off's tolerance is that of all runs.
        assert [each.seconds for each in store.finals(task)] == [3e-3]
    file = VerdictFile(tmp_path, str(TVM_VERSION))
    (strict,) = file.read(with_loose=False).values()
    assert [each.seconds for each in strict] == [3e-3]
    session = loosened_session(tmp_path, run="c")
    (mine,) = finalists_of(session, [gmm_task()], RunDatabase(tmp_path))
    assert mine.proven is not None
    assert mine.proven.final_sec() == 1e-3, "the winner of the run is still the first"


def test_a_proof_at_a_loosened_tolerance_is_none_for_a_run_with_the_usual_one(
    tmp_path: Path,
) -> None:
    prove_loosely(tmp_path)
    (mine,) = finalists_of(session_of(tmp_path, TARGET), [gmm_task()], RunDatabase(tmp_path))
    assert (mine.proven, mine.is_proven) == (None, False)


@pytest.mark.parametrize("is_loosened", [True, False])
def test_apply_takes_a_runs_proofs_by_the_runs_tolerance(
    tmp_path: Path, *, is_loosened: bool
) -> None:
    prove_loosely(tmp_path)
    context = loosened_session(tmp_path) if is_loosened else session_of(tmp_path, TARGET)
    with deploy._records(tmp_path, context, UNKNOWN) as records:
        assert records is not None
        (mine,) = records([gmm_task()])
    assert (mine.proven is not None) == is_loosened


class Asked:
    """A store that knows nothing, or fails, and counts how often it is asked."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.n_asked = 0

    def finals(self, _task: StoredTask) -> list[StoredTrial]:
        self.n_asked += 1
        if self.fails:
            raise StoreError("no answer.")
        return []


@pytest.mark.parametrize(("fails", "n_asked"), [(True, 1), (False, 2)])
def test_a_store_is_not_asked_again_for_the_other_records_of_a_task(
    tmp_path: Path, *, fails: bool, n_asked: int
) -> None:
    tasks = [functions_as_tasks(te_workload(name), TARGET)[0] for name in ("GMM", "C1D")]
    store: Any = Asked(fails=fails)
    session = session_of(tmp_path, TARGET, store)
    found = finalists_of(session, tasks, RunDatabase(tmp_path), n_records=1)
    assert store.n_asked == n_asked
    for each in found:
        each.complete()
    assert store.n_asked == n_asked
