"""AdaTune, figure 6: best result against wall-clock seconds."""

from __future__ import annotations

from benchmarks.charts import Figure
from benchmarks.figures.common import best_chart
from benchmarks.journals import Bench


def best_by_seconds(bench: Bench) -> Figure:
    """Return one panel per workload, all methods, one thin line per seed."""
    panels = tuple(best_chart(bench, workload, bench.methods) for workload in bench.workloads)
    caption = (
        "Best latency against wall-clock seconds of tuning, lower is better: every seed thin, "
        "their median thick, as the runs recorded it. AdaTune's figure 6 shows GFLOP/s of "
        "single operators on a Xeon E5-2690 v3 and NVIDIA GPUs against AutoTVM; here the "
        "baseline is stock MetaSchedule, and networks are among the workloads."
    )
    return Figure("best-by-seconds", caption, panels)
