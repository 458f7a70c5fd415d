"""AdaTune, figures 7 and 8; DynaTune, figure 11: networks' latency and time to tune them."""

from __future__ import annotations

import math

from benchmarks.charts import Bars, Figure
from benchmarks.entries import BASELINE
from benchmarks.journals import Bench, median_of
from benchmarks.stats import time_to
from benchmarks.workloads import WORKLOADS

# Whoever is within that of the baseline's end counts as being there.
_TOLERANCE = 1.01


def network_latency(bench: Bench) -> Figure:
    """Return AdaTune's figure 7: the networks' latency as timed anew."""
    panels = []
    for workload in _networks(bench):
        entries = bench.neutral.get(workload, {})
        values = {name: median_of(entries.get(name)) for name in ("untuned", "pytorch")}
        for method in bench.methods:
            runs = bench.of(workload, method)
            values[method] = median_of(bench.neutral_ms(run) for run in runs)
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        panels.append(
            Bars(workload, "ms", tuple(values), {"one inference": tuple(values.values())})
        )
    caption = (
        "Latency of networks, batch 1, fp32, medians over seeds, all timed in the same rounds. "
        "AdaTune's figure 7 and DynaTune's figure 11 compare TVM without tuning, AutoTVM and "
        "theirs after each had all its trials; here stock and ours had the same seconds and "
        "the same prepared graph, and PyTorch is what one would run instead."
    )
    return Figure("network-latency", caption, tuple(panels))


def network_time(bench: Bench) -> Figure:
    """Return AdaTune's figure 8: seconds to the baseline's final latency."""
    panels = []
    for workload in _networks(bench):
        ends = [bench.curve(run).final_ms for run in bench.of(workload, BASELINE)]
        if not ends:
            continue
        quality_ms = median_of(ends) * _TOLERANCE
        names, seconds = [], []
        for method in bench.methods:
            reached = [time_to(bench.curve(run), quality_ms) for run in bench.of(workload, method)]
            if not reached:
                continue
            missed = sum(each.censored for each in reached)
            names.append(f"{method} ({missed} of {len(reached)} never)" if missed else method)
            seconds.append(median_of(each.value for each in reached))
        panels.append(Bars(workload, "seconds", tuple(names), {"seconds": tuple(seconds)}))
    caption = (
        "Seconds until the latency is within 1 % of the baseline's final one, medians over "
        "seeds; a run that never got there counts with its end. AdaTune's figure 8 gives the "
        "hours that AutoTVM and AdaTune need for all their trials; here runs end by the clock."
    )
    return Figure("network-time", caption, tuple(panels))


def _networks(bench: Bench) -> list[str]:
    return [name for name in bench.workloads if name in WORKLOADS and WORKLOADS[name].is_network]
