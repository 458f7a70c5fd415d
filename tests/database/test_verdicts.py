from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import IRModule, Target, TuningRecord, json_database, te_workload
from tvm_adaptive.database.maintenance import export_json
from tvm_adaptive.database.metaschedule import StoreDatabase, task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import (
    SECOND_DECISION,
    candidate_key,
    decided_with,
    disqualified,
    ever_disqualified,
    mean_sec,
    proven,
    sound,
    standing_winner,
    trusted,
    without_lucky,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.workers.environment import Environment

TASK = StoredTask("0" * 16, '{"kind":"llvm"}', "matmul", "matmul", "[]")


def record(outer: int, seconds: float, flag: object = True) -> str:
    tiling = ["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]]
    split = ["Split", ["l1", "v1", "v2"], [flag, False], ["l2", "l3"]]
    end = ["EnterPostproc", [], [], []]
    return json.dumps([[[tiling, split, end], [[0, [outer, 64 // outer]]]], [seconds]])


def trial(outer: int, seconds: float, run: str = "") -> StoredTrial:
    return StoredTrial(record(outer, seconds), seconds, run=run)


def disqualified_final(outer: int, run: str = "") -> StoredTrial:
    failure = "wrong result: 3 of 4 elements differ"
    return StoredTrial(record(outer, 1e-9), None, failure=failure, run=run)


def prefetching(outer: int, seconds: float, run: str) -> StoredTrial:
    trace, secs = json.loads(record(outer, seconds))
    trace[0].append(["Annotate", ["b0", '"1:16"'], ["tvm_adaptive.prefetch"], []])
    return StoredTrial(json.dumps([trace, secs]), seconds, run=run)


def test_a_winner_that_prefetches_is_not_hidden_by_its_plain_form(store: RecordStore) -> None:
    store.add_finals(TASK, [prefetching(4, 0.9, "a"), trial(8, 0.95, "a"), trial(4, 1.0, "a")])
    winner = proven(store.finals(TASK))
    assert winner is not None
    assert winner.seconds == 0.9
    # In a later run the plain form alone is the candidate, and it wins.
    store.add_finals(TASK, [trial(4, 0.8, "b"), trial(8, 0.95, "b")])
    assert proven(store.finals(TASK)) == trial(4, 0.8, "b")


@pytest.fixture
def store(tmp_path: Path, target: Target) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.db", Environment.current(target)) as store:
        yield store


def seconds_of(store: RecordStore, n: int) -> list[float | None]:
    return [each.seconds for each in trusted(store, TASK, n)]


def test_a_candidate_is_the_same_however_its_record_is_written() -> None:
    """MetaSchedule's files have 1 where its traces in memory have True."""
    assert candidate_key(trial(4, 1.0)) == candidate_key(StoredTrial(record(4, 2.0, flag=1), 2.0))
    assert candidate_key(trial(4, 1.0)) != candidate_key(trial(8, 1.0))
    assert candidate_key(StoredTrial("{", 1.0)) == candidate_key(StoredTrial("{", 2.0))
    assert candidate_key(StoredTrial("{", 1.0)) != candidate_key(StoredTrial("[]", 1.0))


def test_of_an_export_what_is_checked_is_the_fastest(
    store: RecordStore, target: Target, tmp_path: Path
) -> None:
    """Also if the machine was slower in the search than in the play-off."""
    mod = te_workload("GMM")
    task = task_of(mod, target, "matmul")
    checked_one = make_record(mod, target, 4e-3, 1)
    store.add(task, [trial_of(checked_one), trial_of(make_record(mod, target, 3.5e-3, 2))])
    store.add_finals(task, [trial_of(make_record(mod, target, 3e-3, 1), run="b")])
    assert export_json(store, tmp_path / "exported") == 3
    found = json_database(tmp_path / "exported").query_tuning_record(mod, target, "main")
    assert candidate_key(trial_of(found)) == candidate_key(trial_of(checked_one))


def test_an_export_has_the_records_of_one_target(
    store: RecordStore, target: Target, tmp_path: Path
) -> None:
    """MetaSchedule would take another target's, which nobody has checked."""
    mod, other = te_workload("GMM"), Target({"kind": "llvm", "num-cores": 64})
    task = task_of(mod, target, "matmul")
    store.add(task, [trial_of(make_record(mod, target, 4e-3, 1))])
    store.add_finals(task, [trial_of(make_record(mod, target, 3e-3, 1), run="b")])
    store.add(task_of(mod, other, "matmul"), [trial_of(make_record(mod, other, 1e-3, 2))])
    with pytest.raises(InvalidOptionError, match=r"records of 2 targets.*--target.*64"):
        export_json(store, tmp_path / "exported")
    export_json(store, tmp_path / "exported", targets=[target])
    found = json_database(tmp_path / "exported").query_tuning_record(mod, target, "main")
    assert float(found.run_secs[0]) == 3e-3
    assert export_json(store, tmp_path / "other", targets=[other]) == 1
    third = Target({"kind": "llvm", "num-cores": 3})
    with pytest.raises(InvalidOptionError, match="no records of the target"):
        export_json(store, tmp_path / "third", targets=[third])


def test_of_a_checked_candidate_a_program_that_was_not_checked_is_lucky() -> None:
    finals = [trial(4, 1.1, "a")]
    trials = [prefetching(4, 1.0, "b"), trial(4, 1.05, "b")]
    assert without_lucky(finals, trials) == trials[1:]
    # Both were checked in one play-off.
    finals = [prefetching(4, 1.1, "c"), trial(4, 1.2, "c")]
    assert without_lucky(finals, trials) == trials
    # The last one says nothing of the form that prefetches: it may have failed there.
    assert without_lucky([*finals, trial(4, 1.1, "d")], trials) == trials[1:]


def test_an_export_has_the_program_that_was_checked(
    store: RecordStore, target: Target, tmp_path: Path
) -> None:
    mod = te_workload("GMM")
    plain = trial_of(make_record(mod, target, 3e-3), run="a")
    (instructions, decisions), _, *others = json.loads(plain.record)
    hint = ["Annotate", ["b0", '"1:16"'], ["tvm_adaptive.prefetch"], []]
    record = json.dumps([[[*instructions, hint], decisions], [2e-3], *others])
    task = task_of(mod, target, "matmul")
    store.add(task, [StoredTrial(record, 2e-3)])
    store.add_finals(task, [plain])
    assert export_json(store, tmp_path / "exported") == 1
    (found,) = json_database(tmp_path / "exported").get_all_tuning_records()
    assert float(found.run_secs[0]) == 3e-3


@pytest.mark.parametrize("checked_secs", [[], [4e-4, 9e-4, 3e-3]])
def test_of_an_export_what_is_checked_is_the_fastest_by_the_mean_of_its_times(
    store: RecordStore, target: Target, tmp_path: Path, checked_secs: list[float]
) -> None:
    """As MetaSchedule sorts records; a store's seconds are the median."""
    mod = te_workload("GMM")
    task = task_of(mod, target, "matmul")
    lucky = trial_of(with_times(make_record(mod, target, 1.0, 1), [1e-4, 1e-3, 1e-3]))
    checked_one = make_record(mod, target, 9e-4, 2)
    store.add(task, [lucky])
    if checked_secs:  # recorded as slower on average than the one that is not checked
        store.add(task, [trial_of(with_times(checked_one, checked_secs))])
    store.add_finals(task, [trial_of(checked_one, run="b")])
    export_json(store, tmp_path / "exported")
    found = json_database(tmp_path / "exported").query_tuning_record(mod, target, "main")
    assert candidate_key(trial_of(found)) == candidate_key(trial_of(checked_one))


@pytest.mark.parametrize("secs", ["", ",null", ",[]", ",5", ',["x"]'])
def test_of_a_record_without_times_the_stores_seconds_count(secs: str) -> None:
    assert mean_sec(StoredTrial(f"[[[],[]]{secs}]", 2e-3)) == 2e-3
    assert mean_sec(StoredTrial(f"[[[],[]]{secs}]", None)) == math.inf


def with_times(record: TuningRecord, secs: list[float]) -> TuningRecord:
    return TuningRecord(record.trace, record.workload, secs, record.target, record.args_info)


def test_without_a_playoff_the_fastest_are_trusted_each_once(store: RecordStore) -> None:
    store.add(TASK, [trial(4, 3.0), trial(8, 2.0), trial(4, 1.0), trial(4, 1.5), trial(2, 9.0)])
    assert seconds_of(store, 2) == [1.0, 2.0]
    assert seconds_of(store, 9) == [1.0, 2.0, 9.0]


def test_proven_ones_and_hopeful_ones_take_turns(store: RecordStore) -> None:
    store.add(TASK, [trial(outer, sec) for outer, sec in [(2, 1.0), (4, 1.1), (8, 1.2), (16, 5.0)]])
    store.add_finals(TASK, [trial(8, 1.3, "a"), trial(4, 1.4, "a")])
    assert seconds_of(store, 9) == [1.3, 1.0, 1.4, 5.0]
    assert seconds_of(store, 2) == [1.3, 1.0]
    # Recorded as slower than what was proven, 16 has to wait; so has 2 now.
    store.add_finals(TASK, [trial(4, 0.9, "b")])
    assert seconds_of(store, 9) == [0.9, 1.3, 1.0, 5.0]


def test_what_else_a_run_had_found_lost_to_its_finalists(store: RecordStore) -> None:
    store.add(TASK, [trial(2, 1.0, "a"), trial(4, 1.1, "a"), trial(8, 1.2, "b")])
    store.add_finals(TASK, [trial(4, 1.3, "a")])
    assert seconds_of(store, 2) == [1.3, 1.2]
    assert seconds_of(store, 9) == [1.3, 1.2, 1.0]


@pytest.mark.parametrize("seconds", [None, 1.2, 0.1])
def test_speed_is_no_reason_to_deploy_what_nobody_checked(
    store: RecordStore, seconds: float | None
) -> None:
    store.add(TASK, [trial(2, 0.5, "a")])
    assert proven(store.finals(TASK)) is None
    store.add_finals(TASK, [trial(4, 1.3, "a")])
    if seconds is not None:
        store.add(TASK, [trial(8, seconds, "b")])
    found = proven(store.finals(TASK))
    assert found is not None
    assert found.seconds == 1.3


def test_who_is_disqualified_before_a_playoff_does_not_hide_its_winner(store: RecordStore) -> None:
    """Within the network first; the play-off that follows has a loser with a lucky time."""
    store.add_finals(TASK, [disqualified_final(2, "a")])
    store.add_finals(TASK, [trial(4, 1.3, "a"), trial(8, 1.1, "a")])
    found = proven(store.finals(TASK))
    assert found is not None
    assert found.seconds == 1.3


def key(outer: int) -> str:
    return candidate_key(trial(outer, 1.0))


def test_the_last_word_on_a_candidate_counts() -> None:
    finals = [
        trial(2, 1.0, "a"),
        disqualified_final(4, "a"),
        trial(4, 2.0, "b"),
        disqualified_final(2, "b"),
    ]
    assert decided_with(finals, proven(finals)) == {key(4)}
    assert disqualified(finals) == {key(2)}
    assert ever_disqualified(finals) == {key(2), key(4)}


def test_what_another_decision_has_checked_was_not_decided_beside_the_winner() -> None:
    finals = [trial(2, 1.0, "a"), trial(4, 2.0, "a"), trial(8, 1.4, "b")]
    assert decided_with(finals, proven(finals)) == {key(2), key(4)}
    assert decided_with(finals, None) == frozenset()
    # What has lost beside the winner once has lost, also where the winner was decided again.
    again = [*finals[:2], trial(2, 1.1, "c"), disqualified_final(16, "c")]
    assert decided_with(again, proven(again)) == {key(2), key(4)}


def test_of_a_run_the_winner_of_the_last_playoff_stands() -> None:
    assert standing_winner([]) is None
    first = [trial(2, 1.0, "a"), trial(4, 1.1, "a")]
    assert standing_winner(first) == first[0]
    second = [trial(8, 1.2, "b"), trial(2, 1.3, "b")]
    assert standing_winner(first + second) == second[0]
    # A play-off that nobody won changes nothing, unless it disqualified the former winner.
    assert standing_winner([*first, disqualified_final(8, "b")]) == first[0]
    assert standing_winner([*first, disqualified_final(2, "b")]) == first[1]
    assert standing_winner([*first, disqualified_final(2, "b"), disqualified_final(4, "b")]) is None
    # A run that decided twice has two winners, of which the second stands.
    again = [trial(8, 1.4, f"a{SECOND_DECISION}"), trial(2, 1.0, f"a{SECOND_DECISION}")]
    assert standing_winner(first + again) == again[0]
    # Once disqualified in a run, it is not taken again in it.
    assert standing_winner([disqualified_final(2, "a"), trial(2, 1.0, "b")]) is None


def test_a_winner_comes_before_losers_that_seem_faster(store: RecordStore) -> None:
    """The winner's time is from rounds after the choice, theirs from those that chose."""
    store.add_finals(TASK, [trial(2, 1.2, "a"), trial(4, 1.1, "a"), disqualified_final(8, "a")])
    store.add_finals(TASK, [trial(16, 1.3, "b")])
    assert seconds_of(store, 9) == [1.2, 1.3, 1.1]
    # Who won and lost later on is no winner any more.
    store.add_finals(TASK, [trial(4, 1.5, "c"), trial(2, 1.0, "c")])
    assert seconds_of(store, 9) == [1.3, 1.5, 1.0]


def test_the_second_decision_of_a_run_is_that_run_s(store: RecordStore) -> None:
    store.add(TASK, [trial(32, 0.9, "a")])
    store.add_finals(TASK, [trial(2, 1.2, f"a{SECOND_DECISION}")])
    store.add_finals(TASK, [trial(4, 1.3, "b")])
    # What else the run had found has lost against its finalists.
    assert seconds_of(store, 2) == [1.2, 1.3]


def test_where_all_were_disqualified_there_is_no_winner(store: RecordStore) -> None:
    store.add_finals(TASK, [disqualified_final(2, "a"), disqualified_final(4, "a")])
    assert seconds_of(store, 9) == []


def test_what_was_disqualified_is_not_trusted_unless_it_was_cleared_since(
    store: RecordStore,
) -> None:
    store.add(TASK, [trial(2, 1.0), trial(4, 2.0), trial(2, 1.1)])
    store.add_finals(TASK, [disqualified_final(2)])
    assert seconds_of(store, 9) == [2.0]
    assert sound(store.finals(TASK), store.latest(TASK)) == [trial(4, 2.0)]
    store.add_finals(TASK, [trial(2, 1.5)])
    assert seconds_of(store, 9) == [1.5, 2.0]
    assert len(sound(store.finals(TASK), store.latest(TASK))) == 3


def test_many_lucky_timings_of_one_candidate_hide_no_other(store: RecordStore) -> None:
    store.add(TASK, [trial(2, 1.0 + i / 100) for i in range(60)] + [trial(4, 2.7)])
    assert seconds_of(store, 2) == [1.0, 2.7]
    store.add_finals(TASK, [disqualified_final(2)])
    assert seconds_of(store, 2) == [2.7]


def test_metaschedule_gets_no_wrong_kernel(
    store: RecordStore, mods: dict[str, IRModule], target: Target, tmp_path: Path
) -> None:
    mod = mods["GMM"]
    task = task_of(mod, target, "matmul")
    liar, honest = (make_record(mod, target, sec, seed) for sec, seed in [(1e-9, 1), (1e-3, 2)])
    store.add(task, [trial_of(liar), trial_of(honest)])
    assert StoreDatabase(store, target).query_tuning_record(mod, target, "main") is None
    anything = StoreDatabase(store, target, checked_only=False)
    assert float(anything.query_tuning_record(mod, target, "main").run_secs[0]) == 1e-9
    # As a later run sees it: read from MetaSchedule's own file.
    other = json_database(tmp_path)
    workload = other.commit_workload(mod)
    other.commit_tuning_record(make_record(mod, target, 1e-9, 1))
    (again,) = json_database(tmp_path).get_top_k(workload, 1)
    store.add_finals(task, [trial_of(again, failure="wrong result")])
    assert StoreDatabase(store, target).query_tuning_record(mod, target, "main") is None
    anything = StoreDatabase(store, target, checked_only=False)
    assert float(anything.query_tuning_record(mod, target, "main").run_secs[0]) == 1e-3
    assert export_json(store, tmp_path / "all") == 1
    assert export_json(store, tmp_path / "best", best=1) == 1
    assert "0.001" in (tmp_path / "best" / "database_tuning_record.json").read_text()


def test_metaschedule_prefers_what_was_proven_in_an_export(
    store: RecordStore, mods: dict[str, IRModule], target: Target, tmp_path: Path
) -> None:
    mod = mods["GMM"]
    task = task_of(mod, target, "matmul")
    secs = {1: 1e-3, 2: 2e-3, 3: 4e-3}
    store.add(
        task, [trial_of(make_record(mod, target, sec, i), run="a") for i, sec in secs.items()]
    )
    store.add_finals(task, [trial_of(make_record(mod, target, 3e-3, 2), run="b")])
    for best in (None, 3):
        export_json(store, tmp_path / str(best), best)
        exported = json_database(tmp_path / str(best))
        record = exported.query_tuning_record(mod, target, "main")
        chosen = candidate_key(trial_of(record))
        assert chosen == candidate_key(trial_of(make_record(mod, target, 3e-3, 2)))
        assert len(exported.get_all_tuning_records()) == 2, "a slower one does no harm"
    store.prune(1)
    assert export_json(store, tmp_path / "pruned") == 1
    assert "0.003" in (tmp_path / "pruned" / "database_tuning_record.json").read_text()


def test_metaschedule_compiles_what_a_playoff_has_proven(
    store: RecordStore, mods: dict[str, IRModule], target: Target
) -> None:
    mod = mods["GMM"]
    task = task_of(mod, target, "matmul")
    lucky, proven = (make_record(mod, target, sec, seed) for sec, seed in [(1e-3, 1), (2e-3, 2)])
    store.add(task, [trial_of(lucky, run="a"), trial_of(proven, run="a")])
    finalist = make_record(mod, target, 3e-3, 2)
    store.add_finals(task, [trial_of(finalist, run="a")])
    database = StoreDatabase(store, target, run="b")

    def best_sec() -> float:
        found = database.query_tuning_record(mod, target, "main")
        assert found is not None
        assert database.query_schedule(mod, target, "main") is not None
        return float(found.run_secs[0])

    assert best_sec() == 3e-3
    assert [float(each.run_secs[0]) for each in database.get_top_k(lucky.workload, 9)] == [
        1e-3,
        2e-3,
    ], "all records say who searched"
    for seed, seconds in ((3, 2.9e-3), (4, 0.5e-3)):
        database.commit_tuning_record(make_record(mod, target, seconds, seed))
        assert best_sec() == 3e-3
    anything = StoreDatabase(store, target, checked_only=False)
    assert float(anything.query_tuning_record(mod, target, "main").run_secs[0]) == 3e-3
