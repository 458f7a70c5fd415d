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
    """A workload on a target.

    Attributes
    ----------
    workload_key : str
        Equal for structurally equal workloads, whatever they are called.
    target : str
        JSON.
    family : str
        What related tasks have in common.
    name : str
        As the run called it that stored it first.
    workload : str
        In MetaSchedule's own JSON, for export.
    """

    workload_key: str
    target: str
    family: str
    name: str
    workload: str

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
    """One measured candidate.

    Attributes
    ----------
    record : str
        MetaSchedule's own JSON of it: trace, seconds, target, arguments.
    seconds : float or None
        Of one run, lower is better; None for a failure.
    error : float or None
        Relative standard error of ``seconds``; None where it is not known.
    failure : str
        First line of what went wrong; empty for a success.
    features : ndarray of shape (d,), float32, or None
        What a cost model saw of the candidate.
    unix_sec : float
        When it was measured.
    run : str
        Names the run that measured it.
    environment : Environment
        Where it was measured.
    """

    record: str
    seconds: float | None
    error: float | None = None
    failure: str = ""
    features: Features | None = None
    unix_sec: float = 0.0
    run: str = ""
    environment: Environment = dataclasses.field(default=UNKNOWN, compare=False)


@dataclasses.dataclass(frozen=True)
class TaskStats:
    """What a store holds of a task.

    Attributes
    ----------
    task : StoredTask
    n_trials, n_failures : int
    best_sec : float or None
        None without a success.
    last_unix_sec : float
        When the last trial was measured.
    """

    task: StoredTask
    n_trials: int
    n_failures: int
    best_sec: float | None
    last_unix_sec: float
