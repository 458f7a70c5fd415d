from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import Target, TuningRecord, json_database, te_workload
from tvm_adaptive.cli import main
from tvm_adaptive.database.location import user_store
from tvm_adaptive.database.metaschedule import StoreDatabase, target_text, task_of, trial_of
from tvm_adaptive.database.records import StoredTask
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.workers.environment import Environment


def fill(path: Path) -> None:
    target = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
    with RecordStore(path) as store:
        database = StoreDatabase(store, target)
        for seed, seconds in enumerate((3e-3, None, 1e-3), start=1):
            database.commit_tuning_record(make_record(te_workload("GMM"), target, seconds, seed))


def test_what_is_there_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "records.db")
    assert main(["db", "--store", str(tmp_path / "records.db"), "stats"]) == 0
    shown = capsys.readouterr().out
    assert "llvm" in shown
    assert "1 tasks, 3 trials" in shown


def test_without_a_name_it_is_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    fill(user_store())
    assert main(["db", "stats"]) == 0
    assert str(user_store()) in capsys.readouterr().out


def test_records_go_out_come_in_and_are_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "first.db"), str(tmp_path / "second.db")
    fill(tmp_path / "first.db")
    assert main(["db", "--store", first, "export", str(tmp_path / "json"), "--best", "2"]) == 0
    assert main(["db", "--store", second, "import", str(tmp_path / "json")]) == 0
    assert main(["db", "--store", first, "prune", "--keep", "1"]) == 0
    reported = capsys.readouterr().out.splitlines()
    assert reported[0].endswith("2 records")
    assert "2 records added, 0 left out" in reported[1]
    assert reported[2].endswith("2 trials deleted")


def test_of_several_targets_one_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {
        "cpu": resolve_target("cpu"),
        '{"kind": "llvm", "mcpu": "skylake", "num-cores": 61}': Target(
            {"kind": "llvm", "mcpu": "skylake", "num-cores": 61}
        ),
        # Of a farm, which adds no processor.
        '{"kind": "llvm", "num-cores": 63}': Target({"kind": "llvm", "num-cores": 63}),
    }
    mod = te_workload("GMM")
    with RecordStore(tmp_path / "records.db") as store:
        for number, target in enumerate(targets.values(), start=1):
            record = make_record(mod, target, 1e-3 * number)
            store.add(task_of(mod, target, "gmm"), [trial_of(record)])
    command = ["db", "--store", str(tmp_path / "records.db"), "export"]
    assert main([*command, str(tmp_path / "all")]) == 2
    message = capsys.readouterr().err
    assert "records of 3 targets" in message
    for number, (name, target) in enumerate(targets.items(), start=1):
        listed = target_text(target)
        assert f"'{listed}'" in message
        for text in (name, listed):
            folder = tmp_path / f"{number} {len(text)}"
            assert main([*command, str(folder), "--target", text]) == 0
            (found,) = json_database(folder).get_all_tuning_records()
            assert float(found.run_secs[0]) == 1e-3 * number
    third = '{"kind": "llvm", "num-cores": 3}'
    assert main([*command, str(tmp_path / "all"), "--target", third]) == 2
    assert "Its targets are: " in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_store_in_a_file_is_added_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team, server = tmp_path / "team.db", tmp_path / "server.db"
    fill(team)
    for text in ("3 records added, 0 left out", "0 records added, 3 left out"):
        assert main(["db", "--store", str(server), "import", str(team)]) == 0
        assert text in capsys.readouterr().out
    assert main(["db", "--store", str(team), "import", str(team)]) == 2
    assert "is the store itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--store", "nowhere.db", "stats"], "no record store nowhere.db"),
        (["stats"], "no record store"),
        (["--store", "none", "stats"], "names no store"),
        (["import", "nowhere"], "no folder or record store nowhere"),
        (["import", "."], "holds no database"),
        (["--store", "mysql://host/name", "stats"], "sqlite or postgresql"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["db", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert text in shown.err


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_what_is_no_number_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["db", "prune", "--keep", number])
    assert left.value.code == 2


def test_a_runs_folder_brings_all_that_its_own_store_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a shared store that could not be written while the run lasted."""
    target = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
    mod = te_workload("GMM")
    run, shared = tmp_path / "run", tmp_path / "shared.db"
    here = Environment("a processor, 2 cores", "0.27.0", "0.1.14")
    run.mkdir()
    (run / "journal.jsonl").write_text(
        json.dumps({"event": "journal", "version": 1, "time_sec": 0.0, "pid": 1})
        + "\n"
        + json.dumps({"event": "run", "time_sec": 0.0, **here.as_fields()})
        + "\n"
    )
    recorded = json_database(run)
    workload = recorded.commit_workload(mod)
    task = task_of(mod, target, "gmm")
    with RecordStore(run / "records.db", here) as own:
        for seed, seconds in enumerate((3e-3, None, 1e-3, 2e-3), start=1):
            record = make_record(mod, target, seconds, seed)
            written = TuningRecord(
                record.trace, workload, record.run_secs, target, record.args_info
            )
            recorded.commit_tuning_record(written)
            if seed < 4:  # the last one is in MetaSchedule's files only
                features = np.full(3, seed, dtype=np.float32)
                trial = trial_of(record, run="17a", failure="" if seconds else "Boom")
                own.add(task, [dataclasses.replace(trial, features=features)])
    assert main(["db", "--store", str(shared), "import", str(run)]) == 0
    assert "4 records added, 0 left out" in capsys.readouterr().out
    assert main(["db", "--store", str(shared), "import", str(run)]) == 0
    assert "0 records added, 3 left out" in capsys.readouterr().out
    with RecordStore(shared, here) as store:
        kept = store.latest(store.tasks()[0])
    assert sorted(each.seconds for each in kept if each.seconds) == [1e-3, 2e-3, 3e-3]
    assert [each.failure for each in kept if each.failure] == ["Boom"]
    assert [each.run for each in kept] == ["17a", "17a", "17a", str(run)]
    assert sum(each.features is not None for each in kept) == 3


def test_what_somebody_named_a_task_is_only_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(StoredTask("0" * 16, "{}", "f", "[/x]\x1b[2Jname", "[]"), [])
    assert main(["db", "--store", str(tmp_path / "records.db"), "stats"]) == 0
    shown = capsys.readouterr().out
    assert "[/x]?[2Jname" in shown
    assert "\x1b[2J" not in shown
