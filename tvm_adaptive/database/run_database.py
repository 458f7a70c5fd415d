"""A run's own database: MetaSchedule's JSON files, with an index instead of records in memory.

MetaSchedule's ``JSONDatabase`` keeps every record that it reads or writes: 50 kB and more
each, some gigabytes for a long run. What a search asks for again are the best few of a
workload. So only the mean time of each record and its place in the file are kept here,
and a record is made from its line when somebody asks for it.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    IRModule,
    PyDatabase,
    TuningRecord,
    Workload,
    derived_object,
    record_as_json,
    workload_key,
)
from tvm_adaptive.database.repair import RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.values.trace_json import without_flags
from tvm_adaptive.values.trial import RECORDED_FAILURE_SEC

logger = logging.getLogger(__name__)

# Records that stay in memory after they were asked for, some 50 kB each. MetaSchedule's
# evolutionary search asks for the best 102 of a workload in every round.
_N_RECENT = 128


class _Index:
    """Mean time and place in the file of each record of one workload; 16 bytes a record."""

    def __init__(self) -> None:
        self.mean_secs = array("d")  # infinite where a record is not valid
        self.offsets = array("q")

    def add(self, mean_sec: float, offset: int) -> None:
        self.mean_secs.append(mean_sec)
        self.offsets.append(offset)

    def fastest(self, n: int) -> list[int]:
        """Return the offsets of the ``n`` fastest, of equal ones the oldest first."""
        mean_secs = np.array(self.mean_secs)
        order = np.argsort(mean_secs, kind="stable")[: max(0, n)]
        return [self.offsets[i] for i in order[np.isfinite(mean_secs[order])]]


@derived_object
class RunDatabase(PyDatabase):  # type: ignore[misc]
    """Append to the files of MetaSchedule's ``JSONDatabase`` without keeping its records.

    Answers as a ``JSONDatabase`` of the same files does, which that class can read at any
    time: a line is written at once and whole. What cannot be written, as on a full disk,
    is written with the next record. Lines that cannot be read are left out, see
    :func:`~tvm_adaptive.database.repair.repair_database`. One process writes at a time.
    """

    def __init__(self, work_dir: Path) -> None:
        super().__init__()
        self._workload_file = Path(work_dir) / WORKLOAD_FILE
        self._record_file = Path(work_dir) / RECORD_FILE
        self._workloads: list[Workload | None] = []  # by line; None where it is damaged
        self._places: dict[str, int] = {}  # of a workload by its key
        self._indices: dict[int, _Index] = {}  # by the place of the workload
        self._unwritten: list[tuple[int, float, bytes]] = []
        self._recent = functools.lru_cache(maxsize=_N_RECENT)(self._record_at)
        self._read_workloads()
        self._read_records()

    def has_workload(self, mod: IRModule) -> bool:
        """Say whether a workload is in the database."""
        return workload_key(mod) in self._places

    def commit_workload(self, mod: IRModule) -> Workload:
        """Return the database's object for a workload; it is written if it is new."""
        key = workload_key(mod)
        place = self._places.get(key)
        if place is None:
            workload = Workload(mod)
            _append(self._workload_file, _line_of(workload.as_json()))
            place = self._places[key] = len(self._workloads)
            self._workloads.append(workload)
        return self._workloads[place]

    def commit_tuning_record(self, record: TuningRecord) -> None:
        """Write a record; on a disk without room, that is done with the next one."""
        place = self._place_of(record.workload)
        fields = record_as_json(record)
        fields[1] = [sec if math.isfinite(sec) else RECORDED_FAILURE_SEC for sec in fields[1] or ()]
        line = _line_of(without_flags([place, fields]))
        self._unwritten.append((place, _mean_sec(fields), line))
        try:
            while self._unwritten:
                place, mean_sec, line = self._unwritten[0]
                self._index(place).add(mean_sec, _append(self._record_file, line))
                del self._unwritten[0]
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.error("%s cannot be written: %s", self._record_file, error)

    def get_top_k(self, workload: Workload, top_k: int) -> list[TuningRecord]:
        """Return the fastest records of a workload, fastest first, without failed ones."""
        place = self._place_of(workload)
        return [self._recent(place, each) for each in self._index(place).fastest(int(top_k))]

    def get_all_tuning_records(self) -> list[TuningRecord]:
        """Return all records by their workloads; :meth:`records_of` needs less memory."""
        return [
            self._record_at(place, offset)
            for place, index in self._indices.items()
            for offset in index.offsets
        ]

    def records_of(self, mod: IRModule) -> Iterator[TuningRecord]:
        """Yield the records of a workload, failed trials included, in the order written."""
        place = self._places.get(workload_key(mod))
        if place is not None:
            for offset in list(self._index(place).offsets):
                yield self._record_at(place, offset)

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(len(index.offsets) for index in self._indices.values())

    def _place_of(self, workload: Workload) -> int:
        key = workload_key(workload.mod)
        if key not in self._places:
            self.commit_workload(workload.mod)
        return self._places[key]

    def _index(self, place: int) -> _Index:
        return self._indices.setdefault(place, _Index())

    def _record_at(self, place: int, offset: int) -> TuningRecord:
        with open(self._record_file, "rb") as file:
            file.seek(offset)
            _, fields = json.loads(file.readline())
        return TuningRecord.from_json(fields, self._workloads[place])

    def _read_workloads(self) -> None:
        for place, (_, line) in enumerate(_lines(self._workload_file)):
            try:
                workload = Workload.from_json(json.loads(line))
            except Exception:  # what TVM's parser may raise is anything
                logger.warning("%s, line %d cannot be read", self._workload_file, place + 1)
                self._workloads.append(None)
                continue
            self._workloads.append(workload)
            self._places.setdefault(workload_key(workload.mod), place)

    def _read_records(self) -> None:
        n_damaged = 0
        for offset, line in _lines(self._record_file):
            try:
                place, fields = json.loads(line)
                workload, mean_sec = self._workloads[place], _mean_sec(fields)
            except (ValueError, TypeError, LookupError, RecursionError):
                workload = None
            if workload is None:
                n_damaged += 1
            else:
                self._index(place).add(mean_sec, offset)
        if n_damaged:
            logger.warning("%s: left out %d unreadable lines", self._record_file, n_damaged)


def _mean_sec(fields: list[Any]) -> float:
    """Return what MetaSchedule sorts records by; infinite where it sees no valid one.

    Neither a failed trial is valid nor a trace of postprocessors alone.
    """
    (instructions, _), run_secs, *_ = fields
    secs = [float(sec) for sec in run_secs or ()]
    is_empty = not instructions or instructions[0][0] == "EnterPostproc"
    if is_empty or all(sec == RECORDED_FAILURE_SEC for sec in secs):
        return math.inf
    mean_sec = sum(secs) / len(secs)
    return mean_sec if math.isfinite(mean_sec) else math.inf


def _line_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, and where they begin; made if missing."""
    if not path.exists():
        path.touch()
    with open(path, "rb") as file:
        offset = 0
        for line in file:
            yield offset, line
            offset += len(line)


def _append(path: Path, line: bytes) -> int:
    """Write all of a line, or nothing of it; return where it begins."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.fstat(file).st_size
        # Half a line, which a killed process left, must not spoil this one.
        begins_line = end == 0 or os.pread(file, 1, end - 1) == b"\n"
        text = line if begins_line else b"\n" + line
        try:
            n_written = os.write(file, text)
            if n_written != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, end)
            raise
        return end + len(text) - len(line)
    finally:
        os.close(file)
