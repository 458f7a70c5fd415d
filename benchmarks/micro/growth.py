"""What a round costs as trials and tasks grow: model, search, scheduler, and the tuner's memory.

    python -m benchmarks.micro.growth --out growth.json
    python -m benchmarks.micro.growth --out network.json --made-up --tasks 100 --trials 100000

A search of one operator with made-up times, without building or measuring: whatever it
takes is ours. Its records go into a run's database and into its own store, its events
through a journal to a screen, as those of a run do, and at the end another process resumes
from them. Seconds are of processors, so that a busy machine does not show.

With ``--tasks`` as many small products are opened. With ``--made-up`` only the first round of
each task is a real one; later ones are made up of what a round leaves behind: points and
programs that are known, rows of features, records, events. So memory is what it would be but
for what TVM may leave, seconds are not, and there is nothing to resume.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tvm
from tvm import te

from benchmarks.machine import write_figure
from benchmarks.tables import markdown
from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._tvm import (
    BuilderResult,
    IRModule,
    MeasureCandidate,
    RunnerResult,
    TuneContext,
    TuningRecord,
    functions_as_tasks,
    python_side,
)
from tvm_adaptive._tvm.intrinsics import only_intrinsics
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.store_callback import StoreCallback
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.models import load_workload
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.search_strategy.schedules import knobs_of
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.policy import DynaTunePolicy
from tvm_adaptive.task_scheduler.slot_queue import ArmTable
from tvm_adaptive.tuning.prior_trials import restore
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.tuning.warm_start import RUN_STORE
from tvm_adaptive.values.trial_log import TrialLog

BATCH = 16
# Where the table looks: the mean of the rounds around these numbers of trials.
TRIALS = (100, 1_000, 10_000, 20_000)
# Rounds refit only when the data have grown by 5 %: a window has to hold some of each.
WINDOW = 0.25
ARMS = (10, 100)
# Candidates that a round looks at, measured or not.
LOOKED_AT = 96
# Enough rounds between two looks at how large the parts are, which costs a copy of them.
ROUNDS_PER_LOOK = 50


def main() -> None:
    parser = argparse.ArgumentParser(description="what a round costs as trials and tasks grow")
    parser.add_argument("--workload", default="te:GMM")
    parser.add_argument("--trials", type=int, nargs="+", default=list(TRIALS))
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--made-up", action="store_true", help="no search after first rounds")
    parser.add_argument("--arms", type=int, nargs="*", default=list(ARMS))
    parser.add_argument("--folder", type=Path, help="where the run is written; kept")
    parser.add_argument("--resume", action="store_true", help="go on in --folder for a round")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.resume:
        options.out.write_text(json.dumps(resumed(modules_of(options), options.folder)))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        n_trials = max(options.trials)
        rounds = []
        with open(options.out.with_suffix(".jsonl"), "w") as progress:
            growth = Growth(modules_of(options), folder)
            for each in growth.rounds(n_trials, options.made_up):
                rounds.append(each)
                print(json.dumps(each), file=progress, flush=True)
        after = None if options.made_up else resume_elsewhere(options, folder)
    decisions = [decide(n_arms, n) for n_arms in options.arms for n in options.trials[:-1]]
    found = {"workload": options.workload, "tasks": options.tasks, "rounds": rounds}
    write_figure(options.out, {**found, "resumed": after, "decisions": decisions})
    print(table(rounds, options.trials))
    print(f"\nresumed: {after}\n")
    print(table_of_decisions(decisions))


def modules_of(options: argparse.Namespace) -> list[IRModule]:
    """Return one module per task: the workload, or products of different sizes."""
    if options.tasks == 1:
        return [load_workload(options.workload).mod]
    return [product(16 * (1 + number)) for number in range(options.tasks)]


def product(rows: int) -> IRModule:
    """Return a product of a matrix of so many rows and a square one."""
    a, b = te.placeholder((rows, 64), name="a"), te.placeholder((64, 64), name="b")
    k = te.reduce_axis((0, 64), name="k")
    c = te.compute((rows, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


class Growth:
    """The parts of a run that outlive its rounds, around made-up times.

    Parameters
    ----------
    mods : list of IRModule
        One per task.
    folder : Path
        Of the run; what is in it is continued.
    """

    def __init__(self, mods: list[IRModule], folder: Path) -> None:
        self.target = resolve_target("cpu")
        self.history = RunHistory(keeps_all=False)
        self.journal = Journal(folder / "journal.jsonl", self.history.add)
        self.database = RunDatabase(folder)
        self.trial_log = TrialLog()
        self.model = RFEICostModel(seed=1, trial_log=self.trial_log, journal=self.journal)
        self.contexts = [self._context(number, mod) for number, mod in enumerate(mods)]
        self.store = RecordStore(folder / RUN_STORE)
        self.store_callback = StoreCallback(
            self.contexts,
            own=self.store,
            shared=None,
            run="run",
            trial_log=self.trial_log,
            journal=self.journal,
        )
        self.arm_table = ArmTable(
            [str(each.task_name) for each in self.contexts],
            [1.0] * len(mods),
            [1e8] * len(mods),
        )
        self.rng = np.random.default_rng(1)
        # Traces and arguments of each task's first batch, and its features: a program would
        # be a hundred times as large.
        self.first: dict[int, tuple[list[tuple[Any, Any]], np.ndarray]] = {}

    def open(self) -> None:
        """Begin the search of all tasks, as MetaSchedule does before the first round."""
        for context in self.contexts:
            context.search_strategy.pre_tuning(
                10**8, BATCH, context.generate_design_space(), self.database, self.model
            )

    def rounds(self, n_trials: int, are_made_up: bool = False) -> Iterator[dict[str, Any]]:
        """Run rounds, the tasks in turn; yield what each of them cost and left behind."""
        self.open()
        process = psutil.Process()
        n_done = 0
        sizes: dict[str, float] = {}
        while n_done < n_trials:
            number = n_done // BATCH
            task = number % len(self.contexts)
            is_made_up = are_made_up and task in self.first
            took = self.made_up_round(task) if is_made_up else self.real_round(task)
            if took is None:
                return
            n_done += BATCH
            if number % ROUNDS_PER_LOOK == 0:
                sizes = self.sizes_mb()
            yield {
                "n_trials": n_done,
                "propose_sec": took[0],
                "learn_sec": took[1],
                "keep_sec": took[2],
                "rss_mb": process.memory_info().rss / 2**20,
                "peak_mb": peak_mb(),
                **sizes,
            }

    def real_round(self, task: int) -> tuple[float, float, float] | None:
        """Search a batch, learn and keep made-up times; return the seconds of each."""
        context = self.contexts[task]
        clock = [time.process_time()]
        batch = context.search_strategy.generate_measure_candidates()
        clock.append(time.process_time())
        if not batch:
            return None
        results = [RunnerResult([made_up_sec(candidate)], None) for candidate in batch]
        start_sec = time.process_time()
        context.search_strategy.notify_runner_results(batch, results)
        self.model.update(context, batch, results)
        learn_sec = time.process_time() - start_sec
        records = [(each.sch.trace, each.args_info) for each in batch]
        if task not in self.first:
            self.first[task] = records, python_side(self.model).describe(context, batch)
        keep_sec = self.keep(task, records, results)
        start_sec = time.process_time()
        built = [BuilderResult("made up", None)] * len(batch)
        self.store_callback._inst.apply(None, task, batch, built, results)
        return clock[1] - clock[0], learn_sec, keep_sec + time.process_time() - start_sec

    def made_up_round(self, task: int) -> tuple[float, float, float]:
        """Leave behind what a round does, without a search."""
        context = self.contexts[task]
        records, rows = self.first[task]
        proposer = python_side(context.search_strategy).state.proposer
        pool, space = proposer.candidates.pool, proposer.candidates.space
        points = [space.draw(self.rng) for _ in range(LOOKED_AT)]
        keys = self.rng.integers(2**63, size=LOOKED_AT).tolist()
        many = np.repeat(rows, LOOKED_AT // len(rows) + 1, axis=0)[:LOOKED_AT]
        noise = 0.01 * self.rng.random(many.shape, dtype=np.float32)
        many = np.where(many == 0, 0, many + noise).astype(np.float32)
        pool.add(points, keys, many)
        pool.take(range(len(pool) - BATCH, len(pool)))
        pool.trim(self.rng.random(len(pool)))
        proposer.excluded.update(keys[:BATCH])
        seconds = np.exp(self.rng.normal(-9.0, 0.7, BATCH))
        results = [RunnerResult([float(sec)], None) for sec in seconds]
        start_sec = time.process_time()
        python_side(self.model).restore(context, many[:BATCH], seconds)
        python_side(self.model).refit(context)
        learn_sec = time.process_time() - start_sec
        self.journal.write("round", task=context.task_name, sample_sec=0.1, evolve_sec=0.2)
        again = [records[i % len(records)] for i in range(BATCH)]
        return 0.0, learn_sec, self.keep(task, again, results)

    def keep(self, task: int, records: list[tuple[Any, Any]], results: list[RunnerResult]) -> float:
        """Write records and events of a batch, as a run's callbacks do; return the seconds."""
        start_sec = time.process_time()
        context = self.contexts[task]
        workload = self.database.commit_workload(context.mod)
        for (trace, infos), result in zip(records, results, strict=True):
            self.database.commit_tuning_record(
                TuningRecord(trace, workload, result.run_secs, self.target, infos)
            )
        latencies_ms = [1e3 * float(result.run_secs[0]) for result in results]
        self.arm_table.add_trials(task, latencies_ms)
        name = str(context.task_name)
        self.journal.write("build", n=len(records), n_errors=0, seconds=0.5)
        for number, latency_ms in enumerate(latencies_ms):
            self.journal.write("timing", index=number, mean_sec=latency_ms / 1e3, elapsed_sec=0.1)
        self.journal.write("measured", task=name, weight=1.0, latencies_ms=latencies_ms, flop=1e8)
        return time.process_time() - start_sec

    def sizes_mb(self) -> dict[str, float]:
        """Return what each part holds, as so many bytes of a pickle."""
        proposers = [
            python_side(context.search_strategy).state.proposer for context in self.contexts
        ]
        pools = [each.candidates.pool for each in proposers]
        known = [
            (each.excluded, pool._known, pool._known_keys)
            for each, pool in zip(proposers, pools, strict=True)
        ]
        dataset = python_side(self.model)._surrogate.dataset
        indices = python_side(self.database)._indices
        parts = {
            "database": [(each.mean_secs, each.offsets) for each in indices.values()],
            "known": known,
            "pools": [pool.rows for pool in pools],
            "dataset": [task for _, task in dataset],
            "builds": [each.candidates.build_cost.carry() for each in proposers],
            "screen": [self.history],
            "scheduler": self.arm_table.arms,
        }
        # One at a time: a pickle of all pools would be the largest part itself.
        return {
            f"{name}_mb": sum(len(pickle.dumps(each)) for each in part) / 2**20
            for name, part in parts.items()
        }

    def _context(self, number: int, mod: IRModule) -> TuneContext:
        (task,) = functions_as_tasks(mod, self.target)
        with only_intrinsics(("x86",)):
            return TuneContext(
                task.dispatched[0],
                target=self.target,
                space_generator="post-order-apply",
                search_strategy=AdaptiveSearch(journal=self.journal, prefetch=True),
                task_name=f"task{number}",
                rand_state=1,
                num_threads=2,
            )


