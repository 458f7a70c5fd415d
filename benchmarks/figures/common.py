"""What several figures share. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.charts import Chart, Line
from benchmarks.journals import Bench
from benchmarks.methods import METHOD_SETS, METHODS
from benchmarks.plan import RunSpec
from benchmarks.stats import Curve, median_curve


def label_of(method: str) -> str:
    """Return what a legend calls a method."""
    return f"{method}: {METHODS[method].what}" if method in METHODS else method


def ends_of_runs(bench: Bench, workloads: Sequence[str]) -> str:
    """Return after how many seconds or trials the runs of each method end."""
    found = []
    for method in bench.methods:
        runs = [run for workload in workloads for run in bench.of(workload, method)]
        if ends := dict.fromkeys(_end_of(run.spec) for run in runs):
            found.append(f"{method} after {' or '.join(ends)}")
    return ", ".join(found)


def _end_of(spec: RunSpec) -> str:
    seconds = [] if spec.budget_sec is None else [f"{spec.budget_sec:g} s"]
    trials = [] if spec.trials is None else [f"{spec.trials} trials"]
    return " or ".join([*seconds, *trials])


def curve_lines(label: str, curves: Sequence[Curve]) -> list[Line]:
    """Return one thin line per run and their median, best against seconds."""
    lines = []
    for curve in curves:
        x, y = (*curve.times_sec, curve.end_sec), (*curve.best_ms, curve.final_ms)
        lines.append(Line(label, x, y, thick=False, steps=True))
    times = sorted({time for curve in curves for time in (*curve.times_sec, curve.end_sec)})
    lines.append(Line(label, tuple(times), tuple(median_curve(curves, times)), steps=True))
    return lines


def trial_lines(label: str, curves: Sequence[Curve]) -> list[Line]:
    """Return one thin line per run and their median, best against trials."""
    lines = [
        Line(label, tuple(map(float, curve.trials)), curve.best_ms, thick=False, steps=True)
        for curve in curves
    ]
    counts = sorted({n for curve in curves for n in curve.trials})
    middles = tuple(statistics.median(curve.at_trial(n) for curve in curves) for n in counts)
    lines.append(Line(label, tuple(map(float, counts)), middles, steps=True))
    return lines


def best_chart(
    bench: Bench, workload: str, methods: Sequence[str], *, by_trials: bool = False
) -> Chart:
    """Return best latency of methods on one workload, against seconds or trials."""
    lines: list[Line] = []
    make = trial_lines if by_trials else curve_lines
    for method in methods:
        curves = [run.curve for run in bench.of(workload, method)]
        lines += make(label_of(method), curves) if curves else []
    x_label = "trials" if by_trials else "seconds of tuning"
    values = [y for line in lines for y in line.y if math.isfinite(y) and y > 0]
    # On a linear axis a first guess a hundred times slower hides everything else.
    wide = bool(values) and max(values) > 3 * min(values)
    return Chart(workload, x_label, "best latency, ms", tuple(lines), log_y=wide)


def ablation_charts(bench: Bench, method_set: str, *, by_trials: bool) -> tuple[Chart, ...]:
    """Return best latency of a set of methods, for workloads with more than two of them."""
    methods = [each for each in METHOD_SETS[method_set] if each in bench.methods]
    return tuple(
        best_chart(bench, workload, methods, by_trials=by_trials)
        for workload in bench.workloads
        if sum(bool(bench.of(workload, method)) for method in methods) > 2
    )
