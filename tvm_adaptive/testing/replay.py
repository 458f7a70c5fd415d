"""Run a scheduler on recorded tunings: no hardware, many seeds in seconds.

A replay's seed draws one possible course of events. Each task takes its tuning from one of
the recordings of the same network, if there are several. Within a window of two
neighbouring rounds trials come in any order, as the candidates of a round are built side by
side and neighbouring rounds come from nearly the same search; the windows' phase is drawn
too. Every trial keeps its own cost, and the search its pace and its final result.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError, check_positive
from tvm_adaptive.task_scheduler.arms import Decision, Policy
from tvm_adaptive.task_scheduler.slot_queue import ArmTable, check_decision
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.values.trial import FloatArray

# A single round would keep the order of rounds, and with it every decision.
WINDOW_ROUNDS = 2
# Keeps the draw's random numbers apart from the policy's, which have the same seed.
_STREAM = 1


@dataclasses.dataclass(frozen=True)
class ReplayRun:
    """The result of a policy on a recording."""

    # seconds of tuning at the start (0) and after each slot. Decisions cost nothing here, so that
    # the same seed gives the same run; see ``decide_sec``
    times_sec: FloatArray
    # end-to-end milliseconds at these times. A task without a result counts with its slowest
    # recorded trial, as if its first one were unlucky; one that never succeeds is left out
    latency_ms: FloatArray
    choices: tuple[int, ...]  # the arm of each slot
    reasons: tuple[str, ...]  # of each slot
    n_trials: tuple[int, ...]  # of each slot
    # seconds of each decision on this machine; one more than slots when the policy ended the run
    decide_sec: FloatArray
    final_ms: float  # end-to-end milliseconds with each task at the best of its full recording
    ended: str  # ``"exhausted"`` (nothing recorded is left), ``"policy"`` or ``"budget"``


def replay(
    recording: Recording | Sequence[Recording],
    policy: Policy,
    seed: int,
    *,
    budget_sec: float | None = None,
    batch: int | None = None,
) -> ReplayRun:
    """Schedule a recorded tuning by a policy."""
    check_positive("budget_sec", budget_sec)
    check_positive("batch", batch)
    state = _Replay(draw(recording, seed), batch)
    arm_table, rng, ended = state.arm_table, np.random.default_rng(seed), "exhausted"
    while arm_table.live:
        if budget_sec is not None and state.times_sec[-1] >= budget_sec:
            ended = "budget"
            break
        start = time.perf_counter()
        decision = policy.choose(arm_table.arms, rng)
        state.decide_sec.append(time.perf_counter() - start)
        check_decision(decision, arm_table.arms)
        for arm in decision.retired:
            arm_table.finish(arm)
        if decision.arm is None:
            ended = "policy"
            break
        state.play(decision.arm, decision)
    return state.result(ended)


class _Replay:
    """The replayed arms, and the run so far."""

    def __init__(self, instance: Recording, batch: int | None) -> None:
        tasks = instance.tasks
        self.instance = instance
        self.batch = batch or instance.batch
        self.arm_table = ArmTable(
            [task.name for task in tasks],
            [task.weight for task in tasks],
            [task.flop for task in tasks],
        )
        self._now_ms = np.array([task.weight * task.slowest_ms for task in tasks])
        self.times_sec = [0.0]
        self._latency_ms = [self._end_to_end_ms()]
        self._slots: list[tuple[int, str, int]] = []  # arm, reason and trials of each
        self.decide_sec: list[float] = []
        for k, task in enumerate(tasks):
            if task.n_trials == 0:
                self.arm_table.finish(k)

    def play(self, k: int, decision: Decision) -> None:
        """Play a slot: one batch, or batches until the decision's trials are used up."""
        task = self.instance.tasks[k]
        self.arm_table.open_slot(k)
        start = self.arm_table.arms[k].n_trials
        stop = min(start + (decision.n_trials or self.batch), task.n_trials)
        batches = range(start, stop, self.batch)
        seconds = sum(task.slot_sec(first, min(first + self.batch, stop)) for first in batches)
        self.arm_table.add_trials(k, task.latencies_ms[start:stop])
        self.arm_table.charge(k, seconds)
        if stop == task.n_trials:
            self.arm_table.finish(k)
        self.times_sec.append(self.times_sec[-1] + seconds)
        arm = self.arm_table.arms[k]
        if math.isfinite(arm.best_ms):
            self._now_ms[k] = arm.weight * arm.best_ms
        self._latency_ms.append(self._end_to_end_ms())
        self._slots.append((k, decision.reason, stop - start))

    def _end_to_end_ms(self) -> float:
        return math.fsum(self._now_ms[~np.isnan(self._now_ms)])

    def result(self, ended: str) -> ReplayRun:
        """Return the run."""
        return ReplayRun(
            times_sec=np.array(self.times_sec),
            latency_ms=np.array(self._latency_ms),
            choices=tuple(arm for arm, _, _ in self._slots),
            reasons=tuple(reason for _, reason, _ in self._slots),
            n_trials=tuple(n_trials for _, _, n_trials in self._slots),
            decide_sec=np.array(self.decide_sec),
            final_ms=self.instance.final_ms,
            ended=ended,
        )


def draw(recordings: Recording | Sequence[Recording], seed: int) -> Recording:
    """Return one possible course of events."""
    several = [recordings] if isinstance(recordings, Recording) else list(recordings)
    _check_same_tasks(several)
    rng = np.random.default_rng([_STREAM, seed])
    by_name = [{task.name: task for task in recording.tasks} for recording in several]
    tasks = tuple(
        _shuffled(by_name[int(rng.integers(len(several)))][task.name], rng)
        for task in several[0].tasks
    )
    return dataclasses.replace(several[0], tasks=tasks)


def _shuffled(task: TaskRecording, rng: np.random.Generator) -> TaskRecording:
    edges = np.concatenate([[0], np.cumsum(task.round_sizes)])
    phase = int(rng.integers(WINDOW_ROUNDS))
    inner = edges[1:-1][phase::WINDOW_ROUNDS]
    windows = np.split(np.arange(task.n_trials), inner)
    order = np.concatenate([rng.permutation(window) for window in windows])
    return dataclasses.replace(
        task, latencies_ms=task.latencies_ms[order], trial_sec=task.trial_sec[order]
    )


def _check_same_tasks(recordings: Sequence[Recording]) -> None:
    if not recordings:
        raise InvalidOptionError("A replay needs at least one recording; got none.")
    first = {task.name for task in recordings[0].tasks}
    for other in recordings[1:]:
        names = {task.name for task in other.tasks}
        if names != first:
            raise InvalidOptionError(
                "Recordings that are replayed together must have the same tasks; "
                f"{recordings[0].network} (seed {recordings[0].seed}) and {other.network} "
                f"(seed {other.seed}) differ in {sorted(names ^ first)}."
            )
