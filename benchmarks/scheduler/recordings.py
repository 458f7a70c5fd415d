"""Files of recordings.

A recording is one compressed ``.npz`` file: the arrays of all tasks joined end to end,
and a JSON header with everything else. It holds no pickled objects.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.recording import Recording, TaskRecording

FORMAT_VERSION = 1
_HEADER = "header"
_ABOUT = ("network", "batch", "machine", "tvm", "seed")
_ABOUT_TASK = ("name", "weight", "flop")
_PER_TRIAL = ("latencies_ms", "trial_sec")
_PER_ROUND = ("round_sizes", "overhead_sec")


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
