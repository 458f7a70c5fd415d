"""Disks that fill up while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive import TuneConfig, tune
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig
from tvm_adaptive.tuning.resume import resume
from tvm_adaptive.tuning.session import LEAST_FREE_BYTES

QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=4),
    finish=FinishConfig(top_k=1, max_task_sec=0.5),
    store="none",
)
MIB = 2**20


def test_a_journal_keeps_what_it_has(make_disk: Callable[[int], Path]) -> None:
    disk = make_disk(64 << 10)
    journal = Journal(disk / "journal.jsonl")
    n_written = 0
    while journal.failure is None:
        journal.write("trial", number=n_written, text="x" * 3000)
        n_written += 1
    journal.write("trial", number=n_written, text="x" * 3000)
    assert "No space left" in str(journal.failure)
    events = read_journal(disk / "journal.jsonl")
    assert [event["number"] for event in events[1:]] == list(range(n_written - 1))
    # As soon as there is room it goes on, on a line of its own.
    journal.write("small")
    journal.close()
    assert read_journal(disk / "journal.jsonl")[-1]["event"] == "small"


class Filler:
    """Fills the disk during the first round."""

    def __init__(self, disk: Path) -> None:
        self.file = disk / "somebody-elses"
        self.notes: list[str] = []

    def stage(self, name: str) -> None:
        pass

    def round(self, progress: Any, budget: Any) -> None:
        if not self.file.exists():
            free = shutil.disk_usage(self.file.parent).free
            self.file.write_bytes(bytes(free - LEAST_FREE_BYTES // 2))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_a_run_ends_in_time_and_goes_on_when_there_is_room(
    make_disk: Callable[[int], Path],
) -> None:
    disk = make_disk(64 * MIB)
    filler = Filler(disk)
    report = tune("te:GMM", work_dir=disk / "run", trials=12, seed=1, config=QUICK, observer=filler)
    assert report.interrupted
    assert "MiB are left" in report.stopped
    assert 0 < report.n_trials < 12
    assert report.n_errors == 0
    (note,) = (note for note in filler.notes if "MiB are left" in note)
    assert f"--resume {disk / 'run'}" in note
    filler.file.unlink()
    report = resume(disk / "run")
    assert not report.interrupted
    assert report.n_trials == 12
    assert report.comparison is not None
    assert report.comparison.agree


def test_a_run_does_not_begin_without_room(make_disk: Callable[[int], Path]) -> None:
    disk = make_disk(1 * MIB)
    with pytest.raises(InvalidOptionError, match="There is no room for a run: only 1 MiB"):
        tune("te:GMM", work_dir=disk / "run", trials=4, config=QUICK)
    assert list(disk.iterdir()) == []