def peak_mb() -> float:
    """Return the most memory that this process ever had."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def resumed(mods: list[IRModule], folder: Path) -> dict[str, Any]:
    """Open a run's directory, restore all that a resumed run does, and propose a batch."""
    process = psutil.Process()
    start_sec, start_cpu_sec = time.perf_counter(), time.process_time()
    growth = Growth(mods, folder)
    before_mb = process.memory_info().rss / 2**20
    n_samples = restore(growth.store, growth.contexts, python_side(growth.model))
    growth.open()
    opened_sec = time.perf_counter() - start_sec
    growth.real_round(0)
    return {
        "n_records": len(growth.database),
        "n_samples": n_samples,
        "opened_sec": opened_sec,
        "first_round_sec": time.perf_counter() - start_sec,
        "cpu_sec": time.process_time() - start_cpu_sec,
        "before_mb": before_mb,
        "rss_mb": process.memory_info().rss / 2**20,
        "peak_mb": peak_mb(),
    }


def resume_elsewhere(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what :func:`resumed` does in a process of its own."""
    out = folder / "resumed.json"
    command = [sys.executable, "-m", "benchmarks.micro.growth", "--resume"]
    command += ["--workload", options.workload, "--tasks", str(options.tasks)]
    command += ["--folder", str(folder), "--out", str(out)]
    subprocess.run(command, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def made_up_sec(candidate: MeasureCandidate) -> float:
    """Return seconds that decisions decide smoothly, so that there is something to find."""
    seconds = 1e-4
    for knob in knobs_of(candidate.sch):
        if len(knob) == 4:
            seconds *= 1 + 0.15 * abs(np.log2(knob[-1] * knob[-2]) - 2)
            seconds *= 1 + 0.1 * abs(np.log2(knob[0]) - 1)
        else:
            seconds *= 1 + 0.1 * abs(knob[-1] - 1) ** 0.5
    return float(seconds)


def decide(n_arms: int, n_trials: int, n_decisions: int = 10) -> dict[str, Any]:
    """Time the scheduler's decisions among arms of so many trials each."""
    rng = np.random.default_rng(0)
    policy = DynaTunePolicy()
    arms = [made_up_arm(i, n_trials, rng) for i in range(n_arms)]
    seconds = []
    for _ in range(n_decisions):
        start_sec = time.process_time()
        decision = policy.choose(arms, rng)
        seconds.append(time.process_time() - start_sec)
        if decision.arm is not None:  # its slot
            arms[decision.arm] = made_up_arm(decision.arm, n_trials + BATCH, rng)
    return {
        "n_arms": n_arms,
        "n_trials": n_trials,
        "first_sec": seconds[0],
        "later_sec": float(np.mean(seconds[1:])),
    }


def made_up_arm(number: int, n_trials: int, rng: np.random.Generator) -> Arm:
    """Return a task whose candidates are lognormal, as those of a search without a model."""
    latencies_ms = np.exp(rng.normal(1.0, 0.7, n_trials))
    n_slots = max(1, n_trials // BATCH)
    return Arm(f"task{number}", 1.0, 1e8, latencies_ms, n_slots, 0.3 * n_trials)


def table(rounds: list[dict[str, Any]], trials: list[int]) -> str:
    """Return the costs of rounds around some numbers of trials, as Markdown."""
    parts = [key for key in rounds[-1] if key.endswith("_mb") and key not in ("rss_mb", "peak_mb")]
    names = ["propose, s", "learn, s", "keep, s", "above the first round, MB", "peak, MB"]
    names += [f"{part.removesuffix('_mb')}, MB" for part in parts]
    lines = []
    for n in trials:
        near = [each for each in rounds if abs(each["n_trials"] - n) <= max(WINDOW * n, 2 * BATCH)]
        if not near:
            continue
        seconds = ("propose_sec", "learn_sec", "keep_sec")
        cells = [f"{np.mean([each[key] for each in near]):.3f}" for key in seconds]
        last = max((each for each in near if each["n_trials"] <= n), key=lambda e: e["n_trials"])
        cells += [f"{last[key] - rounds[0]['rss_mb']:.0f}" for key in ("rss_mb", "peak_mb")]
        cells += [f"{last[part]:.1f}" for part in parts]
        lines.append([f"{n:,}", *cells])
    return markdown(["trials", *names], lines)


def table_of_decisions(decisions: list[dict[str, Any]]) -> str:
    """Return the costs of decisions, as Markdown."""
    lines = []
    for each in decisions:
        times = f"{1e3 * each['first_sec']:.0f}", f"{1e3 * each['later_sec']:.1f}"
        lines.append([str(each["n_arms"]), f"{each['n_trials']:,}", *times])
    return markdown(["tasks", "trials each", "first decision, ms", "later ones, ms"], lines)


if __name__ == "__main__":
    main()
