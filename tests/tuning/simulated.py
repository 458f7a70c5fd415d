"""A simulated clock, compiler and device, which make a run with a seed reproducible.

Search, cost model and task scheduler are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tvm_adaptive._tvm import (
    BuilderInput,
    BuilderResult,
    PyBuilder,
    PyRunner,
    RunnerInput,
    RunnerResult,
    derived_object,
    module_key,
)
from tvm_adaptive.runner.local import MeasurementFuture
from tvm_adaptive.values.trial_log import TrialLog


class SimulatedClock:
    """A clock that its users advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self.seconds


@derived_object
class SimulatedBuilder(PyBuilder):  # type: ignore[misc]
    """Builds nothing, in a given time."""

    def __init__(
        self,
        clock: SimulatedClock,
        seconds_of: Callable[[int], float],
        trial_log: TrialLog | None = None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_of = seconds_of
        self._trial_log = trial_log

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Return for each program an artifact named after its hash."""
        keys = [module_key(each.mod) for each in build_inputs]
        for key in keys:
            seconds = self._seconds_of(key)
            self._clock.seconds += seconds
            if self._trial_log is not None:
                self._trial_log.note(key, build_sec=seconds)
        return [BuilderResult(str(key), None) for key in keys]


@derived_object
class SimulatedRunner(PyRunner):  # type: ignore[misc]
    """Runs nothing, and returns given times."""

    def __init__(
        self,
        clock: SimulatedClock,
        latency_sec_of: Callable[[int], float | None],
        trial_sec: float = 0.1,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._latency_sec_of = latency_sec_of
        self._trial_sec = trial_sec

    def run(self, runner_inputs: list[RunnerInput]) -> list[MeasurementFuture]:
        """Return the time of each artifact of a :class:`SimulatedBuilder`."""
        self._clock.seconds += self._trial_sec * len(runner_inputs)
        found = [self._latency_sec_of(int(str(each.artifact_path))) for each in runner_inputs]
        return [_measured(seconds) for seconds in found]


def _measured(seconds: float | None) -> MeasurementFuture:
    answer: Future[RunnerResult] = Future()
    failed = RunnerResult(None, "made to fail")
    answer.set_result(failed if seconds is None else RunnerResult([seconds], None))
    return MeasurementFuture(answer)
