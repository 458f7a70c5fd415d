"""AdaTune, figure 4: fixed shares of random candidates."""

from __future__ import annotations

from benchmarks.charts import Figure
from benchmarks.figures.common import best_chart
from benchmarks.journals import Bench
from benchmarks.methods import METHOD_SETS


def epsilons(bench: Bench) -> Figure:
    """Return one panel per workload: best against trials, one colour per epsilon."""
    methods = [name for name in METHOD_SETS["epsilon"] if name in bench.methods]
    panels = tuple(
        best_chart(bench, workload, methods, by_trials=True)
        for workload in bench.workloads
        if any(bench.of(workload, method) for method in methods)
    )
    caption = (
        "Best latency against trials with a fixed share of random candidates, and with the "
        "share that follows the model's uncertainty; batches of 64. AdaTune's figure 4 has "
        "the four fixed shares only, in AutoTVM's simulated annealing; here they are in the "
        "search on knobs, with a forest as cost model."
    )
    return Figure("epsilons", caption, panels)
