from __future__ import annotations

from pathlib import Path

import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import Target, te_workload
from tvm_adaptive.cli import main
from tvm_adaptive.database.metaschedule import StoreDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.memory import user_store


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
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("2 records")
    assert "2 records added, 0 left out" in told[1]
    assert told[2].endswith("2 trials deleted")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--store", "nowhere.db", "stats"], "no record store nowhere.db"),
        (["stats"], "no record store"),
        (["--store", "none", "stats"], "names no store"),
        (["import", "nowhere"], "holds no database"),
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
