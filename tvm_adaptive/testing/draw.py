"""One possible course of events, drawn from recordings: what a replay's seed changes.

Two things are drawn. Each task takes its tuning from one of the recordings of the same
network, if there are several. And within a window of two neighbouring rounds trials come
in any order, as the candidates of a round are built side by side and neighbouring rounds
come from nearly the same search; the windows' phase is drawn too. What is kept: every
trial with its own cost, the pace at which the search improves, and what it reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.recording import Recording, TaskRecording

# One alone would leave whole rounds as they were, and with them every decision.
WINDOW_ROUNDS = 2
# Keeps this stream apart from the policy's, which has the same seed.
_STREAM = 1


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
