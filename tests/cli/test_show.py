from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import (
    TVM_VERSION,
    Target,
    TuningRecord,
    anchor_of,
    json_database,
    te_workload,
    workload_key,
)
from tvm_adaptive.cli import main
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming
from tvm_adaptive.values.run_folder import RECORD_FILE
from tvm_adaptive.workers.environment import Environment

TARGET = Target({"kind": "llvm", "num-cores": 2})
Captured = pytest.CaptureFixture[str]


def keep(folder: Path, name: str, seconds: float | None, seed: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    database = json_database(folder)
    record = make_record(te_workload(name), TARGET, seconds, seed)
    workload = database.commit_workload(te_workload(name))
    database.commit_tuning_record(TuningRecord.from_json(record.as_json(), workload))


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    def write(*names: str) -> Path:
        journal = Journal(tmp_path / "journal.jsonl")
        tasks = [
            {
                "name": name.lower(),
                "weight": 2.0,
                "workload_key": workload_key(te_workload(name)),
                "family": anchor_of(te_workload(name)),
            }
            for name in names
        ]
        journal.write("tasks", tasks=tasks)
        journal.close()
        return tmp_path

    return write


def test_the_tasks_of_a_run_are_listed(write_run: Callable[..., Path], capsys: Captured) -> None:
    folder = write_run("GMM", "C1D", "C2D")
    for seed, seconds in enumerate((3e-3, 1e-3, None), start=1):
        keep(folder, "GMM", seconds, seed)
    keep(folder, "C1D", None)
    assert main(["show", str(folder)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line][-3:]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[0] for row in cells] == ["gmm", "c1d", "c2d"]
    assert cells[0][2:] == ["2", "1", "2", "no"]
    assert cells[1][2:] == ["2", "-", "-", "-"]


def test_what_the_result_was_compared_with_is_shown(
    write_run: Callable[..., Path], capsys: Captured
) -> None:
    folder = write_run("GMM")
    keep(folder, "GMM", 3e-3)
    peer = PeerTiming("ort", "ONNX Runtime 1", 2, (0.02, 0.03), (0.01, 0.01), 0.0, 0.0, True)
    with closing(Journal(folder / "journal.jsonl")) as journal:
        for framework, peers in (("", ()), ("ONNX Runtime 1", (peer,))):
            comparison = Comparison(0.5, 0.01, 0.0, 0.0, True, framework, peers)
            journal.write("comparison", **dataclasses.asdict(comparison))
    assert main(["show", str(folder)]) == 0
    text = capsys.readouterr().out
    assert (
        "2.50 x faster than ONNX Runtime 1 (2 threads): 10.0 ms, was 25.0 ms; 2.00 to 3.00 x"
        in text
    )
    assert "untuned" not in text


def verdict(folder: Path, name: str, seconds: float, seed: int, failure: str = "") -> None:
    mod = te_workload(name)
    trial = trial_of(make_record(mod, TARGET, seconds, seed), failure=failure, run="a")
    VerdictFile(folder, str(TVM_VERSION)).add(task_of(mod, TARGET, name.lower()), [trial])


def row_of(text: str, name: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if f" {name} " in line]
    return [cell.strip() for cell in row.strip("│").split("│")]


@pytest.mark.parametrize("how", ["another run", "another machine"])
def test_the_result_of_another_run_is_not_shown(
    write_run: Callable[..., Path], capsys: Captured, how: str
) -> None:
    folder = write_run("GMM")
    keep(folder, "GMM", 3e-3)
    here = Environment("a processor, 2 cores", "0.27.0", "0.1.14")
    comparison = Comparison(0.5, 0.01, 0.0, 0.0, True)
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", resumed=False, **here.as_fields())
        journal.write("tasks", tasks=[])
        journal.write("comparison", **dataclasses.asdict(comparison))
    assert main(["show", str(folder)]) == 0
    assert "x faster" in capsys.readouterr().out
    is_same = how == "another run"
    there = here if is_same else dataclasses.replace(here, device="another, 2 cores")
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", resumed=not is_same, **there.as_fields())
        tasks = [{"name": "gmm", "weight": 1.0, "workload_key": "key", "family": "matmul"}]
        journal.write("tasks", tasks=tasks)
    assert main(["show", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "gmm" in printed
    assert "x faster" not in printed


def test_what_the_play_off_measured_is_shown(
    write_run: Callable[..., Path], capsys: Captured
) -> None:
    folder = write_run("GMM", "C1D")
    keep(folder, "GMM", 1e-3)
    verdict(folder, "GMM", 4e-3, 2)
    # Without a winner, what a play-off has found out is not the best either.
    keep(folder, "C1D", 1e-3, 1)
    keep(folder, "C1D", 5e-3, 2)
    verdict(folder, "C1D", 1e-3, 1, "wrong result: 3 of 4")
    main(["show", str(folder)])
    text = capsys.readouterr().out
    assert row_of(text, "gmm")[2:] == ["2", "4", "8", "yes"]
    assert row_of(text, "c1d")[2:] == ["2", "5", "10", "no"]


@pytest.mark.parametrize("damage", ["half a line", "empty lines", "nothing", "nan"])
def test_a_run_that_was_killed_is_shown_and_left_as_it_is(
    write_run: Callable[..., Path], damage: str, capsys: Captured
) -> None:
    folder = write_run("GMM")
    for seed, seconds in enumerate((3e-3, 1e-3), start=1):
        keep(folder, "GMM", seconds, seed)
    path = folder / RECORD_FILE
    text = path.read_text()
    path.write_text(
        {
            "half a line": text[:-40],
            "empty lines": text + "\n\n",
            "nothing": text + "[]\n{}\n",
            "nan": text.replace("[0.003", "[nan"),
        }[damage]
    )
    assert path.read_text() != text
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert main(["show", str(folder)]) == 0
    best = "3" if damage == "half a line" else "1"
    assert row_of(capsys.readouterr().out, "gmm")[3] == best
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_a_record_that_tvm_cannot_apply_is_left_out(
    write_run: Callable[..., Path], capsys: Captured
) -> None:
    folder = write_run("GMM")
    for seed, seconds in enumerate((1e-3, 3e-3), start=1):
        keep(folder, "GMM", seconds, seed)
    path = folder / RECORD_FILE
    first, second = path.read_text().splitlines()
    number, fields = json.loads(first)
    fields[0] = [[["AnotherVersions", [], [], []]], []]
    path.write_text(f"{json.dumps([number, fields])}\n{second}\n")
    assert main(["show", str(folder)]) == 0
    assert row_of(capsys.readouterr().out, "gmm")[3] == "3"


def test_the_best_schedule_is_printed_as_a_program(
    write_run: Callable[..., Path], capsys: Captured
) -> None:
    folder = write_run("GMM")
    keep(folder, "GMM", 1e-3)
    assert main(["show", str(folder), "--task", "gmm"]) == 0
    assert "@I.ir_module" in capsys.readouterr().out
    assert main(["show", str(folder), "--trace"]) == 0
    assert "sample_perfect_tile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Nothing was found for task gmm"),
        (["--task", "dense"], "must be one of gmm but got 'dense'"),
    ],
)
def test_a_task_that_is_not_there_gets_one_line(
    write_run: Callable[..., Path], arguments: list[str], text: str, capsys: Captured
) -> None:
    folder = write_run("GMM")
    assert main(["show", str(folder), *(arguments or ["--trace"])]) == 2
    assert text in capsys.readouterr().err


def test_a_run_without_a_search_has_been_compared(tmp_path: Path, capsys: Captured) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    comparison = Comparison(2e-3, 1e-3, 0.0, 0.0, agree=True)
    journal.write("comparison", **dataclasses.asdict(comparison))
    journal.close()
    assert main(["show", str(tmp_path)]) == 0
    assert "2.0 x faster" in capsys.readouterr().out


def test_what_is_no_run_gets_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "is no run's directory" in capsys.readouterr().err
    Journal(tmp_path / "journal.jsonl").close()
    assert main(["show", str(tmp_path)]) == 2
    assert "There is no run" in capsys.readouterr().err
    (tmp_path / "journal.jsonl").write_text("no journal\nat all\n")
    assert main(["show", str(tmp_path)]) == 2
    assert "is not valid JSON" in capsys.readouterr().err
