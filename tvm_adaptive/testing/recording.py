"""Recorded tunings: the latency and the cost of every trial of a network's tasks.

A recording is one compressed ``.npz`` file: the arrays of all tasks joined end to end,
and a JSON header with everything else. It holds no pickled objects.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import FloatArray

FORMAT_VERSION = 1
_HEADER = "header"
_ABOUT = ("network", "batch", "machine", "tvm", "seed")
_ABOUT_TASK = ("name", "weight", "flop")
_PER_TRIAL = ("latencies_ms", "trial_sec")
_PER_ROUND = ("round_sizes", "overhead_sec")

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TaskRecording:
    """One task's tuning, trial by trial."""

    name: str
    weight: float  # how often the task occurs in the network
    flop: float  # of one run; at least 1
    # milliseconds of one run, in the order measured; ``nan`` for a failed trial
    latencies_ms: FloatArray
    # wall-clock seconds of each trial alone: build, measuring, its share of training
    trial_sec: FloatArray
    round_sizes: IntArray  # trials of each round of the search; they sum to n
    # seconds of each round whatever its size: the search for candidates
    overhead_sec: FloatArray

    def __post_init__(self) -> None:
        n, sizes = len(self.latencies_ms), self.round_sizes
        valid = self.latencies_ms[~np.isnan(self.latencies_ms)]
        seconds = np.concatenate([self.trial_sec, self.overhead_sec])
        problems = {
            "trial_sec and latencies_ms differ in length": self.trial_sec.shape != (n,),
            "overhead_sec and round_sizes differ in length": self.overhead_sec.shape != sizes.shape,
            "round_sizes do not sum to the trials": int(sizes.sum()) != n,
            "a round has no trials": (sizes <= 0).any(),
            "a latency is not > 0": not (valid > 0).all() or np.isinf(valid).any(),
            "seconds are negative or not finite": not (seconds >= 0).all()
            or np.isinf(seconds).any(),
            "weight must be > 0 and flop >= 1": not (self.weight > 0 and self.flop >= 1),
        }
        _refuse(self.name, problems)

    @property
    def n_trials(self) -> int:
        """Trials, failed ones included."""
        return len(self.latencies_ms)

    @property
    def is_valid(self) -> bool:
        """Whether any trial succeeded."""
        return bool(np.isfinite(self.latencies_ms).any())

    @property
    def final_ms(self) -> float:
        """Milliseconds of the fastest trial; ``nan`` where all failed."""
        return float(np.nanmin(self.latencies_ms)) if self.is_valid else math.nan

    @property
    def slowest_ms(self) -> float:
        """Milliseconds of the slowest trial; ``nan`` where all failed."""
        return float(np.nanmax(self.latencies_ms)) if self.is_valid else math.nan

    @property
    def total_sec(self) -> float:
        """Seconds of the whole tuning of this task."""
        return float(self.trial_sec.sum() + self.overhead_sec.sum())

    def slot_sec(self, start: int, stop: int) -> float:
        """Return the seconds of one search and the trials from ``start`` up to ``stop``."""
        if stop <= start:
            return 0.0
        place = np.searchsorted(np.cumsum(self.round_sizes), start, side="right")
        return float(self.overhead_sec[place] + self.trial_sec[start:stop].sum())


@dataclasses.dataclass(frozen=True)
class Recording:
    """The tuning of a network, every task well past its knee."""

    network: str
    tasks: tuple[TaskRecording, ...]  # in the scheduler's order
    batch: int  # trials that the search was asked for per round
    machine: str  # in words: without it, seconds and milliseconds mean nothing
    tvm: str  # version of TVM
    seed: int

    def __post_init__(self) -> None:
        problems = {
            "it has no tasks": not self.tasks,
            "two tasks have the same name": len({t.name for t in self.tasks}) < len(self.tasks),
            "batch must be at least 1": self.batch < 1,
        }
        _refuse(self.network, problems)

    @property
    def final_ms(self) -> float:
        """End-to-end milliseconds with each task at its fastest; failed tasks left out."""
        return math.fsum(task.weight * task.final_ms for task in self.tasks if task.is_valid)

    @property
    def total_sec(self) -> float:
        """Seconds to replay everything in the rounds that were recorded."""
        return math.fsum(task.total_sec for task in self.tasks)

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(task.n_trials for task in self.tasks)


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording; milliseconds and seconds keep seven digits."""
    tasks = recording.tasks
    header = {
        "version": FORMAT_VERSION,
        **{name: getattr(recording, name) for name in _ABOUT},
        "tasks": [
            {name: getattr(task, name) for name in _ABOUT_TASK}
            | {"n_trials": task.n_trials, "n_rounds": len(task.round_sizes)}
            for task in tasks
        ],
    }
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(task, name) for task in tasks]).astype(
            np.int32 if name == "round_sizes" else np.float32
        )
        for name in (*_PER_TRIAL, *_PER_ROUND)
    }
    arrays[_HEADER] = np.array(json.dumps(header))
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_recording(path: Path) -> Recording:
    """Read a recording."""
    if not path.is_file():
        raise InvalidOptionError(f"There is no recording at {path}; check the path.")
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file[_HEADER]))
            arrays = {name: file[name] for name in (*_PER_TRIAL, *_PER_ROUND)}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidOptionError(
            f"{path} is no recording, or is damaged ({error}). Record it again, or fetch it "
            "again if it was copied."
        ) from error
    version = header.get("version")
    if version != FORMAT_VERSION:
        raise InvalidOptionError(
            f"{path} has format version {version}, this package reads {FORMAT_VERSION}. "
            "Use the version of tvm_adaptive that wrote it."
        )
    try:
        return _from_arrays(header, arrays)
    except (KeyError, TypeError, InvalidOptionError) as error:
        raise InvalidOptionError(f"{path} contradicts itself: {error} Record it again.") from error


def _from_arrays(header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Recording:
    tasks = []
    trial = first_round = 0
    for about in header["tasks"]:
        trials = slice(trial, trial + about["n_trials"])
        rounds = slice(first_round, first_round + about["n_rounds"])
        own: dict[str, Any] = {name: about[name] for name in _ABOUT_TASK}
        own |= {name: arrays[name][trials].astype(np.float64) for name in _PER_TRIAL}
        tasks.append(
            TaskRecording(
                **own,
                round_sizes=arrays["round_sizes"][rounds].astype(np.int64),
                overhead_sec=arrays["overhead_sec"][rounds].astype(np.float64),
            )
        )
        trial, first_round = trials.stop, rounds.stop
    return Recording(tasks=tuple(tasks), **{name: header[name] for name in _ABOUT})


def _refuse(name: str, problems: Mapping[str, object]) -> None:
    for problem, is_found in problems.items():
        if is_found:
            raise InvalidOptionError(f"The recording of {name} cannot be used: {problem}.")
