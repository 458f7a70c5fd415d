"""The estimator of earlier tables, kept to print how it would have read beside today's. Pure.

It multiplies a run's whole recorded curve by what its winner takes when timed anew, over what
was recorded: a lucky minimum of the baseline makes its target easier, and a play-off's factor
is given to times before it. A run that never got there counts with its end.
"""

from __future__ import annotations

import math

from benchmarks.journals import Bench, Run
from benchmarks.stats import exactly, median_interval


def scaled_speed_up(bench: Bench, pairs: list[tuple[Run, Run]]) -> float | None:
    """Return the baseline's seconds to its final best over the other's, median of pairs."""
    ratios = []
    for base, run in pairs:
        quality_ms = base.curve.final_ms * _factor(bench, base)
        if math.isfinite(quality_ms):
            # Rounding must not place the baseline above its own quality.
            base_sec = _seconds_to(base, base.curve.final_ms)
            ratios.append(base_sec / _seconds_to(run, quality_ms / _factor(bench, run)))
    return median_interval([exactly(each) for each in ratios]).low if ratios else None


def _factor(bench: Bench, run: Run) -> float:
    factor = bench.neutral_ms(run) / run.curve.final_ms
    return factor if math.isfinite(factor) and factor > 0 else 1.0


def _seconds_to(run: Run, recorded_ms: float) -> float:
    steps = zip(run.curve.times_sec, run.curve.best_ms, strict=True)
    return next((time_sec for time_sec, ms in steps if ms <= recorded_ms), run.curve.end_sec)
