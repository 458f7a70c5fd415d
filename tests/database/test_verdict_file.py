"""The verdict file of a run, also after a crash and with hostile lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.verdicts import VerdictFile, candidate_key, disqualified_in

TASK = StoredTask("0" * 16, '{"kind":"llvm"}', "matmul", "matmul", "[]")
OTHER = dataclasses.replace(TASK, workload_key="1" * 16)
WINNER = StoredTrial("[[[], []], 1]", 1e-3, error=0.01, unix_sec=5.0, run="a")
WRONG = StoredTrial("[[[], []], 2]", None, failure="wrong result", unix_sec=6.0, run="a")


def test_what_was_written_is_read_in_its_order(tmp_path: Path) -> None:
    file = VerdictFile(tmp_path, "0.27")
    assert file.read() == {}
    file.add(TASK, [WINNER, WRONG])
    file.add(OTHER, [WRONG])
    file.add(TASK, [WRONG])
    again = VerdictFile(tmp_path, "0.27").read()
    assert again == {TASK.identity: [WINNER, WRONG, WRONG], OTHER.identity: [WRONG]}


def test_what_passed_a_looser_tolerance_is_for_this_run(tmp_path: Path) -> None:
    file = VerdictFile(tmp_path, "0.27")
    file.add(TASK, [WINNER, WRONG], is_loose=True)
    assert file.read() == {TASK.identity: [WINNER, WRONG]}
    assert file.read(with_loose=False) == {TASK.identity: [WRONG]}


def test_a_long_failure_is_cut_and_not_lost(tmp_path: Path) -> None:
    file = VerdictFile(tmp_path, "0.27")
    file.add(TASK, [dataclasses.replace(WRONG, failure="x" * 100_000)])
    (found,) = file.read()[TASK.identity]
    assert set(found.failure) == {"x"}


def test_another_compiler_may_make_other_kernels(tmp_path: Path) -> None:
    VerdictFile(tmp_path, "0.26").add(TASK, [WINNER])
    file = VerdictFile(tmp_path, "0.27")
    assert file.read() == {}
    file.add(TASK, [WRONG])
    assert file.read() == {TASK.identity: [WRONG]}


def test_what_any_compiler_or_play_off_disqualified_stays_so(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    for folder in (first, second, third):
        folder.mkdir()
    assert disqualified_in(first, second) == {}
    again = dataclasses.replace(WRONG, record="[[[], []], 3]", failure="crash")
    VerdictFile(first, "0.26").add(TASK, [WINNER, WRONG])
    VerdictFile(first, "0.27").add(TASK, [dataclasses.replace(WRONG, seconds=1.0, failure="")])
    VerdictFile(second, "0.27").add(TASK, [again])
    VerdictFile(second, "0.27").add(OTHER, [WINNER])
    key = TASK.workload_key
    assert disqualified_in(first, third) == {key: {candidate_key(WRONG)}}
    assert disqualified_in(first, second) == {key: {candidate_key(WRONG), candidate_key(again)}}


def test_a_cut_at_any_byte_costs_the_last_verdict_only(tmp_path: Path) -> None:
    file = VerdictFile(tmp_path, "0.27")
    file.add(TASK, [WINNER])
    n_first = file.path.stat().st_size
    file.add(OTHER, [WRONG])
    whole = file.path.read_bytes()
    for n_bytes in range(n_first, len(whole)):
        file.path.write_bytes(whole[:n_bytes])
        is_whole = n_bytes == len(whole) - 1  # it lacks its newline only
        assert set(file.read()) == {TASK.identity, *([OTHER.identity] if is_whole else [])}
        file.add(OTHER, [WINNER])
        assert file.read()[OTHER.identity][-1] == WINNER


@pytest.mark.parametrize(
    "change",
    [
        {"finals": [{}]},
        {"finals": 5},
        {"finals": [5]},
        {"identity": "ab c"},
        {"version": 99},
        {"finals": [{**dataclasses.asdict(WINNER), "seconds": -1.0}]},
        {"finals": [{**dataclasses.asdict(WINNER), "seconds": "fast"}]},
        {"finals": [{**dataclasses.asdict(WINNER), "record": None}]},
        {"finals": [{**dataclasses.asdict(WINNER), "record": "[1]"}]},
    ],
)
def test_a_line_that_says_something_else_is_left_out(tmp_path: Path, change: object) -> None:
    file = VerdictFile(tmp_path, "0.27")
    file.add(TASK, [WINNER])
    line = json.loads(file.path.read_text())
    assert isinstance(change, dict)
    with file.path.open("a") as opened:
        opened.write(json.dumps({**line, **change}) + "\n" + "[" * 100_000 + "\n5\n")
    file.add(OTHER, [WRONG])
    assert file.read() == {TASK.identity: [WINNER], OTHER.identity: [WRONG]}
