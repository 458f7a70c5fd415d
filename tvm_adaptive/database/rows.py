"""Rows of a record store as values: a row is data, and anybody may have written it.

Whatever is wrong with a row costs this row only. Those that other parts could choke on end
here: JSON that is cut off, nested without end or holds infinite numbers; times of no length;
decisions that nothing can be divided by; features that unpack to gigabytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvm_adaptive.database.records import Features, StoredTask, StoredTrial
from tvm_adaptive.values.trace_json import is_sane
from tvm_adaptive.workers.environment import UNKNOWN, Environment

# Characters of a record; those of large networks have some 20,000.
MAX_RECORD_CHARS = 1 << 18
# Of a workload: MetaSchedule's JSON holds the whole module, in base 64.
MAX_WORKLOAD_CHARS = 1 << 24
# Of names, targets and messages.
MAX_TEXT_CHARS = 1 << 14
# Of what a failure is told with, when it is written.
MAX_FAILURE_CHARS = 1 << 10
# Lists in lists: a record of MetaSchedule has some eight levels.
_MAX_DEPTH = 64
_DEEP = "[" * _MAX_DEPTH
# Our features are 984 numbers of 4 bytes each; deflate makes them no larger than that.
MAX_FEATURE_BYTES = 4 * (1 << 13)
# A kernel that does nothing takes some nanoseconds; nobody waits for one of eleven days.
LEAST_SEC, MOST_SEC = 1e-10, 1e6


def row_of(trial: StoredTrial) -> dict[str, Any]:
    """Return a trial as values of columns, but for the environment's."""
    names = [field.name for field in dataclasses.fields(trial) if field.name != "environment"]
    row = {name: getattr(trial, name) for name in names}
    # What a crashed process leaves is any bytes; PostgreSQL takes no text with a NUL.
    failure = trial.failure[:MAX_FAILURE_CHARS].replace("\0", "")
    failure = failure.encode(errors="replace").decode()
    return {**row, "failure": failure, "features": pack_features(trial.features)}


def task_of_row(row: Mapping[Any, Any]) -> StoredTask | None:
    """Return a task, None for a row that is none."""
    texts = {field.name: row[field.name] for field in dataclasses.fields(StoredTask)}
    for name, text in texts.items():
        limit = MAX_WORKLOAD_CHARS if name == "workload" else MAX_TEXT_CHARS
        if not isinstance(text, str) or len(text) > limit:
            return None
    task = StoredTask(**texts)
    is_target = isinstance(_parsed(task.target), dict)
    return task if is_target and task.workload.startswith("[") else None


def trial_of_row(row: Mapping[Any, Any]) -> StoredTrial | None:
    """Return a trial, None for a row that is none.

    Damaged features cost the features only.
    """
    record, failure, run = row.get("record", ""), row["failure"], row["run"]
    if not all(isinstance(text, str) for text in (record, failure, run)):
        return None
    if len(record) > MAX_RECORD_CHARS or max(len(failure), len(run)) > MAX_TEXT_CHARS:
        return None
    seconds, error, unix_sec = (row[name] for name in ("seconds", "error", "unix_sec"))
    if not (
        (seconds is None or _is_between(seconds, LEAST_SEC, MOST_SEC))
        and (error is None or _is_between(error, 0.0, math.inf))
        and _is_between(unix_sec, -math.inf, math.inf)
        and ("record" not in row or is_record(_parsed(record)))
    ):
        return None
    return StoredTrial(
        record,
        None if seconds is None else float(seconds),
        None if error is None else float(error),
        failure,
        unpack_features(row.get("features")),
        float(unix_sec),
        run,
        _environment_of(row),
    )


def is_record(value: Any) -> bool:
    """Say whether JSON has the form of one of MetaSchedule's records."""
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and not _is_deep(value) and is_sane(value[0])


def pack_features(features: Features | None) -> bytes | None:
    """Return features as compressed bytes, little-endian float32."""
    if features is None:
        return None
    # Most of them are 0: the fastest level makes a third of them.
    return zlib.compress(np.ascontiguousarray(features, dtype="<f4").tobytes(), level=1)


def unpack_features(packed: Any) -> Features | None:
    """Undo :func:`pack_features`; return None for bytes that are none of its."""
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


def _is_between(value: Any, low: float, high: float) -> bool:
    """Say whether a value is a finite number within bounds."""
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


def _parsed(text: str) -> Any:
    """Return JSON's value, None for what is not JSON."""
    if _DEEP in text:  # the parser takes its time to find out
        return None
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number beyond what computers hold")
    return value


def _is_deep(value: list[Any]) -> bool:
    level: list[Any] = value
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _environment_of(row: Mapping[Any, Any]) -> Environment:
    names = {field.name: row.get(field.name) for field in dataclasses.fields(Environment)}
    found = Environment.from_fields(names)
    return found if found.is_known else UNKNOWN
