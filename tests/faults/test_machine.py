"""Machines that run out of processes, memory or disk while candidates are built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.observers import Notes
from tests.tuning.runs import journalled_trials, recorded_programs
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive._tvm import BuilderResult, PyBuilder, derived_object, json_database
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import MACHINE_FAILURE
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig
from tvm_adaptive.tuning.resume import resume

REASON = "no process could be started"
QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=4), finish=FinishConfig(top_k=1, max_task_sec=0.5)
)


@derived_object
class FailingBuilder(PyBuilder):  # type: ignore[misc]
    """Fails some candidates of a real builder as a machine would."""

    def __init__(self, inner: Any, is_failed: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner = inner
        self.is_failed = is_failed
        self.n_seen = 0

    def build(self, build_inputs: Any) -> list[Any]:
        found = []
        for result in self.inner.build(build_inputs):
            failed = BuilderResult(None, f"{MACHINE_FAILURE}{REASON}")
            found.append(failed if self.is_failed(self.n_seen) else result)
            self.n_seen += 1
        return found

    def close(self) -> None:
        self.inner.close()


@contextlib.contextmanager
def failing(is_failed: Callable[[int], bool]) -> Iterator[None]:
    constructors = registry.PARTS["builder"].constructors
    sound = constructors["persistent"]
    # Play-offs have a builder of their own, which shall work.
    made: list[int] = []

    def construct(**options: Any) -> Any:
        made.append(1)
        inner = sound(**options)
        return FailingBuilder(inner, is_failed) if len(made) == 1 else inner

    constructors["persistent"] = construct
    try:
        yield
    finally:
        constructors["persistent"] = sound


def stored(path: Path) -> list[Any]:
    with RecordStore(path) as store:
        return [trial for task in store.tasks() for trial in store.latest(task)]


@pytest.fixture
def config(tmp_path: Path) -> TuneConfig:
    return QUICK.replace(store=str(tmp_path / "store.db"))


def test_what_the_machine_failed_is_no_trial_and_is_kept_nowhere(
    tmp_path: Path, config: TuneConfig
) -> None:
    with failing(lambda number: number == 1):
        report = tune("te:GMM", work_dir=tmp_path / "run", trials=8, seed=3, config=config)
    assert not report.interrupted
    assert (report.n_trials, report.n_errors) == (7, 0)
    assert len(recorded_programs(tmp_path / "run")) == journalled_trials(tmp_path / "run") == 7
    assert len(stored(tmp_path / "store.db")) == len(stored(tmp_path / "run" / "records.db")) == 7
    measured = [
        e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "measured"
    ]
    assert sum(each["n_machine_failures"] for each in measured) == 1


@pytest.mark.slow
def test_a_machine_that_fails_all_ends_the_run_which_goes_on_later(
    tmp_path: Path, config: TuneConfig
) -> None:
    observer = Notes()
    with failing(lambda number: number >= 4):
        report = tune(
            "te:GMM", work_dir=tmp_path / "run", trials=24, seed=3, config=config, observer=observer
        )
    assert report.interrupted
    assert REASON in report.stopped
    assert (report.n_trials, report.n_errors) == (4, 0)
    (note,) = (note for note in observer.notes if REASON in note)
    assert f"--resume {tmp_path / 'run'}" in note
    assert len(json_database(tmp_path / "run")) == 4

    report = resume(tmp_path / "run", trials=12)
    assert not report.interrupted
    assert (report.n_trials, report.n_errors) == (12, 0)
    assert len(recorded_programs(tmp_path / "run")) == 12
