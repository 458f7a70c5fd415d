"""What a record store keeps, as values."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt

from tvm_adaptive.workers.environment import UNKNOWN, Environment

Features = npt.NDArray[np.float32]
# Of a task: keys of its workload and of its target.
Identity = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class StoredTask:
    """A workload on a target."""

    workload_key: str  # equal for structurally equal workloads, whatever they are called
    target: str  # JSON
    family: str  # what related tasks have in common
    name: str  # as the run called it that stored it first
    workload: str  # in MetaSchedule's own JSON, for export

    @property
    def target_key(self) -> str:
        """The target's JSON, short."""
        return hashlib.sha256(self.target.encode()).hexdigest()

    @property
    def identity(self) -> Identity:
        """What tells tasks apart, whoever stored them."""
        return self.workload_key, self.target_key


@dataclasses.dataclass(frozen=True)
class StoredTrial:
    """One measured candidate."""

    record: str  # metaSchedule's own JSON of it: trace, seconds, target, arguments
    seconds: float | None  # of one run, lower is better; None for a failure
    error: float | None = None  # relative standard error of ``seconds``; None where it is not known
    failure: str = ""  # first line of what went wrong; empty for a success
    features: Features | None = None  # what a cost model saw of the candidate
    unix_sec: float = 0.0  # when it was measured
    run: str = ""  # names the run that measured it
    # where it was measured
    environment: Environment = dataclasses.field(default=UNKNOWN, compare=False)


@dataclasses.dataclass(frozen=True)
class TaskStats:
    """What a store holds of a task."""

    task: StoredTask
    n_trials: int
    n_failures: int
    best_sec: float | None  # none without a success
    last_unix_sec: float  # when the last trial was measured
