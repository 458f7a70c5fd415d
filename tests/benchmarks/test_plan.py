from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.methods import choose_methods
from benchmarks.plan import (
    OUTCOME_FILE,
    RunSpec,
    interleaved,
    is_finished,
    read_outcome,
    write_outcome,
)
from benchmarks.workloads import choose_workloads

Spec = Callable[..., RunSpec]


def test_methods_take_turns_at_being_first() -> None:
    methods = choose_methods(["stock", "default", "paper"])
    workloads = choose_workloads(["te:C2D", "te:GMM"])
    order = [(w.name, m.name, s) for w, m, s in interleaved(workloads, methods, range(3))]
    assert len(order) == len(set(order)) == 18
    firsts = [order[n][1] for n in range(0, 18, 6)]
    assert firsts == ["stock", "default", "paper"]
    # All methods of a workload and seed before the next workload.
    assert {(w, s) for w, _, s in order[:3]} == {("te:C2D", 0)}


def test_a_run_is_finished_only_with_its_outcome(tmp_path: Path, spec: Spec) -> None:
    run = spec()
    folder = tmp_path / run.folder
    assert not is_finished(tmp_path, run)
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("{}\n")
    assert not is_finished(tmp_path, run)
    write_outcome(folder, run, status="done")
    assert is_finished(tmp_path, run)
    assert not is_finished(tmp_path, spec(seed=1))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "done"}'])
def test_half_an_outcome_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / OUTCOME_FILE).write_text(text)
    assert read_outcome(tmp_path) is None


def test_other_settings_are_another_benchmark(tmp_path: Path, spec: Spec) -> None:
    run = spec()
    folder = tmp_path / run.folder
    folder.mkdir(parents=True)
    write_outcome(folder, RunSpec(run.workload, run.method, 0, 7, None, "cpu", 2), status="done")
    with pytest.raises(ValueError, match=r"other settings.*another --out"):
        is_finished(tmp_path, run)
