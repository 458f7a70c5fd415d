"""FamilySeer's two ideas, each alone, both, and neither, by trials."""

from __future__ import annotations

from benchmarks.charts import Figure
from benchmarks.figures.common import best_chart
from benchmarks.journals import Bench
from benchmarks.methods import METHOD_SETS

_CAPTION = (
    "Best latency against trials: one model or a model per family, with and without foresee "
    "slots, no task knowing the schedules of its relatives; and ours, in which it does. "
    "FamilySeer's RFC has no such figure: it shows both ideas together, against Ansor."
)


def families_by_trials(bench: Bench) -> Figure:
    """Return the ablation that the RFC was asked for."""
    methods = [each for each in METHOD_SETS["families"] if each in bench.methods]
    panels = tuple(
        best_chart(bench, workload, methods, by_trials=True)
        for workload in bench.workloads
        # Without one of the two alone, nothing is told apart.
        if sum(bool(bench.of(workload, method)) for method in methods) > 2
    )
    return Figure("families-by-trials", _CAPTION, panels)
