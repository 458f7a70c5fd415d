"""What the play-offs of a run said, kept in the run's own directory.

One JSON line for each play-off, written when it ends. A line that a killed process left
half written, and one of another version of TVM, is left out when the file is read: what it
told of is checked again then, as nothing is deployed that is not known to be sound.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.database.records import Identity, StoredTask, StoredTrial

logger = logging.getLogger(__name__)

VERDICT_FILE = "verdicts.jsonl"
_FORMAT_VERSION = 1
# Of a trial; features are the cost model's.
_KEPT = ("record", "seconds", "error", "failure", "unix_sec", "run")


class VerdictFile:
    """The verdicts of one run."""

    def __init__(self, work_dir: Path, compiler: str) -> None:
        self.path = work_dir / VERDICT_FILE
        self._compiler = compiler

    def add(self, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
        """Append what a play-off said, its winner first; it is on disk when this returns."""
        line = {
            "version": _FORMAT_VERSION,
            "compiler": self._compiler,
            "task": task.name,
            "identity": list(task.identity),
            "finals": [{name: getattr(each, name) for name in _KEPT} for each in finals],
        }
        # A torn line before it, if there is one, ends here.
        text = f"\n{json.dumps(line, allow_nan=False)}\n"
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[Identity, list[StoredTrial]]:
        """Return what was said of each task's candidates, in the order it was said."""
        found: dict[Identity, list[StoredTrial]] = {}
        for event in self._events():
            try:
                workload_key, target_key = map(str, event["identity"])
                finals = [_trial_of(each) for each in event["finals"]]
            except (KeyError, TypeError, ValueError):
                logger.warning("%s: a line that this version does not know", self.path)
                continue
            found.setdefault((workload_key, target_key), []).extend(finals)
        return found

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            try:
                event = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                logger.warning("%s: a line that is no JSON is left out", self.path)
                continue
            if isinstance(event, dict) and self._is_mine(event):
                yield event

    def _is_mine(self, event: dict[str, Any]) -> bool:
        return (event.get("version"), event.get("compiler")) == (_FORMAT_VERSION, self._compiler)


def _trial_of(fields: Any) -> StoredTrial:
    """Return a row of the file as a value."""
    trial = StoredTrial(**{name: fields[name] for name in _KEPT})
    if not all(isinstance(each, str) for each in (trial.record, trial.failure, trial.run)):
        raise ValueError("no trial")
    if trial.seconds is not None and not 0.0 < float(trial.seconds) < math.inf:
        raise ValueError("no time")
    return trial
