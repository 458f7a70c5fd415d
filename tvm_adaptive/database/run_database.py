"""A run's own database: MetaSchedule's JSON files, with an index instead of records in memory.

MetaSchedule's ``JSONDatabase`` keeps every record in memory: 50 kB and more each, some
gigabytes for a long run. A search needs only the best few of a workload, so this one keeps
the mean time and file offset of each record, and parses a record's line on demand.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import math
import os
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from tvm_adaptive.database.verdicts import disqualified_in, trace_key
from tvm_adaptive.errors import summary_line
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.values.trace_json import without_flags
from tvm_adaptive.values.trial import RECORDED_FAILURE_SEC, median_sec
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# Parsed records kept in memory, some 50 kB each. MetaSchedule's evolutionary search needs the
# best 102 of a workload in every round.
_N_RECENT = 128


class _Index:
    """Mean time and file offset of each record of one workload; 16 bytes a record."""

    def __init__(self) -> None:
        self.mean_secs = array("d")  # infinite for an invalid record
        self.offsets = array("q")

    def add(self, mean_sec: float, offset: int) -> None:
        self.mean_secs.append(mean_sec)
        self.offsets.append(offset)

    def fastest(self, n: int) -> list[int]:
        """Return the offsets of the ``n`` fastest records; ties go to the oldest."""
        mean_secs = np.array(self.mean_secs)
        order = np.argsort(mean_secs, kind="stable")[: max(0, n)]
        return [self.offsets[i] for i in order[np.isfinite(mean_secs[order])]]


class _Line(NamedTuple):
    """A line to write, and of a record, the number of its workload and its time."""

    path: Path
    text: bytes
    number: int | None = None
    mean_sec: float = math.inf


@derived_object
class RunDatabase(PyDatabase):  # type: ignore[misc]
    """Append to the files of MetaSchedule's ``JSONDatabase`` without keeping its records.

    It answers as a ``JSONDatabase`` of the same files does, and that class can read them at
    any time: each line is written whole. A line that a full disk refuses is written before
    the next one. Unreadable lines are left out, see
    :func:`~tvm_adaptive.database.repair.repair_database`. Records of candidates that a
    play-off of the run had disqualified when it was opened count as failed ones. One process
    writes at a time. Only a copy of the files is read and written if there is one; it stays as
    long as the object.
    """

    def __init__(self, work_dir: Path, copy: ScratchFolder | None = None) -> None:
        super().__init__()
        self._work_dir = Path(work_dir)
        self._copy = copy
        folder = self._work_dir if copy is None else copy.path
        self._workload_file = folder / WORKLOAD_FILE
        self._record_file = folder / RECORD_FILE
        self._workloads: list[Workload | None] = []  # by line; None where it is damaged
        self._numbers: dict[str, int] = {}  # line number of a workload by its key
        # By the line number of the workload.
        self._indices: defaultdict[int, _Index] = defaultdict(_Index)
        # Oldest first, so that a workload's line comes before those of its records.
        self._unwritten: deque[_Line] = deque()
        self._disqualified: set[int] = set()  # offsets of records
        # What these records say, by the keys of their workloads.
        self.disqualified_secs: defaultdict[str, list[float]] = defaultdict(list)
        self._recent = functools.lru_cache(maxsize=_N_RECENT)(self._record_at)
        self._read_workloads()
        self._read_records()

    @property
    def readable_workloads(self) -> list[Workload]:
        """The workloads that TVM can read, in the order written."""
        return [self._workloads[number] for number in self._numbers.values()]

    def has_workload(self, mod: IRModule) -> bool:
        """Return whether a workload is in the database."""
        return workload_key(mod) in self._numbers

    def commit_workload(self, mod: IRModule) -> Workload:
        """Return the database's object for a workload; it is written if it is new."""
        key = workload_key(mod)
        number = self._numbers.get(key)
        if number is None:
            workload = Workload(mod)
            number = self._numbers[key] = len(self._workloads)
            self._workloads.append(workload)
            self._write(_Line(self._workload_file, _line_of(workload.as_json())))
        return self._workloads[number]

    def commit_tuning_record(self, record: TuningRecord) -> None:
        """Write a record; one that a full disk refuses is written with the next one."""
        number = self._number_of(record.workload)
        fields = record_as_json(record)
        fields[1] = [sec if math.isfinite(sec) else RECORDED_FAILURE_SEC for sec in fields[1] or ()]
        line = _line_of(without_flags([number, fields]))
        self._write(_Line(self._record_file, line, number, _mean_sec(fields)))

    def _write(self, line: _Line) -> None:
        """Write what is left from before, and a line."""
        self._unwritten.append(line)
        try:
            while self._unwritten:
                first = self._unwritten[0]
                offset = _append(first.path, first.text)
                if first.number is not None:
                    self._indices[first.number].add(first.mean_sec, offset)
                self._unwritten.popleft()
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.error("%s cannot be written: %s", line.path, error)

    def get_top_k(self, workload: Workload, top_k: int) -> list[TuningRecord]:
        """Return the fastest records of a workload, fastest first, without failed ones."""
        number = self._number_of(workload)
        index = self._indices[number]
        records = (self._recent(number, each) for each in index.fastest(len(index.offsets)))
        usable = (record for record in records if record is not None)
        return list(itertools.islice(usable, max(0, int(top_k))))

    def get_all_tuning_records(self) -> list[TuningRecord]:
        """Return all records by workload; :meth:`records_of` needs less memory."""
        records = (
            self._record_at(number, offset)
            for number, index in self._indices.items()
            for offset in index.offsets
        )
        return [record for record in records if record is not None]

    def n_records_of(self, mod: IRModule) -> int:
        """Return the number of records of a workload, failed trials included."""
        number = self._numbers.get(workload_key(mod))
        return 0 if number is None else len(self._indices[number].offsets)

    def records_of(self, mod: IRModule, last: int | None = None) -> Iterator[TuningRecord]:
        """Yield the records of a workload in the order written, failed trials included.

        With ``last``, only the last so many.
        """
        number = self._numbers.get(workload_key(mod))
        if number is not None:
            offsets = list(self._indices[number].offsets)
            for offset in offsets if last is None else offsets[max(0, len(offsets) - last) :]:
                if (record := self._record_at(number, offset)) is not None:
                    yield record

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(len(index.offsets) for index in self._indices.values())

    def _number_of(self, workload: Workload) -> int:
        key = workload_key(workload.mod)
        if key not in self._numbers:
            self.commit_workload(workload.mod)
        return self._numbers[key]

    def _record_at(self, number: int, offset: int) -> TuningRecord | None:
        """Return a record; None if TVM cannot apply its steps to the workload."""
        with open(self._record_file, "rb") as file:
            file.seek(offset)
            _, fields = json.loads(file.readline())
        if offset in self._disqualified:
            fields[1] = [RECORDED_FAILURE_SEC]
        try:
            return TuningRecord.from_json(fields, self._workloads[number])
        except Exception as error:  # TVM's parser may raise anything
            why = summary_line(error)
            logger.warning("%s: a record cannot be used and is left out: %s", self._work_dir, why)
            return None

    def _read_workloads(self) -> None:
        for number, (_, line) in enumerate(_lines(self._workload_file)):
            try:
                workload = Workload.from_json(json.loads(line))
            except Exception:  # TVM's parser may raise anything
                path = self._work_dir / WORKLOAD_FILE
                logger.warning("%s, line %d cannot be read", path, number + 1)
                self._workloads.append(None)
                continue
            self._workloads.append(workload)
            self._numbers.setdefault(workload_key(workload.mod), number)

    def _read_records(self) -> None:
        lost = {
            self._numbers.get(key): keys for key, keys in disqualified_in(self._work_dir).items()
        }
        n_damaged = 0
        for offset, line in _lines(self._record_file):
            try:
                number, fields = json.loads(line)
                workload, mean_sec = self._workloads[number], _mean_sec(fields)
                is_lost = number in lost and trace_key(fields[0]) in lost[number]
            except (ValueError, TypeError, LookupError, RecursionError):
                workload = None
            if workload is None:
                n_damaged += 1
                continue
            if is_lost:
                self._disqualified.add(offset)
                self.disqualified_secs[workload_key(workload.mod)].append(median_sec(fields[1]))
                mean_sec = math.inf
            self._indices[number].add(mean_sec, offset)
        if n_damaged:
            logger.warning("%s: left out %d unreadable records", self._work_dir, n_damaged)


def _mean_sec(fields: list[Any]) -> float:
    """Return a record's sort key: infinite for a failure and for postprocessors alone."""
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
    """Yield each line of a file with its offset; make a missing file."""
    if not path.exists():
        path.touch()
    with open(path, "rb") as file:
        offset = 0
        for line in file:
            yield offset, line
            offset += len(line)


def _append(path: Path, line: bytes) -> int:
    """Append a line as a whole or not at all; return its offset."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.fstat(file).st_size
        # Half a line of a killed process must not damage this one.
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
