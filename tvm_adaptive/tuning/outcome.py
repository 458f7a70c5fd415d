"""The result of a run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class TaskOutcome:
    """The outcome of one task.

    Attributes
    ----------
    weight : float
        Calls per inference.
    best_sec : float
        The winner's time: from its play-off if it was timed in one, else the fastest
        recorded; without a trial, that of one call within the network; infinite without a
        result.
    played_off : bool
        Whether a play-off of this run, or an earlier run, has checked the outputs of the
        record with ``best_sec``.
    in_network : bool
        Whether they were checked within the network instead, by this run or an earlier one. If
        neither is true, the task stays untuned.
    is_drafted : bool
        Whether the task had no trial, and runs with a schedule that suits the processor.
    n_disqualified : int
        Finalists that computed something else than the untuned function, or crashed.
    group, form : str
        The part of the network that the task belongs to, and the form in which it computes
        that; empty for a task without alternatives.
    is_used : bool
        Whether the network is compiled in this form.
    """

    name: str
    weight: float
    n_trials: int
    n_errors: int
    best_sec: float
    played_off: bool = False
    n_disqualified: int = 0
    in_network: bool = False
    is_drafted: bool = False
    group: str = ""
    form: str = ""
    is_used: bool = True

    @property
    def checked(self) -> str:
        """Where outputs were checked: ``"play-off"``, ``"network"``, ``"no"``, ``"not used"``."""
        if not self.is_used:
            return "not used"
        return "play-off" if self.played_off else "network" if self.in_network else "no"


@dataclasses.dataclass(frozen=True)
class PeerTiming:
    """A framework that ran the same model in turns with the tuned library.

    Attributes
    ----------
    name : str
        As in :attr:`~tvm_adaptive.TuneConfig.peers`.
    framework : str
        Name and version.
    n_threads : int
        Of the framework and of the tuned library.
    secs, tuned_secs : tuple of float
        Latency of the framework and of the tuned library in each round, lower is better.
    max_abs, max_rel : float
        Largest absolute and relative difference of their outputs on the same inputs.
    agree : bool
        Whether the outputs agree within the tolerance.
    """

    name: str
    framework: str
    n_threads: int
    secs: tuple[float, ...]
    tuned_secs: tuple[float, ...]
    max_abs: float
    max_rel: float
    agree: bool

    @property
    def speedup(self) -> float:
        """Median over the rounds of the framework's latency over the library's; above 1 is faster.

        What a round does to both cancels, which it does not in a ratio of medians.
        """
        pairs = zip(self.secs, self.tuned_secs, strict=True)
        return statistics.median(theirs / tuned for theirs, tuned in pairs)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PeerTiming:
        """Return what a journal holds; KeyError, TypeError or ValueError of another version's."""
        secs = {name: tuple(map(float, fields[name])) for name in ("secs", "tuned_secs")}
        if not secs["secs"] or len(secs["secs"]) != len(secs["tuned_secs"]):
            raise ValueError("a framework has no rounds, or other rounds than the library")
        if not all(0.0 < sec < math.inf for sec in (*secs["secs"], *secs["tuned_secs"])):
            raise ValueError("a round took no time, or infinitely long")
        return cls(**{**_finite(fields), **secs})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The tuned model compared with its own framework, or with the untuned one without it.

    Attributes
    ----------
    before_sec, after_sec : float
        Latency before and after tuning; lower is better. ``before_sec`` is that of the
        framework if it is among ``peers``, else of the untuned model (also on GPUs and farms,
        where no framework is timed), and infinite if neither was timed. ``after_sec`` is
        infinite if there was no time for it after the outputs were found to be wrong.
    max_abs, max_rel : float
        Largest absolute and relative difference of their outputs on the same inputs.
    agree : bool
        Whether the outputs agree within the tolerance.
    framework : str
        The framework that computed the outputs, with its version; empty for the untuned model.
    peers : tuple of PeerTiming
        The frameworks that were timed, the model's own first.
    problem : str
        Where the outputs disagree, and which function that comes from; empty if they agree.
    """

    before_sec: float
    after_sec: float
    max_abs: float
    max_rel: float
    agree: bool
    framework: str = ""
    peers: tuple[PeerTiming, ...] = ()
    problem: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Comparison:
        """Return what a journal holds; KeyError, TypeError or ValueError of another version's."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = _finite({name: value for name, value in fields.items() if name in known})
        for name in ("before_sec", "after_sec", "max_abs", "max_rel"):
            values[name] = float(values[name])
        peers = tuple(PeerTiming.from_fields(peer) for peer in values.get("peers") or ())
        return cls(**{**values, "peers": peers})


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """The result of :func:`~tvm_adaptive.tune`.

    Attributes
    ----------
    work_dir : Path
        Contains everything below, and the journal.
    database_dir : Path
        MetaSchedule's JSON database to compile with: one checked record for each task that
        has one.
    library : Path or None
        The tuned network, ready to load; None for operators and interrupted runs.
    comparison : Comparison or None
        None when the run was interrupted before it, or had no time for it.
    coverage : str
        Which functions run with a tuned schedule, in words.
    weighted_sec : float
        Sum over tasks of calls times best: the expected latency.
    errors : dict of str to int
        Messages of failed trials, with their counts.
    stage_secs : dict of str to float
        Seconds of each stage, in all attempts on this machine.
    shortfall : str
        What the budget was too short for, or why there is no comparison, in words; empty
        otherwise.
    is_compiled : bool
        Whether the library is compiled with ``database_dir``. Otherwise it is an earlier
        attempt's or untuned, or there is none.
    failure : str
        The error of TVM, the linker or the disk because of which it is not, in words; empty
        otherwise.
    stopped : str
        Seconds of the run, and why its search ended before they were spent, in words; empty
        otherwise.
    machine_failure : str
        What the machine could not do, for which the run was interrupted, in words; empty
        otherwise, as after a signal.
    """

    what: str
    target: str
    work_dir: Path
    database_dir: Path
    library: Path | None
    tasks: tuple[TaskOutcome, ...]
    comparison: Comparison | None
    coverage: str
    weighted_sec: float
    errors: dict[str, int]
    stage_secs: dict[str, float]
    elapsed_sec: float
    interrupted: bool
    shortfall: str = ""
    stopped: str = ""
    is_compiled: bool = True
    failure: str = ""
    machine_failure: str = ""

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(task.n_trials for task in self.tasks)

    @property
    def n_errors(self) -> int:
        """Failed trials of all tasks."""
        return sum(task.n_errors for task in self.tasks)

    def as_fields(self) -> dict[str, Any]:
        """Return a JSON-ready mapping, for the journal."""
        fields = dataclasses.asdict(self)
        for name in ("work_dir", "database_dir", "library"):
            fields[name] = None if fields[name] is None else str(fields[name])
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TuneReport:
        """Return what a journal holds; KeyError, TypeError or ValueError of another version's."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in fields.items() if name in known}
        for name in ("work_dir", "database_dir", "library"):
            values[name] = None if values[name] is None else Path(values[name])
        values["tasks"] = tuple(TaskOutcome(**_finite(task)) for task in values["tasks"])
        if values["comparison"] is not None:
            values["comparison"] = Comparison.from_fields(values["comparison"])
        return cls(**_finite(values))


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a journal's fields with infinity for seconds and differences that are None."""
    return {
        name: math.inf if value is None and name.endswith(("_sec", "max_abs", "max_rel")) else value
        for name, value in fields.items()
    }
