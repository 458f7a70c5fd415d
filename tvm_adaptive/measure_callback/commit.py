"""Commit a measured round, without untried candidates, and remove its artifacts."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    CostModel,
    Database,
    MeasureCandidate,
    PyMeasureCallback,
    TuneContext,
    TuningRecord,
    derived_object,
    module_key,
    ms,
)
from tvm_adaptive.errors import is_machine_failure, summary_line
from tvm_adaptive.values.trial import Trial
from tvm_adaptive.values.trial_log import TrialLog

# Builder and runner have retried already. A machine that fails in so many rounds in a row
# will not recover by itself.
MAX_FAILED_ROUNDS = 3


@dataclasses.dataclass
class MachineHealth:
    """The machine's failures in the latest rounds."""

    n_failed_rounds: int = 0  # rounds in a row with a candidate that the machine failed

    def add_round(self, messages: Sequence[str | None]) -> str:
        """Count a round's error messages; return why the machine is broken, "" if it is not."""
        failed = [each for each in messages if each is not None and is_machine_failure(each)]
        self.n_failed_rounds = self.n_failed_rounds + 1 if failed else 0
        is_whole_round = 1 < len(messages) == len(failed)
        is_broken = is_whole_round or self.n_failed_rounds >= MAX_FAILED_ROUNDS
        return summary_line(failed[-1]) if failed and is_broken else ""


@derived_object
class CommitRound(PyMeasureCallback):  # type: ignore[misc]
    """Commit each round to a database and a cost model."""

    def __init__(
        self,
        contexts: Sequence[TuneContext],
        database: Database,
        cost_model: CostModel,
        on_broken_machine: Callable[[str], None],
        trial_log: TrialLog | None = None,
    ) -> None:
        super().__init__()
        self._contexts = list(contexts)
        self._database = database
        self._cost_model = cost_model
        self._on_broken_machine = on_broken_machine
        self._trial_log = trial_log
        self._health = MachineHealth()

    def apply(
        self,
        _task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[MeasureCandidate],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        """Commit one round."""
        context = self._contexts[task_id]
        rounds = list(zip(measure_candidates, builder_results, runner_results, strict=True))
        trials = [Trial.of(run, built) for _, built, run in rounds]
        workload = self._database.commit_workload(context.mod)
        taught = []
        for (candidate, built, run), trial in zip(rounds, trials, strict=True):
            if trial.is_untried:
                continue
            trace, seconds = candidate.sch.trace, trial.recorded_secs
            self._database.commit_tuning_record(
                TuningRecord(trace, workload, seconds, context.target, candidate.args_info)
            )
            # As in MetaSchedule, a cost model learns nothing of a failed build.
            if built.error_msg is None:
                taught.append((candidate, run))
                if self._trial_log is not None:  # runners do not see the candidate
                    artifact = str(built.artifact_path)
                    self._trial_log.identify(artifact, module_key(candidate.sch.mod))
        # Under the name of MetaSchedule's own callback, for its profiler's table.
        with ms.Profiler.timeit("MeasureCallback/UpdateCostModel"):
            self._cost_model.update(
                context, [candidate for candidate, _ in taught], [run for _, run in taught]
            )
        if reason := self._health.add_round([trial.failure for trial in trials]):
            self._on_broken_machine(reason)


@derived_object
class RemoveArtifacts(PyMeasureCallback):  # type: ignore[misc]
    """Remove the folders of each round's artifacts as far as possible.

    TVM's own callback raises where a folder stays: on NFS a library that a worker has loaded is
    only renamed.
    """

    def apply(
        self,
        _task_scheduler: Any,
        _task_id: int,
        _measure_candidates: Sequence[Any],
        builder_results: Sequence[Any],
        _runner_results: Sequence[Any],
    ) -> None:
        """Remove the artifacts of one round."""
        for built in builder_results:
            if built.artifact_path is not None:
                shutil.rmtree(Path(str(built.artifact_path)).parent, ignore_errors=True)
