"""AdaTune, figures 7 and 8; DynaTune, figure 11: networks' latency and time to tune them."""

from __future__ import annotations

import math

from benchmarks.charts import Bars, Figure
from benchmarks.entries import BASELINE
from benchmarks.figures.common import ends_of_runs
from benchmarks.journals import FINAL, Bench, median_of
from benchmarks.results import anew, passage
from benchmarks.stats import median_interval
from benchmarks.workloads import WORKLOADS


def network_latency(bench: Bench) -> Figure:
    """Return AdaTune's figure 7: the networks' latency as timed anew."""
    panels = []
    for workload in _networks(bench):
        entries = bench.neutral.get(workload, {})
        values = {
            name: median_of(entries.get(name, {}).values()) for name in ("untuned", "pytorch")
        }
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
        "theirs after each had all its trials; here runs end by seconds or trials "
        f"({ends_of_runs(bench, _networks(bench))}). The graph is prepared by the options of each "
        "method, for stock with every convolution in its direct form only. PyTorch is what one "
        "would run instead."
    )
    return Figure("network-latency", caption, tuple(panels))


def network_time(bench: Bench) -> Figure:
    """Return AdaTune's figure 8: seconds to the baseline's final latency."""
    panels = []
    for workload in _networks(bench):
        bases = {run.spec.seed: anew(bench, run, FINAL) for run in bench.of(workload, BASELINE)}
        names, seconds = [], []
        for method in bench.methods:
            reached = [
                passage(bench, run, quality)
                for run in bench.of(workload, method)
                if (quality := bases.get(run.spec.seed))
            ]
            if not reached:
                continue
            latest = median_interval(reached)
            known = math.isfinite(latest.high)
            names.append(method if latest.is_exact else f"{method} ({'<' if known else '>'})")
            seconds.append(latest.high if known else latest.low)
        if names:
            panels.append(Bars(workload, "seconds", tuple(names), {"seconds": tuple(seconds)}))
    caption = (
        "Seconds until the latency as timed anew is within 3 % of the baseline's final one of "
        "the same seed, medians over seeds; where that is a bound, it has its sign. "
        "AdaTune's figure 8 gives the hours that AutoTVM and AdaTune need for all their trials; "
        f"here runs end by seconds or trials ({ends_of_runs(bench, _networks(bench))})."
    )
    return Figure("network-time", caption, tuple(panels))


def _networks(bench: Bench) -> list[str]:
    return [name for name in bench.workloads if name in WORKLOADS and WORKLOADS[name].is_network]
