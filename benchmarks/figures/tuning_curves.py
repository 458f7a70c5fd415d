"""DynaTune, figures 4, 13 and 19: tuning curves, the fit of one, and a chain's trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.charts import Chart, Figure, Line
from tvm_adaptive.task_scheduler.arms import best_so_far
from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER
from tvm_adaptive.task_scheduler.forecast.emcee_chains import (
    Posterior,
    fit_least_squares,
    last_segment,
    run_chain,
)
from tvm_adaptive.task_scheduler.forecast.result import NoFitError
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.values.trial import FloatArray

# Fits are shown after these shares of a recording, and go on to its end.
FIT_SHARES = (0.25, 0.5)
# In multiples of the best so far; nothing in a history tells where its curve ends.
_CEILING = 2.0
# Enough trials for a fit to mean something.
_LEAST_TRIALS = 32
_SEED = 0


def tuning_curves(recordings: Sequence[Recording]) -> Figure:
    """Return DynaTune's figure 4: one line per operator."""
    panels = []
    for recording in recordings:
        lines = []
        for task in recording.tasks:
            if task.is_valid:
                x, best = history(task)
                label = "operators"
                lines.append(Line(label, tuple(x), tuple(best / best[-1]), thick=False, steps=True))
        panels.append(Chart(recording.network, "trials", "best throughput / final", tuple(lines)))
    caption = (
        "Best throughput of each operator against its trials, relative to its end. DynaTune's "
        "figure 4 has four operators of ResNet-18 under AutoTVM, in GFLOP/s."
    )
    return Figure("tuning-curves", caption, tuple(panels))


def curve_fits(recordings: Sequence[Recording]) -> Figure:
    """Return DynaTune's figure 13: one operator and the curves fitted to its start."""
    panels = []
    for recording in recordings:
        task = most_often_improved(recording)
        if task is None:
            continue
        x, best = history(task)
        lines = [Line("measured", tuple(x), tuple(best), steps=True)]
        for share in FIT_SHARES:
            known = int(share * len(x))
            start = last_segment(best[:known])
            steps = np.arange(1.0, known - start + 1)
            try:
                fit = fit_least_squares(
                    LOG_POWER, steps, best[start:known] / best[known - 1], ceiling=_CEILING
                )
            except NoFitError:
                continue
            ahead = np.arange(1.0, len(x) - start + 1)
            y = LOG_POWER.evaluate(ahead, fit.theta) * best[known - 1]
            lines.append(Line(f"fit to {share:.0%}", tuple(x[start:]), tuple(y)))
        panels.append(
            Chart(f"{recording.network}: {task.name}", "trials", "runs per ms", tuple(lines))
        )
    caption = (
        "The best throughput of the operator whose best improved most often, for a curve of one "
        f"step says nothing, and the curve {LOG_POWER.formula} fitted to its first trials. "
        "DynaTune's figure 13 shows one operator of its own measurements in GFLOP/s."
    )
    return Figure("curve-fits", caption, tuple(panels))


def chain_traces(recordings: Sequence[Recording]) -> Figure:
    """Return DynaTune's figure 19: the walkers' places against steps."""
    panels: list[Chart] = []
    for recording in recordings[:1]:
        task = most_often_improved(recording)
        if task is None:
            continue
        x, best = history(task)
        known = int(FIT_SHARES[-1] * len(x))
        start = last_segment(best[:known])
        steps = np.arange(1.0, known - start + 1)
        posterior = Posterior(LOG_POWER, steps, best[start:known] / best[known - 1], _CEILING)
        try:
            chain = run_chain(posterior, np.random.default_rng(_SEED))
        except NoFitError:
            continue
        names = ["amplitude", *(parameter.name for parameter in LOG_POWER.parameters)]
        panels += [
            _trace(f"{recording.network}: {name}", chain[:, :, column])
            for column, name in enumerate(names)
        ]
    caption = (
        "Ten walkers of the ensemble sampler, which the preset paper uses, against steps. As "
        "DynaTune's figure 19, on a recording of this machine; the chains start 0.05 of each "
        "parameter's range apart, where the paper's start almost in one point."
    )
    return Figure("chain-traces", caption, tuple(panels))


def history(task: TaskRecording) -> tuple[FloatArray, FloatArray]:
    """Return trials from the first success on, counted from 1, and the best runs per ms."""
    first = int(np.argmax(np.isfinite(task.latencies_ms)))
    best = 1.0 / best_so_far(task.latencies_ms[first:])
    return np.arange(1.0, len(best) + 1), best


def most_often_improved(recording: Recording) -> TaskRecording | None:
    """Return the operator whose curve has most steps among those with trials enough."""
    fit_for = [t for t in recording.tasks if t.is_valid and t.n_trials >= _LEAST_TRIALS]
    return max(fit_for, key=lambda task: len(np.unique(history(task)[1])), default=None)


def _trace(title: str, places: FloatArray) -> Chart:
    steps = tuple(map(float, range(len(places))))
    lines = tuple(Line("walkers", steps, tuple(column), thick=False) for column in places.T)
    return Chart(title, "step", "", lines)
