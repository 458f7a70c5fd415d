"""Tasks and trials of a record store as values, read from rows that anybody may have written.

An invalid row is left out alone. Invalid is what other parts would fail on: JSON that is cut
off, too deep or holds infinite numbers; implausible times; decisions that no schedule can
have; features that unpack to gigabytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.trace_json import is_sane
from tvm_adaptive.workers.environment import UNKNOWN, Environment

Features = npt.NDArray[np.float32]
# Keys of a task's workload and of its target.
Identity = tuple[str, str]

# Records of large networks have some 20,000 characters.
MAX_RECORD_CHARS = 1 << 18
# MetaSchedule's JSON of a workload holds the whole module, in base 64.
MAX_WORKLOAD_CHARS = 1 << 24
# For names, targets and messages.
MAX_TEXT_CHARS = 1 << 14
# Longer messages of failures are cut when they are written.
MAX_FAILURE_CHARS = 1 << 10
# The features are 984 numbers of 4 bytes; deflate makes them no larger than that.
MAX_FEATURE_BYTES = 4 * (1 << 13)
# An empty kernel takes some nanoseconds; none takes eleven days.
MIN_SEC, MAX_SEC = 1e-10, 1e6


@dataclasses.dataclass(frozen=True)
class StoredTask:
    """A workload on a target."""

    workload_key: str  # equal for structurally equal workloads, whatever their names
    target: str  # JSON
    family: str  # equal for related tasks
    name: str  # in the run that stored it first
    workload: str  # in MetaSchedule's own JSON, for export; empty where it was not read

    @property
    def target_key(self) -> str:
        """Digest of the target's JSON."""
        return hashlib.sha256(self.target.encode()).hexdigest()

    @property
    def identity(self) -> Identity:
        """Equal for the same task, whoever stored it."""
        return self.workload_key, self.target_key


@dataclasses.dataclass(frozen=True)
class StoredTrial:
    """One measured candidate."""

    record: str  # MetaSchedule's own JSON: trace, seconds, target, arguments
    seconds: float | None  # per run, lower is better; None for a failure
    error: float | None = None  # relative standard error of ``seconds``; None if unknown
    failure: str = ""  # first line of the error; empty for a success
    features: Features | None = None  # the cost model's
    unix_sec: float = 0.0  # when it was measured
    run: str = ""  # id of the run that measured it
    environment: Environment = dataclasses.field(default=UNKNOWN, compare=False)


@dataclasses.dataclass(frozen=True)
class TaskStats:
    """Counts of a task's trials."""

    task: StoredTask
    n_trials: int
    n_failures: int
    best_sec: float | None  # None without a success
    last_unix_sec: float  # when the last trial was measured


def row_of(trial: StoredTrial) -> dict[str, Any]:
    """Return a trial's columns without that of its environment."""
    row = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
    del row["environment"]
    # A crashed process may leave any bytes; PostgreSQL takes no text with a NUL.
    failure = trial.failure[:MAX_FAILURE_CHARS].replace("\0", "")
    failure = failure.encode(errors="replace").decode()
    return {**row, "failure": failure, "features": pack_features(trial.features)}


def task_of_row(row: Mapping[Any, Any]) -> StoredTask | None:
    """Return a row's task, also without its workload; None for an invalid row."""
    texts = {field.name: row.get(field.name, "") for field in dataclasses.fields(StoredTask)}
    for name, text in texts.items():
        limit = MAX_WORKLOAD_CHARS if name == "workload" else MAX_TEXT_CHARS
        if not isinstance(text, str) or len(text) > limit:
            return None
    task = StoredTask(**texts)
    is_target = isinstance(parsed(task.target), dict)
    is_workload = "workload" not in row or task.workload.startswith("[")
    return task if is_target and is_workload else None


def trial_of_row(row: Mapping[Any, Any]) -> StoredTrial | None:
    """Return a row's trial, without damaged features; None for an invalid row."""
    record, failure, run = row.get("record", ""), row["failure"], row["run"]
    if not all(isinstance(text, str) for text in (record, failure, run)):
        return None
    if len(record) > MAX_RECORD_CHARS or max(len(failure), len(run)) > MAX_TEXT_CHARS:
        return None
    seconds, error, unix_sec = (row[name] for name in ("seconds", "error", "unix_sec"))
    if not (
        (seconds is None or _is_between(seconds, MIN_SEC, MAX_SEC))
        and (error is None or _is_between(error, 0.0, math.inf))
        and _is_between(unix_sec, -math.inf, math.inf)
        and ("record" not in row or is_record(parsed(record)))
    ):
        return None
    fields = {field.name: row.get(field.name) for field in dataclasses.fields(Environment)}
    environment = Environment.from_fields(fields)
    return StoredTrial(
        record,
        None if seconds is None else float(seconds),
        None if error is None else float(error),
        failure,
        unpack_features(row.get("features")),
        float(unix_sec),
        run,
        environment if environment.is_known else UNKNOWN,
    )


def is_record(value: Any) -> bool:
    """Return whether JSON has the form of one of MetaSchedule's records."""
    return isinstance(value, list) and len(value) > 0 and is_sane(value[0])


def pack_features(features: Features | None) -> bytes | None:
    """Return features as compressed bytes, little-endian float32."""
    if features is None:
        return None
    # Most features are 0: the fastest level leaves a third of the bytes.
    return zlib.compress(np.ascontiguousarray(features, dtype="<f4").tobytes(), level=1)


def unpack_features(packed: Any) -> Features | None:
    """Undo :func:`pack_features`; return None for other bytes."""
    if not isinstance(packed, bytes) or len(packed) > MAX_FEATURE_BYTES:
        return None
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, MAX_FEATURE_BYTES)
    except zlib.error:
        return None
    if not unpacker.eof or len(raw) % 4:
        return None
    features = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    return features if np.isfinite(features).all() else None


def _refuse_constant(name: str) -> Any:
    """Raise for NaN and the infinities, which Python's JSON parser takes."""
    raise ValueError(f"{name} is not JSON")


def _is_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text; None for another text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a float")
    return value
