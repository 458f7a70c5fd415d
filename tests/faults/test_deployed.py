"""Fast kernels that compute nothing, and what is deployed of runs that are stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.injection import Faults, injected
from tests.tuning.observers import NoObserver
from tests.tuning.runs import journalled_trials
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive._tvm import (
    TVM_VERSION,
    TuningRecord,
    functions_as_tasks,
    json_database,
    structural_hash,
    te_workload,
)
from tvm_adaptive.database.verdicts import VERDICT_FILE, VerdictFile
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning import deploy
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig
from tvm_adaptive.tuning.finals.finalists import finalists_of_run
from tvm_adaptive.tuning.resume import resume
from tvm_adaptive.values.run_folder import RECORD_FILE

QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=8, population_size=64, genetic_num_iters=1),
    finish=FinishConfig(top_k=8, n_qualifiers=0, max_task_sec=0.3),
    store="none",
)
GMM = te_workload("GMM")
FAULTS = Faults(swapped=0.5, seed=1)


def is_wrong(record: TuningRecord) -> bool:
    return FAULTS.of(structural_hash(record.as_measure_candidate().sch.mod)) == "swapped"


def seconds_of(record: TuningRecord) -> float:
    return float(record.run_secs[0])


def recorded(folder: Path) -> list[TuningRecord]:
    records = json_database(folder).get_all_tuning_records()
    return sorted(records, key=seconds_of)


def flatter_wrong_ones(run: Path) -> None:
    """Let wrong kernels be the fastest that were recorded."""
    workload = json_database(run).get_all_tuning_records()[0].workload
    lines = [json.loads(line) for line in (run / RECORD_FILE).read_text().splitlines()]
    for _, record in lines:
        if is_wrong(TuningRecord.from_json(record, workload)):
            record[1] = [1e-6]
    (run / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class InterruptInSearch(NoObserver):
    """Interrupts after the first round."""

    def round(self, progress: Any, budget: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[TuningRecord]:
    """Return what was applied; the last comes last."""
    found: list[TuningRecord] = []

    def note(*arguments: Any) -> Any:
        database = check(*arguments)
        found.extend(database.get_all_tuning_records())
        return database

    check = deploy.checked_database
    monkeypatch.setattr(deploy, "checked_database", note)
    return found


def apply(run: Path, out_dir: Path) -> list[dict[str, Any]]:
    """Apply a run; return its play-offs, of which there is none where all was checked."""
    applied = deploy.apply(str(run), out_dir=out_dir)
    assert applied.comparison is not None
    assert applied.comparison.agree
    events = read_journal(out_dir / deploy.APPLY_FILE)
    return [event for event in events if event["event"] == "playoff"]


@pytest.mark.slow
def test_a_finished_run_that_is_interrupted_later_deploys_what_was_checked(
    tmp_path: Path, deployed: list[TuningRecord]
) -> None:
    run = tmp_path / "run"
    with injected(FAULTS):
        first = tune("te:GMM", work_dir=run, trials=8, seed=3, config=QUICK)
        (winner,) = recorded(run / "final")
        assert first.tasks[0].n_disqualified > 0
        flatter_wrong_ones(run)
        again = resume(run, trials=400, observer=InterruptInSearch())
        assert again.interrupted
        assert is_wrong(recorded(run)[0])
        # What the first play-off has proven stands, and is reported as checked.
        (kept,) = recorded(run / "final")
        assert seconds_of(kept) == seconds_of(winner) == again.tasks[0].best_sec
        assert again.tasks[0].played_off
        (mine,) = finalists_of_run(run, kept.target, functions_as_tasks(GMM, kept.target))
        assert mine.proven is not None
        assert seconds_of(mine.proven.record) == seconds_of(winner)

        # As if it had been killed before it held any play-off.
        (run / VERDICT_FILE).unlink()
        shutil.rmtree(run / "final")
        before = sorted(path.name for path in run.iterdir())
        (held,) = apply(run, tmp_path / "out")
    assert held["disqualified"]
    assert not is_wrong(deployed[0])
    assert sorted(path.name for path in run.iterdir()) == before


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Run the command line with the faults."""
    program = (
        "import sys; from tvm_adaptive.cli import main; "
        "from benchmarks.faults.injection import Faults, injected\n"
        f"with injected({FAULTS!r}): sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "tune", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# A run begins to measure some 4 s after its start, and comes to its end after some 12 s.
LONGEST_SEC = 15.0
N_STOPS = 20


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whenever_a_run_is_stopped_what_is_applied_was_checked(
    tmp_path: Path, number: signal.Signals, deployed: list[TuningRecord]
) -> None:
    run, rng = tmp_path / "run", random.Random(int(number))
    with injected(FAULTS):
        tune("te:GMM", work_dir=run, trials=16, seed=3, config=QUICK)
    for stop in range(N_STOPS):
        flatter_wrong_ones(run)
        process = start("--resume", str(run), "--trials", str(journalled_trials(run) + 24))
        end_sec = time.monotonic() + rng.uniform(1.0, LONGEST_SEC)
        while time.monotonic() < end_sec and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(timeout=600)
        with injected(FAULTS):
            assert apply(run, tmp_path / "out") == [], "it was checked before"
        assert len(deployed) == stop + 1
        assert not is_wrong(deployed[-1])
        (said,) = VerdictFile(run, str(TVM_VERSION)).read().values()
        sound = {each.seconds for each in said if not each.failure}
        assert seconds_of(deployed[-1]) in sound
