"""What a round costs as trials and tasks grow: model, search, scheduler, and the tuner's memory.

    python -m benchmarks.micro.growth --out growth.json

A search of one operator with made-up times, without building or measuring: whatever it
takes is ours. Seconds are of processors, so that a busy machine does not show.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tvm.s_tir import meta_schedule as ms

from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._intrinsics import only_intrinsics
from tvm_adaptive._tvm import MeasureCandidate, RunnerResult, TuneContext, functions_as_tasks
from tvm_adaptive.models import load_workload
from tvm_adaptive.search_strategy.schedules import knobs_of
from tvm_adaptive.target import resolve_target
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.policy import DynaTunePolicy

BATCH = 16
# Where the table looks: the mean of the rounds around these numbers of trials.
TRIALS = (100, 1_000, 10_000)
# Rounds refit only when the data have grown by 5 %: a window has to hold some of each.
WINDOW = 0.25
ARMS = (10, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description="what a round costs as trials and tasks grow")
    parser.add_argument("--workload", default="te:GMM")
    parser.add_argument("--trials", type=int, nargs="+", default=list(TRIALS))
    parser.add_argument("--arms", type=int, nargs="+", default=list(ARMS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rounds = list(search(options.workload, round((1 + WINDOW) * max(options.trials))))
    decisions = [decide(n_arms, n) for n_arms in options.arms for n in options.trials[:-1]]
    found = {"workload": options.workload, "rounds": rounds, "decisions": decisions}
    options.out.write_text(json.dumps(found))
    print(table(rounds, options.trials))
    print()
    print(table_of_decisions(decisions))


def search(workload: str, n_trials: int) -> Iterator[dict[str, Any]]:
    """Run rounds with made-up times; yield what each of them cost."""
    target = resolve_target("cpu")
    (task,) = functions_as_tasks(load_workload(workload).mod, target)
    with only_intrinsics(("x86",)):
        context = TuneContext(
            task.dispatched[0],
            target=target,
            space_generator="post-order-apply",
            search_strategy=AdaptiveSearch(),
            rand_state=1,
            num_threads=2,
        )
    model = RFEICostModel(seed=1)
    strategy = context.search_strategy
    database = ms.database.MemoryDatabase()
    strategy.pre_tuning(n_trials, BATCH, context.generate_design_space(), database, model)
    process = psutil.Process()
    n_done = 0
    while True:
        start_sec = time.process_time()
        batch = strategy.generate_measure_candidates()
        proposed_sec = time.process_time()
        if not batch:
            return
        results = [RunnerResult([made_up_sec(candidate)], None) for candidate in batch]
        measured_sec = time.process_time()
        strategy.notify_runner_results(batch, results)
        model.update(context, batch, results)
        n_done += len(batch)
        yield {
            "n_trials": n_done,
            "propose_sec": proposed_sec - start_sec,
            "learn_sec": time.process_time() - measured_sec,
            "rss_mb": process.memory_info().rss / 2**20,
        }


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
    lines = ["| trials | propose, s | learn, s | tuner, MB |", "|---|---|---|---|"]
    for n in trials:
        near = [each for each in rounds if abs(each["n_trials"] - n) <= max(WINDOW * n, 2 * BATCH)]
        if near:
            means = [np.mean([each[key] for each in near]) for key in ("propose_sec", "learn_sec")]
            cells = [f"{mean:.3f}" for mean in means]
            lines.append(f"| {n:,} | {' | '.join(cells)} | {near[-1]['rss_mb']:.0f} |")
    return "\n".join(lines)


def table_of_decisions(decisions: list[dict[str, Any]]) -> str:
    """Return the costs of decisions, as Markdown."""
    lines = ["| tasks | trials each | first decision, ms | later ones, ms |", "|---|---|---|---|"]
    for each in decisions:
        times = f"{1e3 * each['first_sec']:.0f} | {1e3 * each['later_sec']:.1f}"
        lines.append(f"| {each['n_arms']} | {each['n_trials']:,} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
