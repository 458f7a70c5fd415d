from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import commands
from benchmarks.budgets import __main__ as command
from benchmarks.peers.models import model_of_file

PAGE = Path(commands.__file__).with_name("README.md")
# The second has runs that were made again, at a later commit.
FILES = ("budgets", "again")
SECS = {"30s-0": [3e-3, 3e-3, 9e-3], "60s-0": [1e-3, 2e-3, 4e-3], "600s-0": [1e-3, 2e-3, 3e-3]}


def row(**changes: Any) -> dict[str, Any]:
    return {"model": "net", "reference": "600s-0", "secs": SECS, **changes}


def test_ratios_are_medians_of_pairs() -> None:
    medians = {name: ratio.value for name, ratio in command.ratios_of(row()).items()}
    assert medians == pytest.approx({"30s-0": 3.0, "60s-0": 1.0, "600s-0": 1.0})


def test_the_interval_of_a_library_with_two_speeds_has_both() -> None:
    secs = {"30s-0": [*[1.4e-3, 0.6e-3] * 7, 1.4e-3], "600s-0": [1e-3] * 15}
    ratio = command.ratios_of(row(secs=secs))["30s-0"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.4, 0.6, 1.4))
    text = command.table([row(secs=secs)])
    assert "| net | 1.40 (0.60 to 1.40) | 1 ms |" in text
    assert "| *worst* | 1.40 (0.60 to 1.40) |  |" in text


def test_the_table_has_the_mean_and_the_worst_of_each_budget() -> None:
    slow = {**SECS, "30s-0": [12e-3, 24e-3, 36e-3]}
    text = command.table([row(), row(model="other", secs=slow)])
    assert "| net | 3.00 (1.50 to 3.00) | 1.00 (1.00 to 1.33) | 2 ms |" in text
    assert "| *geometric mean* | 6.00 | 1.00 |  |" in text
    assert "| *worst* | 12.00 (12.00 to 12.00) | 1.00 (1.00 to 1.33) |  |" in text


def test_the_page_has_the_ratios_of_the_rows_that_are_kept() -> None:
    folder, page = PAGE.parent / "results" / "budgets", PAGE.read_text()
    kept, again = (command.read_rows(folder / f"{name}.jsonl", "model") for name in FILES)
    assert len(kept) == 8
    for model, fields in kept.items():
        ratios = command.ratios_of(fields)
        if model in again:
            ratios.update(command.ratios_of(again[model]))
        for budget in ("30s", "60s"):
            cells = [command._cell(ratios[f"{budget}-{seed}"]) for seed in range(3)]
            assert f": {'; '.join(cells)} |" in page


def test_only_what_is_not_finished_is_run_and_the_latest_row_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = []

    def tune(
        _model: Any,
        path: Path,
        work_dir: Path,
        options: argparse.Namespace,
        *,
        extra: Any,
        program: Any,
    ) -> None:
        assert extra == ()
        assert path.read_text() == "a model"
        tuned.append((options.budget, options.seed))
        work_dir.mkdir()
        (work_dir / "journal.jsonl").write_text(json.dumps({"event": "end"}) + "\n")
        (work_dir / "net.so").touch()

    timed = []

    def secs_in_turns(libraries: dict[str, Path], *_rest: Any) -> dict[str, list[float]]:
        timed.append(libraries)
        return {name: [1e-3 * len(tuned)] for name in libraries}

    monkeypatch.setattr(commands, "tune", tune)
    monkeypatch.setattr(command, "secs_in_turns", secs_in_turns)
    model = tmp_path / "net.onnx"
    model.write_text("a model")
    out = tmp_path / "out"
    arguments = [str(out), "--models", str(model), "--budgets", "30s", "--reference", "1m"]
    command.main([*arguments, "--seeds", "0", "1"])
    assert tuned == [(30.0, 0), (30.0, 1), (60.0, 0)]
    command.main([*arguments, "--seeds", "0", "1", "2"])
    assert tuned[3:] == [(30.0, 2)]
    timed.clear()
    command.main([*arguments, "--seeds", "0", "1"])
    assert timed == []
    capsys.readouterr()
    command.main([str(out), "--table"])
    same = "1.00 (1.00 to 1.00)"
    assert f"| net | {same} | {same} | {same} | 4 ms |" in capsys.readouterr().out


def test_a_network_that_fails_leaves_the_others_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = {"first"}

    def tune(model: Any, _path: Path, work_dir: Path, *_rest: Any, **_given: Any) -> None:
        if model.name in fails:
            raise OSError("tune ended with 2: the reason")
        work_dir.mkdir()
        (work_dir / "journal.jsonl").write_text(json.dumps({"event": "end"}) + "\n")
        (work_dir / "net.so").touch()

    def secs_in_turns(libraries: dict[str, Path], *_rest: Any) -> dict[str, list[float]]:
        return {name: [1e-3] for name in libraries}

    monkeypatch.setattr(commands, "tune", tune)
    monkeypatch.setattr(command, "secs_in_turns", secs_in_turns)
    models = [tmp_path / f"{name}.onnx" for name in ("first", "second")]
    for each in models:
        each.write_text("a model")
    out = tmp_path / "out"
    arguments = [str(out), "--models", *map(str, models), "--seeds", "0"]
    assert command.main(arguments) == 1
    assert list(command.read_rows(out / command.ROWS_FILE, "model")) == ["second"]
    printed = capsys.readouterr()
    assert "| second | 1.00 (1.00 to 1.00) |" in printed.out
    assert printed.err.splitlines() == [
        "first: tune ended with 2: the reason",
        "failed: first",
    ]
    fails.clear()
    assert command.main(arguments) == 0
    assert list(command.read_rows(out / command.ROWS_FILE, "model")) == ["second", "first"]


@pytest.mark.parametrize(
    "last", ['{"event": "round"}\n', '{"event": "end", "interrupted": true}\n', '{"event": "e', ""]
)
def test_a_run_without_its_own_end_has_no_library(tmp_path: Path, last: str) -> None:
    assert commands.library_of(tmp_path) is None
    (tmp_path / "net.so").touch()
    (tmp_path / "journal.jsonl").write_text(last)
    assert commands.library_of(tmp_path) is None
    (tmp_path / "journal.jsonl").write_text('{"event": "end", "interrupted": false}\n')
    assert commands.library_of(tmp_path) == tmp_path / "net.so"


def test_a_file_is_a_model_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_text("a model")
    model = model_of_file(path)
    assert model.file(tmp_path / "copies") == tmp_path / "copies" / "net.onnx"
