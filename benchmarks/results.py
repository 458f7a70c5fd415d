"""From runs to comparisons with the baseline. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from benchmarks.entries import BASELINE, equal_time_cut, equal_trials_cut
from benchmarks.journals import FINAL, Bench, Run
from benchmarks.stats import Reached, Spread, geometric_mean, inverse, spread, time_ratio

# Shares of the baseline's improvement.
SHARES = (0.5, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A method against the baseline on one workload; all above 1 is better than it.

    Attributes
    ----------
    workload, method : str
    n_pairs : int
        Seeds that both have and of which the baseline found something.
    speedup : dict of float to Spread or None
        Per share of the baseline's improvement: its seconds to that quality over the
        method's. Censored where the method never got there: the truth is below.
    equal_time : Spread or None
        The baseline's latency over the method's after the same seconds, timed anew.
        Censored where the baseline had none yet: the truth is above.
    equal_trials : Spread or None
        The same after the baseline's number of trials, where the method made as many.
    """

    workload: str
    method: str
    n_pairs: int
    speedup: dict[float, Spread | None]
    equal_time: Spread | None
    equal_trials: Spread | None


def comparisons(bench: Bench, baseline: str = BASELINE) -> list[Comparison]:
    """Return one comparison per workload and method that shares seeds with the baseline."""
    found = []
    for workload in bench.workloads:
        for method in bench.methods:
            pairs = list(pairs_of(bench, workload, method, baseline))
            if method != baseline and pairs:
                found.append(_compare(bench, workload, method, pairs))
    return found


def pairs_of(bench: Bench, workload: str, method: str, baseline: str) -> Iterator[tuple[Run, Run]]:
    """Yield the baseline's run and the method's for each seed that both have."""
    bases = {run.spec.seed: run for run in bench.of(workload, baseline)}
    for run in bench.of(workload, method):
        if run.spec.seed in bases:
            yield bases[run.spec.seed], run


def overall(found: Sequence[Comparison], method: str) -> dict[str, tuple[float, float, str]]:
    """Return geometric mean, worst and the worst's workload of a method over workloads.

    Returns
    -------
    dict of str to (float, float, str)
        Keys ``"50 %"``, ``"90 %"``, ``"100 %"``, ``"equal time"``, ``"equal trials"``;
        without those that no workload has. Censored medians enter with their bound.
    """
    mine = [each for each in found if each.method == method]
    columns: dict[str, list[tuple[float, str]]] = {}
    for each in mine:
        for name, value in columns_of(each).items():
            if value is not None and value.median.value > 0:
                columns.setdefault(name, []).append((value.median.value, each.workload))
    return {
        name: (geometric_mean([value for value, _ in values]), *min(values))
        for name, values in columns.items()
    }


def columns_of(each: Comparison) -> dict[str, Spread | None]:
    """Return a comparison's figures by their names in tables."""
    named = {f"{share:.0%}".replace("%", " %"): each.speedup[share] for share in SHARES}
    return {**named, "equal time": each.equal_time, "equal trials": each.equal_trials}


def losses(found: Sequence[Comparison]) -> list[tuple[str, str, str, float]]:
    """Return (method, workload, figure, value) wherever a median is below 1."""
    return [
        (each.method, each.workload, name, value.median.value)
        for each in found
        for name, value in columns_of(each).items()
        if value is not None and value.median.value < 1.0
    ]


def _compare(
    bench: Bench, workload: str, method: str, pairs: Sequence[tuple[Run, Run]]
) -> Comparison:
    speedup: dict[float, Spread | None] = {}
    for share in SHARES:
        ratios = [time_ratio(bench.curve(base), bench.curve(run), share) for base, run in pairs]
        found = spread([each for each in ratios if each is not None])
        speedup[share] = None if found is None else inverse(found)
    # Better than a baseline that found nothing is no merit; tables name such runs.
    pairs = [(base, run) for base, run in pairs if math.isfinite(base.curve.final_ms)]
    times = [_equal_time(bench, base, run) for base, run in pairs]
    same = [_equal_trials(bench, base, run) for base, run in pairs]
    return Comparison(
        workload,
        method,
        len(pairs),
        speedup,
        spread([each for each in times if each is not None]),
        spread([each for each in same if each is not None]),
    )


def _equal_time(bench: Bench, base: Run, run: Run) -> Reached | None:
    longer, n_trials = equal_time_cut(base, run)
    if n_trials == 0:
        if longer is run:
            return None
        ratio = _latency_ratio(bench.neutral_ms(base), bench.neutral_ms(run))
        return None if ratio is None else Reached(ratio.value, censored=True)
    cut_ms = bench.neutral_ms(longer, str(n_trials))
    if longer is base:
        return _latency_ratio(cut_ms, bench.neutral_ms(run))
    return _latency_ratio(bench.neutral_ms(base), cut_ms)


def _equal_trials(bench: Bench, base: Run, run: Run) -> Reached | None:
    if run.n_trials < base.n_trials:
        return None
    n_trials = equal_trials_cut(base, run)
    cut = FINAL if n_trials is None else str(n_trials)
    return _latency_ratio(bench.neutral_ms(base), bench.neutral_ms(run, cut))


def _latency_ratio(base_ms: float, other_ms: float) -> Reached | None:
    if not (math.isfinite(base_ms) and math.isfinite(other_ms)):
        return None
    return Reached(base_ms / other_ms)
