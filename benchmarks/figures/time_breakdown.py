"""AdaTune, figures 2 and 9; DynaTune, figure 12: where the time goes."""

from __future__ import annotations

from benchmarks.charts import Bars, Figure
from benchmarks.figures.common import ends_of_runs
from benchmarks.journals import Bench, median_of

PARTS = ("start", "propose", "build", "measure", "learn")
REST = "before and after"


def time_breakdown(bench: Bench) -> Figure:
    """Return one panel per workload, one stacked bar per method."""
    panels = []
    for workload in bench.workloads:
        methods = [method for method in bench.methods if bench.of(workload, method)]
        parts: dict[str, tuple[float, ...]] = {}
        for part in (*PARTS, REST):
            values = []
            for method in methods:
                seconds = [_seconds(run.stages, part) for run in bench.of(workload, method)]
                values.append(median_of(seconds))
            parts[part] = tuple(values)
        panels.append(Bars(workload, "seconds", tuple(methods), parts))
    caption = (
        "Seconds of a run by what they were spent on, medians over seeds. AdaTune's figures 2 "
        "and 9 and DynaTune's figure 12 split AutoTVM's tuning into hardware measurement, "
        "search and model; MetaSchedule builds separately from measuring and sets its tasks "
        "up first, and both are shown. Each bar is the whole run, which ends by seconds or trials "
        f"({ends_of_runs(bench, bench.workloads)})."
    )
    return Figure("time-breakdown", caption, tuple(panels))


def _seconds(stages: dict[str, float], part: str) -> float:
    if part == REST:
        return sum(seconds for name, seconds in stages.items() if name not in PARTS)
    return stages.get(part, 0.0)
