"""Short runs for tests, and the records and trials in the directory of a run."""

from __future__ import annotations

from pathlib import Path

from tvm_adaptive import TuneConfig
from tvm_adaptive._tvm import Schedule, json_database
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig

QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=4, population_size=64, genetic_num_iters=1),
    finish=FinishConfig(top_k=1, max_task_sec=0.5),
    store="none",
)


def recorded_programs(work_dir: Path) -> list[str]:
    """Return the program of each record of a run's database, as text."""
    found = []
    for record in json_database(work_dir).get_all_tuning_records():
        schedule = Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        found.append(schedule.mod.script())
    return found


def journalled_trials(work_dir: Path) -> int:
    """Return the number of trials in a run's journal, of all attempts together."""
    path = work_dir / "journal.jsonl"
    if not path.exists():
        return 0
    measured = (event for event in read_journal(path) if event["event"] == "measured")
    return sum(len(event["latencies_ms"]) for event in measured)
